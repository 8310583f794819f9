"""lm-engine's softmax models, small and random."""

from typing import Any

from tests.checkpoints.layouts import HEAD_DIM, HEADS, INNER, LAYERS, VOCAB, D, Made, dolomite
from tests.checkpoints.mixtures import EXPERTS, with_experts

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
