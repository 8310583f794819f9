"""Mixtures of experts with stick-breaking, and with softmax, give the plain definition's logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from other_machines import assert_equal_but_for_rounding
from torch.testing import assert_close

from sbeval.checkpoints import load_checkpoint
from sbeval.errors import UserError
from sbeval.models import mlp as mlp_experts
from sbeval.models.mlp import Assignment, Experts
from tests.checkpoints.layouts import EXPERTS, dolomite, dolomite_logits, save, tokens, with_experts

SB: dict[str, Any] = {"head_bias": True, "head_norm": True, "kv_heads": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str, str]] = {
    "moe_stickbreaking A4": (SB, {}, "tile", "head_bias", "A4 mixture"),
    "moe_stickbreaking A1, shared": ({}, {"shared": 16}, "interleave", "value", "A1 mixture"),
    "moe_stickbreaking, balanced": (SB, {"use_aux_free_moe": True}, "tile", "head_bias", "A4 mixture"),
    "moe_dolomite": (
        {"model_type": "gpt_dolomite", "flat": True, "mixer": "softmax", "activation": "gelu_pytorch_tanh"},
        {"chosen": 1},
        "interleave",
        "",
        "softmax mixture",
    ),
    "C": ({**SB, "model_type": "gpt_dolomite"}, {"chosen": 3}, "interleave", "head_bias", "C mixture"),
    "C'', in one layer": (
        {**SB, "model_type": "gpt_base", "m_residual": 0.4},
        {"layers": (1,), "shared": 8, "shared_expert_gating": True, "normalized_topk": False},
        "interleave",
        "head_bias",
        "C'' mixture",
    ),
    "C'', every expert": (
        {**SB, "model_type": "gpt_base", "activation": "geglu"},
        {"chosen": EXPERTS, "use_interleaved_weights": True, "shared": 8},
        "interleave",
        "head_bias",
        "C'' mixture",
    ),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_each_generation_s_mixtures_give_their_layouts_logits(case: str, tmp_path: Path) -> None:
    fields, mixture, kv, remainder, generation = CASES[case]
    config, tensors = with_experts(*dolomite(**fields), **mixture)
    loaded = load_checkpoint(save(tmp_path, config, tensors))
    assert loaded.format == f"dolomite:{generation}"
    found = loaded.model(tokens()).logits[0]
    assert_close(found, dolomite_logits(config, tensors, kv=kv, remainder=remainder), rtol=2e-5, atol=2e-5)
    loaded.model.save_pretrained(tmp_path / "ours")
    again = load_checkpoint(tmp_path / "ours")
    assert_equal_but_for_rounding(again.model(tokens()).logits[0], found)


@torch.no_grad()
def test_tokens_may_go_through_experts_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = with_experts(*dolomite(**SB, model_type="gpt_base"), shared=8)
    model: Any = load_checkpoint(save(tmp_path, config, tensors)).model
    whole = model(tokens()).logits
    monkeypatch.setattr(mlp_experts, "MOST_TOKENS", 5)
    assert_close(model(tokens()).logits, whole)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"num_experts_per_tok": 9}, "at most num_experts 5, got 9"),
        ({"num_experts": 4}, r"gate\.weight should be \[4, 32\]"),
        ({"shared_intermediate_size": 8}, "lacks the tensor .*c_fc_shared|c_proj_shared"),
        ({"shared_expert_gating": True}, "shared_expert_gat"),
    ],
)
def test_a_mixture_that_its_tensors_are_not_is_refused(block: dict[str, Any], words: str, tmp_path: Path) -> None:
    config, tensors = with_experts(*dolomite(**SB, model_type="gpt_base"))
    config["mlp_blocks"] = [one | block for one in config["mlp_blocks"]]
    with pytest.raises(UserError, match=words):
        load_checkpoint(save(tmp_path, config, tensors))


def test_experts_with_biases_are_refused(tmp_path: Path) -> None:
    config, tensors = with_experts(*dolomite(**SB))
    with pytest.raises(UserError, match=r"lacks the tensor .*moe\.bias"):
        load_checkpoint(save(tmp_path, {**config, "use_aux_free_moe": True}, tensors))
    biased = tensors | {f"transformer.h.{layer}.moe.c_proj.bias": torch.zeros(EXPERTS, 32) for layer in range(2)}
    with pytest.raises(UserError, match=r"experts with biases .* are not supported"):
        load_checkpoint(save(tmp_path, config, biased))


@given(
    tokens=st.integers(0, 9),
    chosen=st.integers(1, 3),
    width=st.sampled_from([3, 8]),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(deadline=None, max_examples=40)
def test_every_row_goes_through_its_own_expert(
    tokens: int, chosen: int, width: int, seed: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    experts = Experts(EXPERTS, width, 4).to(dtype)
    torch.nn.init.normal_(experts.weight)
    x_NI, weight_NT = torch.randn(tokens, width, dtype=dtype), torch.rand(tokens, chosen, dtype=dtype)
    index_NT = torch.rand(tokens, EXPERTS).topk(chosen, dim=-1).indices
    assigned = Assignment(index_NT, EXPERTS)
    found_NO = assigned.mixed(experts(x_NI[assigned.token_S], assigned.end_X), weight_NT)
    expected_NTO = torch.einsum("ntoi,ni->nto", experts.weight[index_NT], x_NI)
    assert_close(found_NO, (expected_NTO * weight_NT[..., None]).sum(1), rtol=1e-5, atol=1e-5)
