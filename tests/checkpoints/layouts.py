"""Small random checkpoints in foreign layouts, and each layout's forward pass written out plainly."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, rms_norm, silu

D, HEADS, HEAD_DIM, INNER, VOCAB, LAYERS = 32, 4, 8, 24, 53, 2


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def tokens(length: int = 14) -> Tensor:
    return torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(3))


def dolomite(
    *,
    model_type: str = "stickbreaking",
    kv_heads: int = HEADS,
    norm: str = "rmsnorm",
    activation: str = "swiglu",
    attention_bias: bool = False,
    mlp_bias: bool = False,
    head_bias: bool = False,
    head_norm: bool = False,
    tied: bool = True,
    mixer: str = "stickbreaking",
    seed: int = 0,
    **extra: Any,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns a configuration and tensors; `model_type` gpt_dolomite and gpt_base with blocks unless flat=True."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int, mean: float = 0.0) -> Tensor:
        return mean + 0.3 * torch.randn(*shape, generator=generator)

    blocks = model_type != "stickbreaking" and not extra.pop("flat", False)
    kind = "mha" if kv_heads == HEADS else "mqa" if kv_heads == 1 else "gqa"
    config: dict[str, Any] = {"model_type": model_type, "vocab_size": VOCAB, "normalization_function": norm, **extra}
    config.setdefault("position_embedding_type", "nope" if mixer == "stickbreaking" else "rope")
    if not tied:
        config["tie_word_embeddings"] = False
    if blocks:
        block = {"sequence_mixer_type": f"{mixer}_attention", "attention_head_type": kind}
        block |= {"num_key_value_heads": kv_heads, "add_bias": attention_bias}
        if "attention_multiplier" in config:
            block["attention_multiplier"] = config.pop("attention_multiplier")
        mlp = {"mlp_type": "MLP", "activation_function": activation, "intermediate_size": INNER, "add_bias": mlp_bias}
        config |= {"hidden_size": D, "num_layers": LAYERS, "max_position_embeddings": 64}
        (block if model_type == "gpt_base" else config)["num_attention_heads"] = HEADS
        config |= {"sequence_mixer_blocks": [block] * LAYERS, "mlp_blocks": [mlp] * LAYERS}
    else:
        config |= {"n_embd": D, "n_layer": LAYERS, "n_head": HEADS, "n_inner": INNER, "n_positions": 64}
        config |= {"activation_function": activation, "attention_head_type": kind, "add_bias": mlp_bias}
        if kind == "gqa":
            config["num_key_value_heads"] = kv_heads
    a, m = ("sequence_mixer", "mlp_block") if blocks else ("attn", "mlp")
    tensors = {"transformer.wte.weight": rand(VOCAB, D), "transformer.ln_f.weight": rand(D, mean=1.0)}
    if not tied:
        tensors["lm_head.weight"] = rand(VOCAB, D)
    if norm == "layernorm":
        tensors["transformer.ln_f.bias"] = rand(D)
    for layer in range(LAYERS):
        t: dict[str, Tensor] = {"ln_1.weight": rand(D, mean=1.0), "ln_2.weight": rand(D, mean=1.0)}
        if norm == "layernorm":
            t |= {"ln_1.bias": rand(D), "ln_2.bias": rand(D)}
        rows = (HEADS + 2 * kv_heads) * HEAD_DIM
        t |= {f"{a}.c_attn.weight": rand(rows, D), f"{a}.c_proj.weight": rand(D, D)}
        if attention_bias:
            t |= {f"{a}.c_attn.bias": rand(rows), f"{a}.c_proj.bias": rand(D)}
        inner = 2 * INNER if activation in ("swiglu", "geglu") else INNER
        t |= {f"{m}.c_fc.weight": rand(inner, D), f"{m}.c_proj.weight": rand(D, INNER)}
        if mlp_bias:
            t |= {f"{m}.c_fc.bias": rand(inner), f"{m}.c_proj.bias": rand(D)}
        if head_bias:
            t[f"{a}.head_bias"] = rand(HEADS, HEAD_DIM)
        if head_norm:
            t |= {f"{a}.norm.weight": rand(D, mean=1.0), f"{a}.norm.bias": rand(D)}
        tensors |= {f"transformer.h.{layer}.{name}": tensor for name, tensor in t.items()}
    return config, tensors


def dolomite_logits(
    config: dict[str, Any],
    t: dict[str, Tensor],
    ids: Tensor,
    *,
    kv: str,
    remainder: str,
    mlp_of_layer: Callable[[int], Callable[[Tensor], Tensor] | None] = lambda layer: None,
) -> Tensor:
    """The layout's forward pass, one query at a time; `kv` is tile or interleave, an MLP may be given for a token."""
    blocks = "sequence_mixer_blocks" in config
    a, m = ("sequence_mixer", "mlp_block") if blocks else ("attn", "mlp")
    block = config["sequence_mixer_blocks"][0] if blocks else config
    head_type = block["attention_head_type"]
    kv_heads = {"mha": HEADS, "mqa": 1}.get(head_type) or block["num_key_value_heads"]
    group = HEADS // kv_heads
    scale = block.get("attention_multiplier") or (1.0 if config.get("scale_attn_weights") is False else HEAD_DIM**-0.5)
    activation = (config["mlp_blocks"][0] if blocks else config)["activation_function"]
    length = ids.shape[1]

    def normed(x: Tensor, name: str) -> Tensor:
        if config["normalization_function"] == "rmsnorm":
            return rms_norm(x, (D,), t[f"{name}.weight"], 1e-5)
        return layer_norm(x, (D,), t[f"{name}.weight"], t[f"{name}.bias"], 1e-5)

    def affine(x: Tensor, name: str) -> Tensor:
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", torch.tensor(0.0))

    x = t["transformer.wte.weight"][ids[0]] * config.get("m_emb", 1.0)
    for layer in range(LAYERS):
        h = f"transformer.h.{layer}"
        if blocks:
            softmax = config["sequence_mixer_blocks"][layer]["sequence_mixer_type"] == "softmax_attention"
        else:
            softmax = "stickbreaking" not in config["model_type"]
        qkv = affine(normed(x, f"{h}.ln_1"), f"{h}.{a}.c_attn")
        if head_type == "mha":
            q, k, v = qkv.view(length, HEADS, 3, HEAD_DIM).unbind(2)
        elif head_type == "mqa":
            q, k, v = qkv.split((D, HEAD_DIM, HEAD_DIM), -1)
            q, k, v = q.view(length, HEADS, HEAD_DIM), k[:, None], v[:, None]
        else:
            q, k, v = qkv.view(length, kv_heads, group + 2, HEAD_DIM).split((group, 1, 1), 2)
            q, k, v = q.reshape(length, HEADS, HEAD_DIM), k[:, :, 0], v[:, :, 0]
        if softmax and config["position_embedding_type"] == "rope":
            q, k = rotated(q, config.get("rope_theta", 10000)), rotated(k, config.get("rope_theta", 10000))
        heads = torch.zeros(length, HEADS, HEAD_DIM)
        for head in range(HEADS):
            g = head % kv_heads if kv == "tile" else head // group
            for j in range(length):
                logits = scale * k[: j + 1, g] @ q[j, head]
                if softmax:
                    heads[j, head] = logits.softmax(0) @ v[: j + 1, g]
                    continue
                stick = 1.0
                for i in reversed(range(j)):
                    beta = torch.sigmoid(logits[i])
                    heads[j, head] += stick * beta * v[i, g]
                    stick = stick * (1 - beta)
                if remainder == "value":
                    heads[j, head] += stick * v[j, g]
                if remainder == "head_bias":
                    heads[j, head] += stick * t[f"{h}.{a}.head_bias"][head]
        if f"{h}.{a}.norm.weight" in t:
            heads = layer_norm(heads, (HEAD_DIM,), eps=1e-5)
            heads = heads * t[f"{h}.{a}.norm.weight"].view(HEADS, HEAD_DIM)
            heads = heads + t[f"{h}.{a}.norm.bias"].view(HEADS, HEAD_DIM)
        x = x + affine(heads.flatten(1), f"{h}.{a}.c_proj") * config.get("m_residual", 1.0)
        mlp = mlp_of_layer(layer)
        if mlp is not None:
            mixed = torch.stack([mlp(token) for token in normed(x, f"{h}.ln_2")])
            x = x + mixed * config.get("m_residual", 1.0)
            continue
        inner = affine(normed(x, f"{h}.ln_2"), f"{h}.{m}.c_fc")
        if activation == "swiglu":
            up, gate = inner.chunk(2, -1)
            inner = up * silu(gate)
        else:
            inner = gelu(inner, approximate="tanh")
        x = x + affine(inner, f"{h}.{m}.c_proj") * config.get("m_residual", 1.0)
    head = t.get("lm_head.weight", t["transformer.wte.weight"])
    return normed(x, "transformer.ln_f") @ head.T / config.get("m_width", 1.0)


def rotated(x: Tensor, theta: float) -> Tensor:
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    for position in range(x.shape[0]):
        for pair in range(half):
            angle = position * theta ** (-2 * pair / x.shape[-1])
            a, b = x[position, :, pair], x[position, :, pair + half]
            out[position, :, pair] = a * math.cos(angle) - b * math.sin(angle)
            out[position, :, pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def fla(*, qkv_bias: bool, qk_norm: bool, attend_current: bool, kv_heads: int | None, tied: bool) -> Any:
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int, mean: float = 0.0) -> Tensor:
        return mean + 0.3 * torch.randn(*shape, generator=generator)

    config = {"model_type": "stickbreaking_attn", "vocab_size": VOCAB, "hidden_size": D, "num_heads": HEADS}
    config |= {"num_hidden_layers": LAYERS, "num_kv_heads": kv_heads, "intermediate_size": INNER, "norm_eps": 1e-6}
    config |= {"qkv_bias": qkv_bias, "qk_norm": qk_norm, "attend_current": attend_current, "tie_word_embeddings": tied}
    config |= {"architectures": ["StickBreakingAttentionForCausalLM"], "fuse_norm": True, "hidden_act": "swish"}
    width = (kv_heads or HEADS) * HEAD_DIM
    t = {"model.embeddings.weight": rand(VOCAB, D), "model.norm.weight": rand(D, mean=1.0)}
    if not tied:
        t["lm_head.weight"] = rand(VOCAB, D)
    for layer in range(LAYERS):
        h = f"model.layers.{layer}"
        t |= {f"{h}.attn_norm.weight": rand(D, mean=1.0), f"{h}.mlp_norm.weight": rand(D, mean=1.0)}
        for name, rows in (("q", D), ("k", width), ("v", width)):
            t[f"{h}.attn.{name}_proj.weight"] = rand(rows, D)
            if qkv_bias:
                t[f"{h}.attn.{name}_proj.bias"] = rand(rows)
        if qk_norm:
            t |= {f"{h}.attn.{name}_norm.weight": rand(HEAD_DIM, mean=1.0) for name in "qk"}
        t[f"{h}.attn.o_proj.weight"] = rand(D, D)
        t |= {f"{h}.mlp.{name}_proj.weight": rand(INNER, D) for name in ("gate", "up")}
        t[f"{h}.mlp.down_proj.weight"] = rand(D, INNER)
    return config, t


def fla_logits(config: dict[str, Any], t: dict[str, Tensor], ids: Tensor) -> Tensor:
    kv_heads = config["num_kv_heads"] or HEADS
    length = ids.shape[1]
    x = t["model.embeddings.weight"][ids[0]]
    for layer in range(LAYERS):
        h = f"model.layers.{layer}"
        normed = rms_norm(x, (D,), t[f"{h}.attn_norm.weight"], 1e-6)
        q, k, v = (
            normed @ t[f"{h}.attn.{name}_proj.weight"].T + t.get(f"{h}.attn.{name}_proj.bias", torch.tensor(0.0))
            for name in "qkv"
        )
        q, k, v = (part.view(length, -1, HEAD_DIM) for part in (q, k, v))
        if config["qk_norm"]:
            q = rms_norm(q, (HEAD_DIM,), t[f"{h}.attn.q_norm.weight"], 1e-6)
            k = rms_norm(k, (HEAD_DIM,), t[f"{h}.attn.k_norm.weight"], 1e-6)
        heads = torch.zeros(length, HEADS, HEAD_DIM)
        for head in range(HEADS):
            g = head // (HEADS // kv_heads)
            for j in range(length):
                stick = 1.0
                for i in reversed(range(j + 1 if config["attend_current"] else j)):
                    beta = torch.sigmoid(HEAD_DIM**-0.5 * q[j, head] @ k[i, g])
                    heads[j, head] += stick * beta * v[i, g]
                    stick = stick * (1 - beta)
        x = x + heads.flatten(1) @ t[f"{h}.attn.o_proj.weight"].T
        normed = rms_norm(x, (D,), t[f"{h}.mlp_norm.weight"], 1e-6)
        inner = silu(normed @ t[f"{h}.mlp.gate_proj.weight"].T) * (normed @ t[f"{h}.mlp.up_proj.weight"].T)
        x = x + inner @ t[f"{h}.mlp.down_proj.weight"].T
    head = t["model.embeddings.weight"] if config["tie_word_embeddings"] else t["lm_head.weight"]
    return rms_norm(x, (D,), t["model.norm.weight"], 1e-6) @ head.T
