"""Small random models with large enough weights that a wrong detail changes their logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from sbeval.models import SbevalConfig, SbevalForCausalLM
from sbeval.models.biases import FIRE_INITIAL_THRESHOLD, AlibiBias, FireBias

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
PRO = ("key_shift", "value_shift", "qk_norm", "qk_norm_per_head", "output_norm", "attention_gate")
EXCLUSIVE = ("attention_gate", "exclusive_self_attention")
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_token": 2}
SHARED = {"shared_intermediate_size": 16, "shared_expert_gating": True}
MULTIPLIERS = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4}
VARIANTS: dict[str, dict[str, Any]] = {
    "stickbreaking": {},
    "stickbreaking-gqa-value": {"num_key_value_heads": 2, "remainder": "value"},
    "stickbreaking-head-bias-norm": {"remainder": "head_bias", "head_norm": True},
    "stickbreaking-inclusive-qk-norm": {"attend_current": True, "qk_norm": True, "tie_word_embeddings": True},
    "layernorm-biases-gelu": {"norm": "layernorm", "bias": True, "activation": "gelu_tanh", "num_key_value_heads": 1},
    "rope": {"attention": "rope", "num_key_value_heads": 2},
    "rope-window": {"attention": "rope", "sliding_window": 7},
    "rope-partial": {"attention": "rope", "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    "nope": {"attention": "nope"},
    "alibi": {"attention": "alibi", "num_key_value_heads": 2},
    "alibi-window": {"attention": "alibi", "sliding_window": 5},
    "nape-ssmax": {"attention": "nape", "attention_weights": "ssmax", "num_key_value_heads": 2},
    "rope-ssmax-window": {"attention": "rope", "attention_weights": "ssmax", "sliding_window": 7},
    "rope-entmax": {"attention": "rope", "attention_weights": "entmax15", "num_key_value_heads": 2},
    "alibi-entmax-window": {"attention": "alibi", "attention_weights": "entmax15", "sliding_window": 5},
    "nope-asentmax": {"attention": "nope", "attention_weights": "asentmax", "num_key_value_heads": 1},
    "nape-asentmax": {"attention": "nape", "attention_weights": "asentmax"},
    "fire": {"attention": "fire"},
    "forgetting": {"attention": "forgetting", "num_key_value_heads": 2},
    "forgetting-rope-window": {"attention": "forgetting", "rope_parameters": ROPE, "sliding_window": 5},
    "forgetting-pro": {"attention": "forgetting", "qk_norm_eps": 1e-3, **dict.fromkeys(PRO, True)},
    "rope-pro": {"attention": "rope", "key_shift": True, "value_shift": True, "qk_norm": True},
    "rope-gated-exclusive": {"attention": "rope", **dict.fromkeys(EXCLUSIVE, True), "bias": ["qkv"]},
    "mixture": EXPERTS | SHARED | {"normalize_expert_weights": False},
    "layers-that-differ": {
        **{"remainder": "head_bias", "head_norm": True},
        "layer_overrides": [{}, {"attention": "rope", "remainder": "none", "head_norm": False, **EXPERTS}],
    },
    "mup": MULTIPLIERS | {"logits_divisor": 1.7},
}


def small_config(**overrides: Any) -> SbevalConfig:
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "training_length_tokens": 32, "initializer_range": 0.3}
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


Mix = Callable[[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]


def written_out(model: SbevalForCausalLM, ids: Tensor, mix: Mix) -> Tensor:
    """Logits of a model of one layer; `mix` makes heads of q, k, v, the layer's input and its weights."""
    config, weights = model.config, model.state_dict()
    residual = config.residual_multiplier or 1.0
    block = {name.removeprefix("model.layers.0."): value for name, value in weights.items()}
    x = weights["model.embed_tokens.weight"][ids] * (config.embedding_multiplier or 1.0)
    normed = rms_norm(x, (32,), block["input_norm.weight"], 1e-5)
    q, k, v = ((normed @ block[f"self_attn.{name}_proj.weight"].T).view(len(ids), 4, 8) for name in "qkv")
    heads = mix(q, k, v, normed, {name.removeprefix("self_attn."): value for name, value in block.items()})
    x = x + residual * heads.flatten(1) @ block["self_attn.o_proj.weight"].T
    normed = rms_norm(x, (32,), block["post_attention_norm.weight"], 1e-5)
    inner = silu(normed @ block["mlp.gate_proj.weight"].T) * (normed @ block["mlp.up_proj.weight"].T)
    x = x + residual * inner @ block["mlp.down_proj.weight"].T
    hidden = rms_norm(x, (32,), weights["model.norm.weight"], 1e-5)
    return hidden @ weights["lm_head.weight"].T / (config.logits_divisor or 1.0)


def listed_blocks(mask: Any, count: int) -> tuple[Tensor, Tensor]:
    """Which blocks of [count, count] a block mask lists in part, and which as full."""
    found = []
    for counts, indices in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
        listed = torch.zeros(count, count, dtype=torch.bool)
        for row in range(count):
            listed[row, indices[0, 0, row, : counts[0, 0, row]].long()] = True
        found.append(listed)
    partial, full = found
    assert not bool((partial & full).any())
    return partial, full


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
