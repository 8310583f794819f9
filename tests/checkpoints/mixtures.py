"""Mixtures of experts in the layouts of dolomite-engine and lm-engine: random tensors, and the output of one token."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from tests.checkpoints.layouts import INNER, LAYERS, D

EXPERTS, CHOSEN = 5, 2


def with_experts(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    *,
    layers: tuple[int, ...] = tuple(range(LAYERS)),
    chosen: int = CHOSEN,
    shared: int | None = None,
    **block: Any,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns a checkpoint whose MLPs have become mixtures in these layers; `block` adds to their configuration."""
    generator = torch.Generator().manual_seed(7)
    blocks = "mlp_blocks" in config
    keys = {"num_experts": EXPERTS, "num_experts_per_tok": chosen} | block
    tensors = dict(tensors)
    if blocks:
        keys |= {"mlp_type": "MoE", "shared_intermediate_size": shared}
        config = {
            **config,
            "mlp_blocks": [one | keys if layer in layers else one for layer, one in enumerate(config["mlp_blocks"])],
        }
    else:
        kind = "moe_stickbreaking" if config["model_type"] == "stickbreaking" else "moe_dolomite"
        config = {**config, **keys, "model_type": kind, "shared_n_inner": shared}
    for layer in layers:
        old, new = (f"transformer.h.{layer}.{name}" for name in (("mlp_block",) * 2 if blocks else ("mlp", "moe")))
        rows = tensors[f"{old}.c_fc.weight"].shape[0] // INNER
        for name in [name for name in tensors if name.startswith(f"{old}.")]:
            del tensors[name]

        def rand(*shape: int) -> Tensor:
            return 0.3 * torch.randn(*shape, generator=generator)

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


def mlp_output(x: Tensor, first: Tensor, last: Tensor, activation: str, *, interleaved: bool) -> Tensor:
    """Returns an MLP's output for one token [D], without biases."""
    inner = first @ x
    if activation in ("swiglu", "geglu"):
        up, gate = (inner[1::2], inner[::2]) if interleaved else inner.chunk(2)
        inner = up * (silu(gate) if activation == "swiglu" else gelu(gate))
    else:
        inner = gelu(inner, approximate="tanh")
    return last @ inner


def mixture_output(x: Tensor, t: dict[str, Tensor], name: str, block: dict[str, Any], *, interleaved: bool) -> Tensor:
    """Returns a mixture's output for one token [D], expert by expert; `name` is the module's."""
    logits = t[f"{name}.gate.weight"] @ x
    order_by = logits.softmax(0) + t[f"{name}.bias"] if block.get("use_aux_free_moe") else logits
    order = order_by.argsort(descending=True)[: block["num_experts_per_tok"]].tolist()
    among = order if block.get("normalized_topk", True) else range(EXPERTS)
    total = sum(float(logits[expert].exp()) for expert in among)
    output = torch.zeros(D)
    for expert in order:
        own = mlp_output(
            x,
            t[f"{name}.c_fc.weight"][expert],
            t[f"{name}.c_proj.weight"][expert],
            block["activation_function"],
            interleaved=block.get("use_interleaved_weights", interleaved),
        )
        output = output + float(logits[expert].exp()) / total * own
    if f"{name}.c_fc_shared.weight" in t:
        beside = mlp_output(
            x,
            t[f"{name}.c_fc_shared.weight"],
            t[f"{name}.c_proj_shared.weight"],
            block["activation_function"],
            interleaved=block.get("use_interleaved_weights_for_shared_experts", interleaved),
        )
        if f"{name}.shared_expert_gate.weight" in t:
            beside = beside * torch.sigmoid(t[f"{name}.shared_expert_gate.weight"] @ x)
        output = output + beside
    return output
