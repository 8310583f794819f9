"""Tensors of dolomite-engine's MLPs and mixtures of experts."""

from torch import Tensor

from sbeval.checkpoints.dolomite.layers import DolomiteMLP
from sbeval.checkpoints.files import Weights
from sbeval.models import SbevalConfig
from sbeval.models.config import GATED_ACTIVATIONS


def mlp_tensors(config: SbevalConfig, mlp: DolomiteMLP, weights: Weights, name: str) -> dict[str, Tensor]:
    """Returns a layer's tensors by this family's names.

    Args:
        config: of the layer.
        mlp: the same in the checkpoint's configuration.
        weights: the checkpoint's tensors.
        name: of the module there.

    Raises:
        UserError: a tensor is missing or misshapen.
    """
    hidden = config.hidden_size
    if mlp.experts is None:
        return _maps(config, weights, (f"{name}.c_fc", f"{name}.c_proj"), (mlp.width,), interleaved=mlp.interleaved)
    tensors = {"router.weight": weights.take(f"{name}.gate.weight", (mlp.experts, hidden))}
    if mlp.balanced:
        tensors["balance"] = weights.take(f"{name}.bias", (mlp.experts,))
    names = (f"{name}.c_fc", f"{name}.c_proj")
    tensors |= _maps(config, weights, names, (mlp.experts, mlp.width), interleaved=mlp.interleaved)
    if mlp.shared_width is not None:
        names = (f"{name}.c_fc_shared", f"{name}.c_proj_shared")
        shared = _maps(config, weights, names, (mlp.shared_width,), interleaved=mlp.shared_interleaved)
        tensors |= {f"shared.{key}": tensor for key, tensor in shared.items()}
    if mlp.shared_gated:
        tensors["shared_gate.weight"] = weights.take(f"{name}.shared_expert_gate.weight", (1, hidden))
    return tensors


def _maps(
    config: SbevalConfig, weights: Weights, names: tuple[str, str], sizes: tuple[int, ...], *, interleaved: bool
) -> dict[str, Tensor]:
    """Tensors of an MLP, or of one for each expert, of sizes ([experts,] width)."""
    assert isinstance(config.bias, list)
    *experts, width = sizes
    first, last = names
    gated = config.activation in GATED_ACTIVATIONS
    inner, hidden = width * (2 if gated else 1), config.hidden_size
    tensors = {"down_proj.weight": weights.take(f"{last}.weight", (*experts, hidden, width))}
    if "mlp" in config.bias:
        tensors["down_proj.bias"] = weights.take(f"{last}.bias", (*experts, hidden))
    for part in ("weight", "bias") if "mlp" in config.bias else ("weight",):
        both = weights.take(f"{first}.{part}", (*experts, inner, hidden) if part == "weight" else (*experts, inner))
        if not gated:
            tensors[f"up_proj.{part}"] = both
            continue
        rows = both.movedim(len(experts), 0)
        up, gate = (rows[1::2], rows[::2]) if interleaved else rows.chunk(2)
        tensors[f"up_proj.{part}"], tensors[f"gate_proj.{part}"] = (x.movedim(0, len(experts)) for x in (up, gate))
    return tensors
