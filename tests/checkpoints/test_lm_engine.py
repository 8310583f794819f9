"""lm-engine's softmax models, small and random, give the plain definition's logits, or are refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from sbeval.checkpoints import load_checkpoint
from sbeval.errors import UserError
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
        "mixer": {
            "attention_gate": True,
            "exclusive_self_attention": True,
            "head_dim": 6,
            "num_key_value_heads": 1,
            "sliding_window": 5,
        },
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
    older = {
        key: value for key, value in config.items() if key not in ("embedding_init_method", "use_depth_scaled_init")
    }
    found = load_checkpoint(save(tmp_path, older, tensors)).model(tokens()).logits[0]
    assert_close(found, dolomite_logits(older, tensors), rtol=2e-5, atol=2e-5)
    assert (found - dolomite_logits(config, tensors, interleaved=True)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mixer": {"attention_multiplier": 0.1}}, "attention_multiplier_method of layer 0"),
        ({"mixer": {"attention_multiplier_method": None}}, "attention_multiplier_method of layer 0"),
        ({"mixer": {"attention_multiplier_method": "sqrt"}}, "attention_multiplier_method of layer 0"),
        ({"rope_dim": 4}, "rope_dim 4 of a softmax model"),
        ({"position_embedding_type": "learned_absolute"}, "learned_absolute"),
        ({"mlp": MLP | {"activation_function": "reglu"}}, "activation_function 'reglu' in mlp_blocks"),
        ({"mixer": {"sequence_mixer_type": "mamba2"}}, "sequence_mixer_type 'mamba2' of layer 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "factor and original_max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": True}}, "'truncate' with the value True"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        load_checkpoint(save(tmp_path, *lm_engine(**fields)))


def test_layers_with_other_windows_are_refused(tmp_path: Path) -> None:
    config, tensors = lm_engine()
    first, second = config["sequence_mixer_blocks"]
    config["sequence_mixer_blocks"] = [first, second | {"sliding_window": 4}]
    with pytest.raises(UserError, match="sliding_window, counting the query itself, is None in layer 0, 5 in layer 1"):
        load_checkpoint(save(tmp_path, config, tensors))
