"""Blocks in few kernels: the logits of the model's own parts."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from sbeval.model_adapters.generate.slots.fused_blocks import FusedBlocks
from sbeval.model_adapters.generate.slots.served import GenerationInSlots, fused_blocks
from sbeval.model_adapters.generate.slots.stepper import Stepper
from tests.marks import exhaustive
from tests.model_adapters.generate.slots import DEVICE, LINES, adapter, answers
from tests.model_adapters.prepare.faster import make_faster
from tests.models.small import VARIANTS, small_model

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 51, "num_attention_heads": 2, "head_dim": 16}
SIZES |= {"num_hidden_layers": 1}
OWN: dict[str, dict[str, Any]] = {
    "stickbreaking": {"remainder": "value", "num_key_value_heads": 2},
    "head-bias-norm": {"remainder": "head_bias", "head_norm": True},
    "rope-window": {"attention": "rope", "sliding_window": 5, "num_key_value_heads": 2},
    "rope-partial": VARIANTS["rope-partial"],
    "nope-geglu": {"attention": "nope", "activation": "geglu", "num_key_value_heads": 2},
    "rope-entmax": {"attention": "rope", "attention_weights": "entmax15", "num_key_value_heads": 2},
    "nape": {"attention": "nape", "num_key_value_heads": 2},
    "alibi-entmax": {"attention": "alibi", "attention_weights": "entmax15"},
    "mup-biases": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_divisor": 1.7, "bias": True},
}


def model_of(name: str) -> Any:
    if name != "llama":
        return small_model(**SIZES, **OWN[name]).to(DEVICE)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=61, num_key_value_heads=2, max_position_embeddings=64, **SIZES)
    return transformers.AutoModelForCausalLM.from_config(config).eval().to(DEVICE)


@pytest.mark.parametrize(
    ("name", "faster"),
    [
        ("stickbreaking", True),
        ("llama", True),
        ("nape", False),
        *exhaustive(*((name, False) for name in OWN if name != "nape"), ("llama", False)),
    ],
)
def test_a_step_has_the_logits_of_the_model_s_own_parts(name, faster):
    model = model_of(name)
    if faster:
        assert make_faster(model)
    blocks = FusedBlocks.of(model)
    own, fused = (Stepper(model, slots=1, room_tokens=16, most_new_tokens=3, fused=part) for part in (None, blocks))
    for stepper in (own, fused):
        stepper.start([0], [np.arange(2, 11)], [3])
    torch.testing.assert_close(fused.try_step(), own.try_step(), rtol=1e-4, atol=1e-4)
    for stepper in (own, fused):
        stepper.run(3)
    assert fused.written().of(0) == own.written().of(0)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"qk_norm": True}, "its attention has q_norm, k_norm"),
        ({"norm": "layernorm"}, "its norms are LayerNorm, LayerNorm"),
        ({"attention": "rope", "attention_weights": "ssmax"}, "its attention has query_scale"),
        ({"activation": "gelu_tanh"}, "its activation is gelu_tanh"),
        ({"attention": "fire"}, "a bias that needs the positions of keys"),
        ({"attention": "alibi", "sliding_window": 5}, "a bias that needs the positions of keys"),
        ({"num_attention_heads": 2, "head_dim": 8}, "no multiple of 32 wide"),
    ],
)
def test_blocks_with_other_parts_are_left_as_they_are_and_the_log_says_why(other, reason, caplog):
    model = small_model(**{**SIZES, **other})
    with pytest.raises(ValueError, match=reason):
        FusedBlocks.of(model)
    assert fused_blocks(model) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("decode steps of one text run without fused blocks, which is slower: ")
    assert reason in record.getMessage()


def test_blocks_with_other_logits_are_left_as_they_are_and_the_log_says_why(monkeypatch, caplog):
    model = model_of("stickbreaking")
    assert fused_blocks(model) is not None
    assert not caplog.records
    logits = FusedBlocks.logits
    monkeypatch.setattr(FusedBlocks, "logits", lambda self, *given: logits(self, *given) * 2)
    assert fused_blocks(model) is None
    assert "fused blocks have other logits" in caplog.text


def test_blocks_are_looked_at_for_single_texts_alone(checkpoint, monkeypatch):
    looked: list[int] = []
    monkeypatch.setattr(GenerationInSlots, "_fused_blocks", property(lambda self: looked.append(1)))
    for batch_size, times in ((3, 0), (1, 1)):
        answers(adapter(checkpoint("llama"), batch_size=batch_size), {"until": ["\n"], "max_gen_toks": 2}, LINES[:3])
        assert len(looked) == times
