"""RoPE scaling at evaluation: set for each request, independent of their order, and removed afterwards."""

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from corpus_problems import sharpened

from sbeval.errors import UserError
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.model_adapters.rope import RequestRope
from tests.marks import exhaustive
from tests.model_adapters.small import SIZES, Checkpoints, english, generated, likelihoods, load_lm, tiny_tokenizer

SCALINGS: list[Any] = [
    "linear:4",
    "dynamic:4",
    "dynamic:1",
    "yarn:4",
    {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4},
]
ORIGINAL = 32  # training length in tokens, shorter than most texts below
TEXTS = [english()[:length] for length in (20, 60, 130, 60, 300)]


def load(checkpoint: Checkpoints, architecture: str, **kwargs: Any) -> StickBreakingLM:
    return load_lm(checkpoint(architecture), **{"training_length": ORIGINAL, "max_length": 512, **kwargs})


def scores(lm: StickBreakingLM, texts: Sequence[str]) -> list[float]:
    return likelihoods(lm, [(text[:5], text[5:]) for text in texts])


def continuations(lm: StickBreakingLM, texts: Sequence[str]) -> list[str]:
    return generated(lm, [(text, {"max_gen_toks": 6}) for text in texts])


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "gemma3", "rope"])
def test_results_depend_on_no_other_request(architecture: str, scaling: Any, checkpoint: Checkpoints) -> None:
    if isinstance(scaling, dict):
        scaling = {**scaling, "original_max_position_embeddings": ORIGINAL}
    lm = load(checkpoint, architecture, rope_scaling=scaling, batch_size=3)
    forwards, backwards = scores(lm, TEXTS), scores(lm, TEXTS[::-1])[::-1]
    one_by_one = [scores(lm, [text])[0] for text in TEXTS]
    assert forwards == pytest.approx(backwards, rel=1e-5)
    assert forwards == pytest.approx(one_by_one, rel=1e-5)
    written = continuations(lm, TEXTS)
    assert written == continuations(lm, TEXTS[::-1])[::-1]
    assert written == [continuations(lm, [text])[0] for text in TEXTS]
    assert scores(lm, TEXTS) == pytest.approx(forwards, rel=1e-5)


@pytest.mark.parametrize("scaling", SCALINGS[:4])
def test_scaling_changes_results_and_the_model_stays_as_it_was(scaling: str, checkpoint: Checkpoints) -> None:
    plain = load(checkpoint, "llama")
    lm = load(checkpoint, "llama", rope_scaling=scaling)
    assert scores(lm, TEXTS)[-1] != pytest.approx(scores(plain, TEXTS)[-1], rel=1e-4)
    input_ids = torch.arange(100)[None]
    with torch.no_grad():
        assert torch.equal(lm.model(input_ids).logits, plain.model(input_ids).logits)


@pytest.mark.parametrize("architecture", ["llama", "rope"])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_dynamic_scaling_raises_the_base_by_length(architecture: str, factor: float, checkpoint: Checkpoints) -> None:
    lm = load(checkpoint, architecture, rope_scaling=f"dynamic:{factor:g}")
    head_dim = 8
    for text in TEXTS:
        length = len(lm.tok_encode(text)) - 1
        raised = max(1.0, factor * max(length, ORIGINAL) / ORIGINAL - (factor - 1)) ** (head_dim / (head_dim - 2))
        own = load(checkpoint, architecture).model.config.rope_parameters["rope_theta"]
        by_hand = load(checkpoint, architecture, rope_scaling={"rope_type": "default", "rope_theta": own * raised})
        assert scores(lm, [text]) == pytest.approx(scores(by_hand, [text]), rel=1e-5)


def test_a_checkpoints_own_dynamic_scaling_depends_on_no_other_request(checkpoint: Checkpoints) -> None:
    lm = load(checkpoint, "llama")
    lm.model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    lm.model.save_pretrained(folder := checkpoint("llama").parent / "dynamic")
    lm.tokenizer.save_pretrained(folder)
    own = load_lm(folder, max_length=512, training_length=ORIGINAL)
    assert scores(own, TEXTS) == pytest.approx(scores(load(checkpoint, "llama", rope_scaling="dynamic:2"), TEXTS))
    assert scores(own, TEXTS) == pytest.approx(scores(own, TEXTS[::-1])[::-1], rel=1e-5)
    assert own.get_model_info()["sbeval"]["rope_scaling"]["rope_type"] == "dynamic"


FACTORS = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [2.0, 3.0, 5.0, 8.0], "rope_theta": 1e4}
ENTRIES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, **FACTORS},
    "default": {"rope_type": "default", "rope_theta": 1e4},
}
LAYERS = ("full_attention", "sliding_attention")


def with_layers(folder: Path, architecture: str, *kinds: str) -> Path:
    """A model with a full-attention layer and a sliding-window layer, each with its own rotary embedding."""
    small: dict[str, Any] = {
        **SIZES,
        "layer_types": list(LAYERS),
        "sliding_window": 16,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    longest = 128 if "longrope" in kinds else ORIGINAL
    small |= {"max_position_embeddings": longest, "pad_token_id": 2, "local_attention": 16}
    rotations = {layer: dict(ENTRIES[kind]) for layer, kind in zip(LAYERS, kinds, strict=True)}
    tokenizer = tiny_tokenizer(adds_bos=False)
    config = transformers.AutoConfig.for_model(
        architecture, vocab_size=len(tokenizer), rope_parameters=rotations, **small
    )
    torch.manual_seed(0)
    sharpened(transformers.AutoModelForCausalLM.from_config(config), 8.0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def fresh_scores(lm: StickBreakingLM, folder: Path, texts: Sequence[str]) -> list[float]:
    """Returns log-likelihoods, each from one forward pass of a model that read nothing before."""
    scores, untouched = [], transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for text in texts:
        model = copy.deepcopy(untouched)
        before, after = lm._encode_pair(text[:5], text[5:])
        ids = torch.tensor([before + after])
        logprobs = model(ids[:, :-1], use_cache=False).logits[0, -len(after) :].log_softmax(-1)
        scores.append(float(logprobs.gather(-1, ids[0, -len(after) :, None]).sum()))
    return scores


KINDS = [pair for pair in itertools.product(ENTRIES, repeat=2) if pair != ("default", "default")]


@pytest.mark.parametrize(
    "kinds", [KINDS[0], KINDS[3], *exhaustive(*((kinds,) for kinds in (*KINDS[1:3], *KINDS[4:])))], ids=" and ".join
)
@pytest.mark.parametrize("architecture", ["gemma3_text", *exhaustive("olmo3", "modernbert-decoder")])
def test_each_layers_own_scaling_follows_its_request_alone(
    architecture: str, kinds: tuple[str, str], tmp_path: Path
) -> None:
    folder = with_layers(tmp_path, architecture, *kinds)
    lm = load_lm(folder, max_length=512, batch_size=3)
    shared = [english()[:50] + english()[start : start + 80] for start in (60, 200, 400)]
    texts = [*TEXTS[::-1], *shared, *TEXTS]
    expected = fresh_scores(lm, folder, texts)
    tokens = max(len(lm.tok_encode(text)) for text in texts)
    assert scores(lm, texts) == pytest.approx(expected, rel=1e-6, abs=1e-5 * tokens)
    assert scores(lm, texts[::-1])[::-1] == pytest.approx(expected, rel=1e-6, abs=1e-5 * tokens)
    written, other = continuations(lm, TEXTS), load_lm(folder, max_length=512)
    assert written == continuations(lm, TEXTS[::-1])[::-1]
    assert written == [continuations(other, [text])[0] for text in TEXTS]


def test_scalings_of_several_types_of_layers_are_recorded_by_type(tmp_path: Path) -> None:
    lm = load_lm(with_layers(tmp_path / "local", "gemma3_text", "default", "dynamic"))
    assert lm.get_model_info()["sbeval"]["rope_scaling"] == {"sliding_attention": ENTRIES["dynamic"]}
    lm = load_lm(tmp_path / "local", rope_scaling="yarn:4", training_length=ORIGINAL)
    both = {"full_attention": {"rope_type": "yarn", "factor": 4.0}, "sliding_attention": ENTRIES["dynamic"]}
    assert lm.get_model_info()["sbeval"]["rope_scaling"] == both
    lm = load_lm(with_layers(tmp_path / "global", "gemma3_text", "dynamic", "default"))
    assert lm.get_model_info()["sbeval"]["rope_scaling"] == ENTRIES["dynamic"]


def test_the_scaling_in_force_is_recorded(checkpoint: Checkpoints) -> None:
    record = load(checkpoint, "llama", rope_scaling="yarn:4").get_model_info()["sbeval"]
    assert record["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}
    assert record["training_length_tokens"] == ORIGINAL
    assert load(checkpoint, "llama").get_model_info()["sbeval"]["rope_scaling"] is None


@pytest.mark.parametrize("architecture", ["gpt2", "stickbreaking"])
def test_scaling_a_model_without_rotary_embeddings_is_an_error(architecture: str, checkpoint: Checkpoints) -> None:
    with pytest.raises(UserError, match="rope_scaling needs a model with rotary embeddings"):
        load(checkpoint, architecture, rope_scaling="linear:4")


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_neox", "rope"])
@pytest.mark.parametrize("scaling", [None, "dynamic:2"])
def test_a_larger_max_length_leaves_the_configuration_and_the_results_as_they_are(
    architecture: str, scaling: str | None, checkpoint: Checkpoints
) -> None:
    options: dict[str, Any] = {} if scaling is None else {"rope_scaling": scaling}
    lm, longer = (load(checkpoint, architecture, max_length=length, **options) for length in (64, 1 << 20))
    stated = [getattr(x.model.config, "max_position_embeddings", None) for x in (lm, longer)]
    assert stated[0] == stated[1]
    if architecture != "rope":  # this family states its training length instead
        assert stated[0] == 128
    assert scores(longer, TEXTS[:2]) == scores(lm, TEXTS[:2])
    assert np.isfinite(scores(longer, [english()])).all()
    assert [getattr(longer.model.config, "max_position_embeddings", None)] == stated[:1]


def frozen(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(1, 8, 8), torch.zeros(1, 8, 8)


def failing(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("no ramp")


@pytest.mark.parametrize(
    ("rotate", "fault"),
    [(frozen, "not change the logits of LlamaForCausalLM"), (failing, r"LlamaForCausalLM fails .* \(no ramp\)")],
)
def test_a_scaling_that_does_not_reach_the_logits_is_refused(rotate: Any, fault: str, checkpoint: Checkpoints) -> None:
    model = load(checkpoint, "llama").model
    model.model.rotary_emb.forward = rotate
    with pytest.raises(UserError, match=f"{fault}: remove rope_scaling"):
        RequestRope(model, {"rope_type": "linear", "factor": 4.0}, 64)
