"""lm-engine's softmax models, small and random, and their forward pass written out one query at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from tests.checkpoints.layouts import HEADS, INNER, LAYERS, VOCAB, D, rotated
from tests.checkpoints.mixtures import EXPERTS, mixture_output, mlp_output

# as its configurations are written since June 2026
MIXER = {
    "sequence_mixer_type": "softmax_attention",
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": None,
    "softmax_dropout": 0,
    "dropout": 0,
    "add_bias": False,
    "attention_multiplier": None,
    "attention_multiplier_method": "1 / sqrt(head_dim)",
    "attention_gate": False,
    "exclusive_self_attention": False,
    "sliding_window": None,
}
MLP = {"mlp_type": "MLP", "intermediate_size": INNER, "activation_function": "swiglu", "dropout": 0, "add_bias": False}
MOE = MLP | {
    "mlp_type": "MoE",
    "shared_intermediate_size": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "shared_expert_gating": False,
    "normalized_topk": True,
}


def lm_engine(
    *, mixer: dict[str, Any] | None = None, mlp: dict[str, Any] | None = None, **top: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns a configuration and tensors."""
    mixer, mlp = MIXER | (mixer or {}), mlp or MLP
    config = {
        "model_type": "gpt_base",
        "architectures": ["GPTBaseForCausalLM"],
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "hidden_size": D,
        "num_layers": LAYERS,
        "embedding_dropout": 0,
        "normalization_function": "rmsnorm",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "position_embedding_type": "rope",
        "rope_theta": 10000,
        "rope_scaling": None,
        "m_emb": None,
        "m_width": None,
        "m_residual": None,
        "init_method": "normal",
        "embedding_init_method": "normal",
        "use_depth_scaled_init": True,
        "sequence_mixer_blocks": [mixer] * LAYERS,
        "mlp_blocks": [mlp] * LAYERS,
        "tie_word_embeddings": True,
        "router_aux_loss_coef": None,
        "rope_dim": mixer["head_dim"] or D // HEADS,
        **top,
    }
    generator = torch.Generator().manual_seed(5)

    def rand(*shape: int, mean: float = 0.0) -> Tensor:
        return mean + 0.3 * torch.randn(*shape, generator=generator)

    t = {"transformer.wte.weight": rand(VOCAB, D), "transformer.ln_f.weight": rand(D, mean=1.0)}
    head_dim = mixer["head_dim"] or D // HEADS
    rows = (HEADS * (2 if mixer["attention_gate"] else 1) + 2 * mixer["num_key_value_heads"]) * head_dim
    for layer in range(LAYERS):
        h = f"transformer.h.{layer}"
        t |= {f"{h}.ln_{norm}.weight": rand(D, mean=1.0) for norm in (1, 2)}
        t |= {f"{h}.sequence_mixer.c_attn.weight": rand(rows, D)}
        t |= {f"{h}.sequence_mixer.c_proj.weight": rand(D, HEADS * head_dim)}
        if mixer["add_bias"]:
            t |= {f"{h}.sequence_mixer.c_attn.bias": rand(rows), f"{h}.sequence_mixer.c_proj.bias": rand(D)}
        m = f"{h}.mlp_block"
        if mlp["mlp_type"] == "MLP":
            t |= {f"{m}.c_fc.weight": rand(2 * INNER, D), f"{m}.c_proj.weight": rand(D, INNER)}
            continue
        t |= {f"{m}.gate.weight": rand(EXPERTS, D), f"{m}.c_fc.weight": rand(EXPERTS, 2 * INNER, D)}
        t |= {f"{m}.c_proj.weight": rand(EXPERTS, D, INNER)}
        if mlp["shared_expert_gating"]:
            t[f"{m}.shared_expert_gate.weight"] = rand(1, D)
        if shared := mlp["shared_intermediate_size"]:
            t |= {f"{m}.c_fc_shared.weight": rand(2 * shared, D), f"{m}.c_proj_shared.weight": rand(D, shared)}
    return config, t


def lm_engine_logits(config: dict[str, Any], t: dict[str, Tensor], ids: Tensor, *, interleaved: bool = True) -> Tensor:
    """The forward pass; `interleaved` says how gated MLPs are laid out where no key does."""
    mixer, mlp = config["sequence_mixer_blocks"][0], config["mlp_blocks"][0]
    kv_heads, head_dim = mixer["num_key_value_heads"], mixer["head_dim"] or D // HEADS
    group, residual = HEADS // kv_heads, config["m_residual"] or 1.0
    scale = {"1 / sqrt(head_dim)": head_dim**-0.5, "1 / head_dim": 1 / head_dim, None: mixer["attention_multiplier"]}[
        mixer["attention_multiplier_method"]
    ]
    length = ids.shape[1]

    def normed(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (D,), t[f"{name}.weight"], config["layer_norm_epsilon"])

    x = t["transformer.wte.weight"][ids[0]] * (config["m_emb"] or 1.0)
    for layer in range(LAYERS):
        h = f"transformer.h.{layer}"
        a = f"{h}.sequence_mixer"
        rows = normed(x, f"{h}.ln_1") @ t[f"{a}.c_attn.weight"].T + t.get(f"{a}.c_attn.bias", torch.tensor(0.0))
        rows = rows.view(length, kv_heads, -1, head_dim)
        q, k, v = rows[:, :, :group].flatten(1, 2), rows[:, :, group], rows[:, :, group + 1]
        if config["position_embedding_type"] == "rope":
            q, k = rotated(q, config["rope_theta"]), rotated(k, config["rope_theta"])
        heads = torch.zeros(length, HEADS, head_dim)
        for head in range(HEADS):
            g = head // group
            for j in range(length):
                # a window counts the keys before the query
                first = 0 if mixer["sliding_window"] is None else max(0, j - mixer["sliding_window"])
                seen = slice(first, j + 1)
                output = (scale * k[seen, g] @ q[j, head]).softmax(0) @ v[seen, g]
                if mixer["exclusive_self_attention"]:
                    output = output - (output @ v[j, g]) / (v[j, g] @ v[j, g]) * v[j, g]
                if mixer["attention_gate"]:
                    output = output * torch.sigmoid(rows[j, g, group + 2 + head % group])
                heads[j, head] = output
        mixed = heads.flatten(1) @ t[f"{a}.c_proj.weight"].T + t.get(f"{a}.c_proj.bias", torch.tensor(0.0))
        x = x + mixed * residual
        m = f"{h}.mlp_block"
        outputs = []
        for token in normed(x, f"{h}.ln_2"):
            if mlp["mlp_type"] == "MoE":
                outputs.append(mixture_output(token, t, m, mlp, interleaved=interleaved))
                continue
            alternate = mlp.get("use_interleaved_weights", interleaved)
            maps = t[f"{m}.c_fc.weight"], t[f"{m}.c_proj.weight"]
            outputs.append(mlp_output(token, *maps, mlp["activation_function"], interleaved=alternate))
        x = x + torch.stack(outputs) * residual
    return normed(x, "transformer.ln_f") @ t["transformer.wte.weight"].T / (config["m_width"] or 1.0)
