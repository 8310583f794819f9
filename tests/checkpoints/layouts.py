"""Small random checkpoints in the layouts of dolomite-engine and lm-engine, and their forward pass written out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, rms_norm, silu
from written_out import rotated, softmax, stick_breaking

D, HEADS, HEAD_DIM, INNER, VOCAB, LAYERS = 32, 4, 8, 24, 53, 2
Made = tuple[dict[str, Any], dict[str, Tensor]]


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def tokens(length: int = 14) -> Tensor:
    return torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(tokens() % model.config.vocab_size).logits[0]


def drawn(seed: int, size: float = 0.3) -> Callable[..., Tensor]:
    """Returns a function from a shape, and a mean, to random weights."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int, mean: float = 0.0) -> Tensor:
        return mean + size * torch.randn(*shape, generator=generator)

    return rand


def affine(x: Tensor, t: dict[str, Tensor], *names: str) -> Tensor:
    """A linear map by the first of these names that there is, with its bias if it has one."""
    name = next(name for name in names if f"{name}.weight" in t)
    return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", torch.tensor(0.0))


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
    head_dim: int = HEAD_DIM,
    gate: bool = False,
    **extra: Any,
) -> Made:
    """Returns a configuration and tensors; `model_type` gpt_dolomite and gpt_base with blocks unless flat=True."""
    rand = drawn(0)
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
        rows = (HEADS * (1 + gate) + 2 * kv_heads) * head_dim
        t |= {f"{a}.c_attn.weight": rand(rows, D), f"{a}.c_proj.weight": rand(D, HEADS * head_dim)}
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


def gated(inner: Tensor, activation: str, *, interleaved: bool) -> Tensor:
    if activation not in ("swiglu", "geglu"):
        return gelu(inner, approximate="tanh")
    up, gate = (inner[..., 1::2], inner[..., ::2]) if interleaved else inner.chunk(2, -1)
    return up * (silu(gate) if activation == "swiglu" else gelu(gate))


def mixture_output(x: Tensor, t: dict[str, Tensor], name: str, block: dict[str, Any], *, interleaved: bool) -> Tensor:
    """Returns a mixture's output for one token [D], expert by expert; `name` is the module's."""
    activation = block["activation_function"]
    logits = t[f"{name}.gate.weight"] @ x
    order_by = logits.softmax(0) + t[f"{name}.bias"] if block.get("use_aux_free_moe") else logits
    order = order_by.argsort(descending=True)[: block["num_experts_per_tok"]].tolist()
    total = logits[order if block.get("normalized_topk", True) else slice(None)].exp().sum()
    output = torch.zeros(D)
    for expert in order:
        inner = t[f"{name}.c_fc.weight"][expert] @ x
        inner = gated(inner, activation, interleaved=block.get("use_interleaved_weights", interleaved))
        output = output + logits[expert].exp() / total * (t[f"{name}.c_proj.weight"][expert] @ inner)
    if f"{name}.c_fc_shared.weight" in t:
        alternate = block.get("use_interleaved_weights_for_shared_experts", interleaved)
        inner = gated(affine(x, t, f"{name}.c_fc_shared"), activation, interleaved=alternate)
        beside = affine(inner, t, f"{name}.c_proj_shared")
        if f"{name}.shared_expert_gate.weight" in t:
            beside = beside * affine(x, t, f"{name}.shared_expert_gate").sigmoid()
        output = output + beside
    return output


def dolomite_logits(
    config: dict[str, Any],
    t: dict[str, Tensor],
    *,
    kv: str = "interleave",
    remainder: str = "",
    interleaved: bool = False,
) -> Tensor:
    """The forward pass of `tokens()`; `interleaved` says how gated MLPs are laid out where no key does."""
    blocks = "sequence_mixer_blocks" in config
    a, m = ("sequence_mixer", "mlp_block") if blocks else ("attn", "mlp")
    x = t["transformer.wte.weight"][tokens()[0]] * (config.get("m_emb") or 1.0)
    length, residual, theta = len(x), config.get("m_residual") or 1.0, config.get("rope_theta", 10000)

    def normed(x: Tensor, name: str) -> Tensor:
        if config["normalization_function"] == "rmsnorm":
            return rms_norm(x, (D,), t[f"{name}.weight"], 1e-5)
        return layer_norm(x, (D,), t[f"{name}.weight"], t[f"{name}.bias"], 1e-5)

    for layer in range(LAYERS):
        h = f"transformer.h.{layer}"
        block = config["sequence_mixer_blocks"][layer] if blocks else config
        mlp = config["mlp_blocks"][layer] if blocks else config
        kv_heads = {"mha": HEADS, "mqa": 1}.get(block.get("attention_head_type")) or block["num_key_value_heads"]
        head_dim, group = block.get("head_dim") or HEAD_DIM, HEADS // kv_heads
        scale = block.get("attention_multiplier")
        scale = scale or (1.0 if config.get("scale_attn_weights") is False else head_dim**-0.5)
        if block.get("attention_multiplier_method") == "1 / head_dim":
            scale = 1 / head_dim
        # the queries that share a key, that key, its value, and a gate for each of the queries
        rows = affine(normed(x, f"{h}.ln_1"), t, f"{h}.{a}.c_attn").view(length, kv_heads, -1, head_dim)
        q = rows[:, :, :group].reshape(length, HEADS, head_dim)
        k, v = (
            rows[:, :, place].repeat(1, group, 1) if kv == "tile" else rows[:, :, place].repeat_interleave(group, 1)
            for place in (group, group + 1)
        )
        if "stickbreaking" in block.get("sequence_mixer_type", config["model_type"]):
            heads, stick = stick_breaking(q, k, v, scale)
            rests = {"value": v, "head_bias": t.get(f"{h}.{a}.head_bias", 0.0)}
            heads = heads + stick * rests.get(remainder, 0.0)
        else:
            if config["position_embedding_type"] == "rope":
                q, k = rotated(q, theta), rotated(k, theta)
            before = block.get("sliding_window")  # which counts the keys before the query
            heads = softmax(q, k, v, scale, window=None if before is None else before + 1)
        if block.get("exclusive_self_attention"):
            heads = heads - (heads * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True) * v
        if block.get("attention_gate"):
            heads = heads * rows[:, :, group + 2 :].reshape(heads.shape).sigmoid()
        if f"{h}.{a}.norm.weight" in t:
            weight, bias = (t[f"{h}.{a}.norm.{name}"].view(HEADS, HEAD_DIM) for name in ("weight", "bias"))
            heads = layer_norm(heads, (HEAD_DIM,), eps=1e-5) * weight + bias
        x = x + affine(heads.flatten(1), t, f"{h}.{a}.c_proj") * residual
        mixture = f"{h}.{'mlp_block' if blocks else 'moe'}"
        if f"{mixture}.gate.weight" in t:
            rows = [mixture_output(x, t, mixture, mlp, interleaved=interleaved) for x in normed(x, f"{h}.ln_2")]
            x = x + torch.stack(rows) * residual
            continue
        inner = affine(normed(x, f"{h}.ln_2"), t, f"{h}.{m}.c_fc")
        inner = gated(inner, mlp["activation_function"], interleaved=mlp.get("use_interleaved_weights", interleaved))
        x = x + affine(inner, t, f"{h}.{m}.c_proj") * residual
    head = t.get("lm_head.weight", t["transformer.wte.weight"])
    return normed(x, "transformer.ln_f") @ head.T / (config.get("m_width") or 1.0)


def fla(*, qkv_bias: bool, qk_norm: bool, kv_heads: int | None, tied: bool, attend_current: bool = False) -> Made:
    """flash-linear-attention's stick-breaking."""
    rand, width = drawn(0), (kv_heads or HEADS) * HEAD_DIM
    config = {"model_type": "stickbreaking_attn", "vocab_size": VOCAB, "hidden_size": D, "num_heads": HEADS}
    config |= {"num_hidden_layers": LAYERS, "num_kv_heads": kv_heads, "intermediate_size": INNER, "norm_eps": 1e-6}
    config |= {"qkv_bias": qkv_bias, "qk_norm": qk_norm, "attend_current": attend_current, "tie_word_embeddings": tied}
    config |= {"architectures": ["StickBreakingAttentionForCausalLM"], "fuse_norm": True, "hidden_act": "swish"}
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


EXPERTS, CHOSEN = 5, 2


def with_experts(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    *,
    layers: tuple[int, ...] = tuple(range(LAYERS)),
    chosen: int = CHOSEN,
    shared: int | None = None,
    **block: Any,
) -> Made:
    """Returns a checkpoint whose MLPs have become mixtures in these layers; `block` adds to their configuration."""
    rand = drawn(7)
    blocks = "mlp_blocks" in config
    keys = {"num_experts": EXPERTS, "num_experts_per_tok": chosen} | block
    tensors = dict(tensors)
    if blocks:
        keys |= {"mlp_type": "MoE", "shared_intermediate_size": shared}
        mlps = [mlp | keys if layer in layers else mlp for layer, mlp in enumerate(config["mlp_blocks"])]
        config = {**config, "mlp_blocks": mlps}
    else:
        kind = "moe_stickbreaking" if config["model_type"] == "stickbreaking" else "moe_dolomite"
        config = {**config, **keys, "model_type": kind, "shared_n_inner": shared}
    for layer in layers:
        old, new = (f"transformer.h.{layer}.{name}" for name in (("mlp_block",) * 2 if blocks else ("mlp", "moe")))
        rows = tensors[f"{old}.c_fc.weight"].shape[0] // INNER
        for name in [name for name in tensors if name.startswith(f"{old}.")]:
            del tensors[name]
        tensors[f"{new}.gate.weight"] = rand(EXPERTS, D)
        if block.get("use_aux_free_moe"):
            tensors[f"{new}.bias"] = rand(EXPERTS)
        tensors[f"{new}.c_fc.weight"] = rand(EXPERTS, rows * INNER, D)
        tensors[f"{new}.c_proj.weight"] = rand(EXPERTS, D, INNER)
        if shared:
            tensors[f"{new}.c_fc_shared.weight"] = rand(rows * shared, D)
            tensors[f"{new}.c_proj_shared.weight"] = rand(D, shared)
        if block.get("shared_expert_gating"):
            tensors[f"{new}.shared_expert_gate.weight"] = rand(1, D)
    return config, tensors
