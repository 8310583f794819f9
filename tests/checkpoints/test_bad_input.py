"""A size that cannot be, in any key of any format, is one sentence, and nothing of that size is made before it."""

import copy
import json
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sbeval.checkpoints import load_checkpoint
from sbeval.errors import UserError
from sbeval.models import SbevalForCausalLM
from tests.checkpoints.layouts import Made, dolomite, fla, save, with_experts
from tests.checkpoints.test_forgetting import PRO, fla_forgetting, fox
from tests.checkpoints.test_lm_engine import MOE, lm_engine
from tests.checkpoints.test_moduleformer import checkpoint as moduleformer
from tests.models.small import small_config


def _own() -> Made:
    overrides = [{}, {"intermediate_size": 24, "num_experts": 3}]
    config = small_config(num_experts=4, num_experts_per_token=2, layer_overrides=overrides)
    torch.manual_seed(0)
    return json.loads(config.to_json_string()), SbevalForCausalLM(config).state_dict()


FORMATS: dict[str, Callable[[], Made]] = {
    "flat": lambda: dolomite(kv_heads=2),
    "flat mixture": lambda: with_experts(*dolomite(kv_heads=2), shared=16),
    "blocks": lambda: dolomite(model_type="gpt_base", head_bias=True, head_norm=True),
    "lm-engine": lambda: lm_engine(mixer={"head_dim": 8, "sliding_window": 3}, mlp=MOE),
    "fla": lambda: fla(qkv_bias=True, qk_norm=True, kv_heads=2, tied=False),
    "fla forgetting": lambda: fla_forgetting(kv_heads=2),
    "fox": lambda: fox(**PRO),
    "moduleformer": lambda: moduleformer("mlp"),
    "own": _own,
}
# lengths, of which nothing is made, and what tensors say better
WITHOUT_SIZE = (
    *("n_positions", "max_position_embeddings", "training_length_tokens", "sliding_window", "block_size"),
    *("history_length", "hidden_ratio", "original_max_position_embeddings", "chunk_size_feed_forward"),
)
KINDS = [-1, "4", 2.5, True, {"of": 4}]
HUGE = 10**9


def sizes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where whole numbers lie in a configuration, tokens and what is ignored aside."""
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from sizes(one, (*path, key))
    elif type(value) is int and not re.search("token_id|dropout|rope_theta", str(path[-1])):
        yield path


def changed(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    place: Any = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return config


@pytest.mark.parametrize("made", FORMATS)
def test_a_size_that_cannot_be_is_one_sentence_and_costs_no_memory(made: str, tmp_path: Path) -> None:
    config, tensors = FORMATS[made]()
    load_checkpoint(save(tmp_path, config, tensors))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    passed, refusals = [], set()
    for path in sizes(config):
        for value in [*KINDS, HUGE]:
            (tmp_path / "config.json").write_text(json.dumps(changed(config, path, value)))
            try:
                load_checkpoint(tmp_path)
                passed.append((path, value))
            except UserError as error:
                refusals.add(str(error))
    assert not any("\n" in refusal for refusal in refusals)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 200 * 1024
    assert [one for one in passed if one[0][-1] not in WITHOUT_SIZE or one[1] in KINDS] == []


@pytest.mark.parametrize("made", FORMATS)
def test_a_file_that_is_no_part_of_a_checkpoint_is_not_opened(made: str, tmp_path: Path) -> None:
    config, tensors = FORMATS[made]()
    folder = save(tmp_path / "inside", config, tensors)
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    names = load_file(tmp_path / "outside.safetensors")
    for shard in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "", "..", "a\0b", 3):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
        with pytest.raises(UserError, match=r"is not a(n| valid) index of shards"):
            load_checkpoint(folder)
