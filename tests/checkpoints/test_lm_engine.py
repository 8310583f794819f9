"""lm-engine's softmax models, and mixtures of experts, give the plain definition's logits, or are refused by name."""

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
from tests.checkpoints.layouts import (
    EXPERTS,
    HEAD_DIM,
    HEADS,
    INNER,
    LAYERS,
    VOCAB,
    D,
    Made,
    dolomite,
    dolomite_logits,
    save,
    tokens,
    with_experts,
)

# as its configurations are written since June 2026
MIXER: dict[str, Any] = {"sequence_mixer_type": "softmax_attention", "num_attention_heads": HEADS}
MIXER |= {"num_key_value_heads": 2, "head_dim": None, "softmax_dropout": 0, "dropout": 0, "add_bias": False}
MIXER |= {"attention_multiplier": None, "attention_multiplier_method": "1 / sqrt(head_dim)", "attention_gate": False}
MIXER |= {"exclusive_self_attention": False, "sliding_window": None}
MLP = {"mlp_type": "MLP", "intermediate_size": INNER, "activation_function": "swiglu", "dropout": 0, "add_bias": False}
MOE = MLP | {"mlp_type": "MoE", "shared_intermediate_size": 16, "num_experts": EXPERTS, "num_experts_per_tok": 2}
MOE |= {"shared_expert_gating": False, "normalized_topk": True}


def lm_engine(*, mixer: dict[str, Any] | None = None, mlp: dict[str, Any] | None = None, **top: Any) -> Made:
    """Returns a configuration and tensors."""
    mixer, mlp = MIXER | (mixer or {}), mlp or MLP
    head_dim = mixer["head_dim"] or HEAD_DIM
    config = {"model_type": "gpt_base", "architectures": ["GPTBaseForCausalLM"], "vocab_size": VOCAB}
    config |= {"max_position_embeddings": 64, "hidden_size": D, "num_layers": LAYERS, "embedding_dropout": 0}
    config |= {"normalization_function": "rmsnorm", "layer_norm_epsilon": 1e-5, "initializer_range": 0.02}
    config |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "position_embedding_type": "rope"}
    config |= {"rope_theta": 10000, "rope_scaling": None, "m_emb": None, "m_width": None, "m_residual": None}
    config |= {"init_method": "normal", "embedding_init_method": "normal", "use_depth_scaled_init": True}
    config |= {"sequence_mixer_blocks": [mixer] * LAYERS, "mlp_blocks": [mlp] * LAYERS, "tie_word_embeddings": True}
    config |= {"router_aux_loss_coef": None, "rope_dim": head_dim, **top}
    sizes = {"kv_heads": mixer["num_key_value_heads"], "head_dim": head_dim, "gate": mixer["attention_gate"]}
    _, tensors = dolomite(model_type="gpt_base", mixer="softmax", attention_bias=mixer["add_bias"], **sizes)
    if mlp["mlp_type"] == "MoE":
        _, tensors = with_experts(config, tensors, shared=mlp["shared_intermediate_size"], **mlp)
    return config, tensors


CASES: dict[str, dict[str, Any]] = {
    "as it is now": {},
    "no positions": {"position_embedding_type": "nope"},
    "multipliers": {
        "mixer": {"attention_multiplier_method": None, "attention_multiplier": 0.2},
        **{"m_emb": 3.0, "m_width": 2.5, "m_residual": 0.4},
    },
    "1 / head_dim": {"mixer": {"attention_multiplier_method": "1 / head_dim"}},
    "head_dim": {"mixer": {"head_dim": 12}},
    "sliding_window": {"mixer": {"sliding_window": 3}},
    "exclusive_self_attention": {"mixer": {"exclusive_self_attention": True}},
    "attention_gate": {"mixer": {"attention_gate": True, "add_bias": True}},
    "all at once": {
        "mixer": {"attention_gate": True, "exclusive_self_attention": True, "head_dim": 6}
        | {"num_key_value_heads": 1, "sliding_window": 5},
        "mlp": MOE | {"shared_expert_gating": True, "normalized_topk": False},
    },
    "mixture": {"mlp": MOE | {"shared_intermediate_size": None}},
    "mixture with a shared expert": {"mlp": MOE | {"num_experts_per_tok": 1}},
    "rows told by their key": {"mlp": MLP | {"use_interleaved_weights": False}},
    "a mixture's rows told by their keys": {
        "mlp": MOE | {"use_interleaved_weights": False, "use_interleaved_weights_for_shared_experts": True}
    },
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_each_option_gives_its_definition_s_logits(case: str, tmp_path: Path) -> None:
    config, tensors = lm_engine(**CASES[case])
    loaded = load_checkpoint(save(tmp_path, config, tensors))
    assert loaded.format.startswith("dolomite:C'' softmax")
    found = loaded.model(tokens()).logits[0]
    assert_close(found, dolomite_logits(config, tensors, interleaved=True), rtol=2e-5, atol=2e-5)


@torch.no_grad()
def test_configurations_before_march_2026_have_gate_behind_up(tmp_path: Path) -> None:
    config, tensors = lm_engine()
    since = ("embedding_init_method", "use_depth_scaled_init")
    older = {key: value for key, value in config.items() if key not in since}
    found = load_checkpoint(save(tmp_path, older, tensors)).model(tokens()).logits[0]
    assert_close(found, dolomite_logits(older, tensors), rtol=2e-5, atol=2e-5)
    assert (found - dolomite_logits(config, tensors, interleaved=True)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mixer": {"attention_multiplier": 0.1}}, "attention_multiplier_method of layer 0"),
        ({"mixer": {"attention_multiplier_method": None}}, "attention_multiplier_method of layer 0"),
        ({"mixer": {"attention_multiplier_method": "sqrt"}}, "attention_multiplier_method of layer 0"),
        ({"rope_dim": 4}, "rope_dim 4 is not supported for a softmax model"),
        ({"position_embedding_type": "learned_absolute"}, "learned_absolute"),
        ({"mlp": MLP | {"activation_function": "reglu"}}, "activation_function 'reglu' in mlp_blocks"),
        ({"mixer": {"sequence_mixer_type": "mamba2"}}, "sequence_mixer_type 'mamba2' of layer 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "factor and original_max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": True}}, "'truncate' with the value True"),
        ({"mlp": MOE, "mlp_blocks": [MOE | {"num_experts_per_tok": 9}] * 2}, "at most num_experts 5, got 9"),
        ({"mlp": MOE, "mlp_blocks": [MOE | {"num_experts": 4}] * 2}, r"gate\.weight should have the shape \[4, 32\]"),
        ({"mlp": MOE, "mlp_blocks": [MOE | {"shared_intermediate_size": 8}] * 2}, "c_fc_shared|c_proj_shared"),
        ({"mlp": MOE, "mlp_blocks": [MOE | {"shared_expert_gating": True}] * 2}, "shared_expert_gat"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        load_checkpoint(save(tmp_path, *lm_engine(**fields)))


def test_layers_with_other_windows_are_refused(tmp_path: Path) -> None:
    config, tensors = lm_engine()
    first, second = config["sequence_mixer_blocks"]
    config["sequence_mixer_blocks"] = [first, second | {"sliding_window": 4}]
    with pytest.raises(
        UserError,
        match=r"sliding_window, counting the query itself, must be the same .* is None in layer 0 and 5 in layer 1",
    ):
        load_checkpoint(save(tmp_path, config, tensors))


SB: dict[str, Any] = {"head_bias": True, "head_norm": True, "kv_heads": 2}
BASE: dict[str, Any] = {**SB, "model_type": "gpt_base"}
SOFTMAX = {"model_type": "gpt_dolomite", "flat": True, "mixer": "softmax", "activation": "gelu_pytorch_tanh"}
IN_ONE_LAYER = {"layers": (1,), "shared": 8, "shared_expert_gating": True, "normalized_topk": False}
EVERY_EXPERT = {"chosen": EXPERTS, "use_interleaved_weights": True, "shared": 8}
MIXTURES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str, str]] = {
    "moe_stickbreaking A4": (SB, {}, "tile", "head_bias", "A4 mixture"),
    "moe_stickbreaking A1, shared": ({}, {"shared": 16}, "interleave", "value", "A1 mixture"),
    "moe_stickbreaking, balanced": (SB, {"use_aux_free_moe": True}, "tile", "head_bias", "A4 mixture"),
    "moe_dolomite": (SOFTMAX, {"chosen": 1}, "interleave", "", "softmax mixture"),
    "C": ({**SB, "model_type": "gpt_dolomite"}, {"chosen": 3}, "interleave", "head_bias", "C mixture"),
    "C'', in one layer": ({**BASE, "m_residual": 0.4}, IN_ONE_LAYER, "interleave", "head_bias", "C'' mixture"),
    "C'', every expert": ({**BASE, "activation": "geglu"}, EVERY_EXPERT, "interleave", "head_bias", "C'' mixture"),
}


@pytest.mark.parametrize("case", MIXTURES)
@torch.no_grad()
def test_each_generation_s_mixtures_give_their_layouts_logits(case: str, tmp_path: Path) -> None:
    fields, mixture, kv, remainder, generation = MIXTURES[case]
    config, tensors = with_experts(*dolomite(**fields), **mixture)
    loaded = load_checkpoint(save(tmp_path, config, tensors))
    assert loaded.format == f"dolomite:{generation}"
    found = loaded.model(tokens()).logits[0]
    assert_close(found, dolomite_logits(config, tensors, kv=kv, remainder=remainder), rtol=2e-5, atol=2e-5)
    loaded.model.save_pretrained(tmp_path / "ours")
    assert_equal_but_for_rounding(load_checkpoint(tmp_path / "ours").model(tokens()).logits[0], found)


@torch.no_grad()
def test_tokens_may_go_through_experts_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = with_experts(*dolomite(**SB, model_type="gpt_base"), shared=8)
    model: Any = load_checkpoint(save(tmp_path, config, tensors)).model
    whole = model(tokens()).logits
    monkeypatch.setattr(mlp_experts, "MOST_TOKENS", 5)
    assert_close(model(tokens()).logits, whole)


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
def test_every_row_goes_through_its_expert(tokens: int, chosen: int, width: int, seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    experts = Experts(EXPERTS, width, 4).to(dtype)
    torch.nn.init.normal_(experts.weight)
    x_NI, weight_NT = torch.randn(tokens, width, dtype=dtype), torch.rand(tokens, chosen, dtype=dtype)
    index_NT = torch.rand(tokens, EXPERTS).topk(chosen, dim=-1).indices
    assigned = Assignment(index_NT, EXPERTS)
    found_NO = assigned.mixed(experts(x_NI[assigned.token_S], assigned.end_X), weight_NT)
    expected_NTO = torch.einsum("ntoi,ni->nto", experts.weight[index_NT], x_NI)
    assert_close(found_NO, (expected_NTO * weight_NT[..., None]).sum(1), rtol=1e-5, atol=1e-5)
