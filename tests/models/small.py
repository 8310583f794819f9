"""Small random models with large enough weights that a wrong detail changes their logits."""

from typing import Any

import torch

from sbeval.models import SbevalConfig, SbevalForCausalLM
from sbeval.models.biases import FIRE_INITIAL_THRESHOLD, AlibiBias, FireBias

VARIANTS: dict[str, dict[str, Any]] = {
    "stickbreaking": {},
    "stickbreaking-gqa-value": {"num_key_value_heads": 2, "remainder": "value"},
    "stickbreaking-head-bias-norm": {"remainder": "head_bias", "head_norm": True},
    "stickbreaking-inclusive-qk-norm": {"attend_current": True, "qk_norm": True, "tie_word_embeddings": True},
    "layernorm-biases-gelu": {"norm": "layernorm", "bias": True, "activation": "gelu_tanh", "num_key_value_heads": 1},
    "rope": {"attention": "rope", "num_key_value_heads": 2},
    "rope-window": {"attention": "rope", "sliding_window": 7},
    "rope-partial": {
        "attention": "rope",
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
    "nope": {"attention": "nope"},
    "alibi": {"attention": "alibi", "num_key_value_heads": 2},
    "alibi-window": {"attention": "alibi", "sliding_window": 5},
    "fire": {"attention": "fire"},
    "forgetting": {"attention": "forgetting", "num_key_value_heads": 2},
    "forgetting-rope-window": {
        "attention": "forgetting",
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "sliding_window": 5,
    },
    "forgetting-pro": {
        "attention": "forgetting",
        "key_shift": True,
        "value_shift": True,
        "qk_norm": True,
        "qk_norm_per_head": True,
        "qk_norm_eps": 1e-3,
        "output_norm": True,
        "attention_gate": True,
    },
    "rope-pro": {"attention": "rope", "key_shift": True, "value_shift": True, "qk_norm": True},
    "rope-gated-exclusive": {
        "attention": "rope",
        "attention_gate": True,
        "exclusive_self_attention": True,
        "bias": ["qkv"],
    },
    "mixture": {
        "num_experts": 4,
        "num_experts_per_token": 2,
        "shared_intermediate_size": 16,
        "shared_expert_gating": True,
        "normalize_expert_weights": False,
    },
    "layers-that-differ": {
        "remainder": "head_bias",
        "head_norm": True,
        "layer_overrides": [
            {},
            {
                "attention": "rope",
                "remainder": "none",
                "head_norm": False,
                "num_experts": 4,
                "num_experts_per_token": 2,
            },
        ],
    },
    "mup": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_divisor": 1.7,
    },
}


def small_config(**overrides: Any) -> SbevalConfig:
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "training_length_tokens": 32,
        "initializer_range": 0.3,
    }
    return SbevalConfig(**{**sizes, **overrides})


def small_model(seed: int = 0, **overrides: Any) -> SbevalForCausalLM:
    torch.manual_seed(seed)
    model = SbevalForCausalLM(small_config(**overrides)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter.shape == (4, 8):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def make_bias(kind: str, heads: int) -> AlibiBias | FireBias | None:
    """A bias that changes results, on a GPU where there is one."""
    torch.manual_seed(0)
    if kind == "none":
        return None
    if kind == "alibi":
        return AlibiBias(heads)
    bias = FireBias(heads)
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        bias.threshold_multiple.fill_(20.0 / FIRE_INITIAL_THRESHOLD)
    return bias.to("cuda" if torch.cuda.is_available() else "cpu")
