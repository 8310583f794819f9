"""Mixtures of experts in the layouts of dolomite-engine and lm-engine."""

from typing import Any

from torch import Tensor

from tests.checkpoints.layouts import INNER, LAYERS, D, Made, drawn

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
