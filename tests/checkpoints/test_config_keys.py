"""No key of a configuration is passed over: those that the public sources declare, and any other."""

import copy
import json
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers
from other_machines import assert_equal_but_for_rounding

from sbeval.checkpoints import ignored, load_checkpoint
from sbeval.errors import UserError
from tests.checkpoints.config_keys import KEYS_FILE, declared_keys
from tests.checkpoints.layouts import Made, dolomite, fla, logits, save, with_experts
from tests.checkpoints.test_forgetting import PRO, fla_forgetting, fox
from tests.checkpoints.test_fox_stickbreaking import fox_stickbreaking
from tests.checkpoints.test_moduleformer import checkpoint as moduleformer

DECLARED: dict[str, dict[str, str]] = json.loads(KEYS_FILE.read_text())
NEW_KEY = "normalised_twice"


class Part(NamedTuple):
    """A part of a configuration: a checkpoint that has it, where it lies in there, and what is ignored in it."""

    checkpoint: Callable[[], Made]
    place: Callable[[dict[str, Any]], list[dict[str, Any]]]
    ignored: ignored.Ignored
    refused: frozenset[str] = frozenset()


def _whole(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [config]


def _blocks(mixer: str) -> Made:
    extra: dict[str, Any] = {"head_bias": True, "head_norm": True} if mixer == "stickbreaking" else {}
    # either of these says when a configuration was written, and with that how its MLPs are laid out
    dated = {"embedding_init_method": "normal", "use_depth_scaled_init": True}
    return dolomite(model_type="gpt_base", mixer=mixer, **extra, **dated)


_mixers, _mlps = itemgetter("sequence_mixer_blocks"), itemgetter("mlp_blocks")
ROPE: ignored.Ignored = dict.fromkeys(ignored.DOLOMITE_ROPE)
FLAT = ignored.DOLOMITE_FLAT | ROPE
PARTS = {
    "flat": Part(lambda: dolomite(), _whole, FLAT),
    "flat mixture": Part(
        lambda: with_experts(*dolomite()),
        _whole,
        FLAT | ignored.DOLOMITE_FLAT_MIXTURE,
        refused=frozenset({"normalize_expert_weights"}),  # gone before there was stick-breaking
    ),
    "blocks": Part(lambda: _blocks("stickbreaking"), _whole, ignored.DOLOMITE_BLOCKS | ROPE),
    "softmax_attention": Part(lambda: _blocks("softmax"), _mixers, ignored.DOLOMITE_BLOCK),
    "stickbreaking_attention": Part(lambda: _blocks("stickbreaking"), _mixers, ignored.DOLOMITE_BLOCK),
    "MLP": Part(lambda: _blocks("softmax"), _mlps, ignored.DOLOMITE_BLOCK),
    "MoE": Part(lambda: with_experts(*_blocks("softmax")), _mlps, ignored.DOLOMITE_BLOCK),
    "fla": Part(lambda: fla(qkv_bias=False, qk_norm=False, kv_heads=2, tied=True), _whole, ignored.FLA),
    "fla forgetting": Part(lambda: fla_forgetting(), _whole, ignored.FLA_FORGETTING),
    "fox": Part(lambda: fox(use_rope=True, **PRO), _whole, ignored.FOX),
    "fox softmax": Part(lambda: fox(model_type="transformer-project_fox"), _whole, ignored.FOX_SOFTMAX),
    "fox stickbreaking": Part(
        lambda: fox_stickbreaking(use_rope=True, num_kv_heads=2), _whole, ignored.FOX_STICKBREAKING
    ),
    "moduleformer": Part(lambda: moduleformer("mlp"), _whole, ignored.MODULEFORMER),
}


def with_key(part: str, folder: Path, key: str, value: Any) -> Any:
    """Loads a part's checkpoint with a key of another value."""
    config, tensors = PARTS[part].checkpoint()
    config = copy.deepcopy(config)
    for place in PARTS[part].place(config):
        place[key] = value
    return load_checkpoint(save(folder, config, tensors)).model


@pytest.mark.parametrize("part", PARTS)
def test_every_key_of_the_sources_is_read_or_known_to_change_nothing(part: str, tmp_path: Path) -> None:
    plain = logits(load_checkpoint(save(tmp_path, *PARTS[part].checkpoint())).model)
    allowed = ignored.TRANSFORMERS | PARTS[part].ignored
    unknown = set()
    for key in sorted(set(DECLARED[part]) - {"model_type"}):
        refusal, found = "", plain
        try:
            found = logits(with_key(part, tmp_path, key, {"of": "no kind"}))
        except UserError as error:
            refusal = str(error)
        assert key in refusal or allowed.get(key, "read") is None, f"{key} is read, but an object made no difference"
        assert_equal_but_for_rounding(found, plain)
        if "has the unknown key" in refusal:
            unknown.add(key)
    assert unknown == PARTS[part].refused


@pytest.mark.parametrize("part", PARTS)
def test_a_key_that_no_source_declares_is_an_error_with_its_value_and_those_known(part: str, tmp_path: Path) -> None:
    assert NEW_KEY not in DECLARED[part]
    known = next(key for key in PARTS[part].ignored if key in DECLARED[part])
    with pytest.raises(UserError, match=rf"'{NEW_KEY}' with the value 'always'.*known keys are .*\b{known}\b"):
        with_key(part, tmp_path, NEW_KEY, "always")


@pytest.mark.parametrize("part", PARTS)
def test_what_is_ignored_with_some_values_is_refused_with_others(part: str, tmp_path: Path) -> None:
    limited = {key: values for key, values in PARTS[part].ignored.items() if values is not None}
    for key, values in limited.items():
        with_key(part, tmp_path, key, values[0])
        with pytest.raises(UserError, match=f"{key} 'other' in .* is not supported; supported: "):
            with_key(part, tmp_path, key, "other")


def test_nothing_is_ignored_that_no_source_declares() -> None:
    declared = {key for keys in DECLARED.values() for key in keys} | {"rope_parameters"}
    assert {key for part in PARTS.values() for key in part.ignored} <= declared


def test_a_model_whose_numbers_are_quantised_or_decoded_otherwise_is_refused(tmp_path: Path) -> None:
    refused = {"quantization_config": {"bits": 4}, "repetition_penalty": 1.3, "pruned_heads": {"0": [1]}}
    for key, value in refused.items():
        with pytest.raises(UserError, match=key):
            with_key("flat", tmp_path, key, value)
    assert with_key("flat", tmp_path, "repetition_penalty", 1.0) is not None


def test_the_list_of_keys_follows_the_sources() -> None:
    source = """
class SoftmaxAttentionArgs(BaseArgs):
    head_dim: int | None = None
    softcap: float = 0

class CommonConfig(PretrainedConfig):
    def __init__(self, hidden_size=768, *, m_emb=None, **kwargs):
        self.multi_query = True

class Other:
    unrelated: int = 0
"""
    assert declared_keys(source, ("SoftmaxAttentionArgs",)) == {"head_dim", "softcap"}
    assert declared_keys(source, ("CommonConfig",)) == {"hidden_size", "m_emb", "multi_query"}


def test_what_transformers_writes_into_every_configuration_is_known() -> None:
    written = transformers.PretrainedConfig().to_dict()
    known = ignored.TRANSFORMERS
    read = {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"}
    assert set(written) - read <= set(known)
    limited = {key: values for key, values in known.items() if values is not None}
    assert all(value in limited[key] for key, value in written.items() if key in limited)
