"""Gated MLPs: computes `activation(gate) * up` with one fused kernel, if the results agree on a sample.

The kernel also writes the zero padding that an `AlignedLinear` (a padded linear layer) reads at the end of each row.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sbeval.model_adapters.prepare.change import Change, Setting, Undo
from sbeval.model_adapters.prepare.changes.linear import AlignedLinear
from sbeval.model_adapters.prepare.replacing import give_back_modules, replace_modules
from sbeval.models.config import PLAIN_ACTIVATIONS
from sbeval.models.kernels.devices import runs_triton
from sbeval.models.mlp import UNGATED, activate
from sbeval.scoring.body import same_but_for_rounding

_MAPS = {"gate_proj", "up_proj", "down_proj"}
_SAMPLE_ROWS = 4
_LARGEST_CHANNEL = 100.0  # the scale of the second sample, above the 7 to 16 at which some MLPs clamp their channels
_WEIGHTS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_SAME_ACTIVATION = 1e-5  # the exact GELU and its tanh approximation are 5e-4 apart


class FusedGatedMLP(nn.Module):
    """`down_proj(activation(gate_proj(x)) * up_proj(x))` with the linear layers of the MLP that it replaces."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, mlp: nn.Module, activation: str) -> None:
        super().__init__()
        for name, child in mlp.named_children():
            self.add_module(name, child)
        self.activation = activation
        self.training = mlp.training

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps [..., D] to [..., D]."""
        gate: Tensor = self.gate_proj(hidden)
        up: Tensor = self.up_proj(hidden)
        needs_gradient = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
        if needs_gradient or gate.dtype == torch.float64 or not runs_triton(gate):
            inner = activate(self.activation, gate) * up
        else:
            # imported here because triton is not installed on every machine
            from sbeval.models.kernels.gated import kernel_gated

            width = self.down_proj.padded_in_features if isinstance(self.down_proj, AlignedLinear) else None
            inner = kernel_gated(self.activation, gate, up, out_width=width)
        output: Tensor = self.down_proj(inner)
        return output


@torch.no_grad()
def fuse_mlps(model: nn.Module) -> dict[str, nn.Module]:
    """Replaces every plain gated MLP by a `FusedGatedMLP`, and returns the replaced modules by name.

    Each MLP is compared with its replacement on a sample. MLPs with an activation that the kernel does not know, with
    hooks or with further submodules stay as they are.
    """
    return replace_modules(model, _fused_mlp)


def _fused_mlp(module: Any) -> FusedGatedMLP | None:
    children = {name for name, _ in module.named_children()}
    if isinstance(module, FusedGatedMLP) or not _MAPS <= children <= _MAPS | {"act_fn"}:
        return None
    hooked = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    weight: Any = getattr(module.gate_proj, "weight", None)
    # weights of a tensor-parallel plan are DTensors (`full_tensor`); each linear layer computes with its rank's shard
    plain = type(weight) is nn.Parameter or hasattr(weight, "full_tensor")
    if hooked or module._parameters or not plain or weight.device.type == "meta":
        return None
    if weight.dtype not in _WEIGHTS:  # the weight is quantised
        return None
    if (activation := _activation_of(module, weight.device)) is None:
        return None
    fused = FusedGatedMLP(module, activation)
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, _SAMPLE_ROWS, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    try:
        largest = float(torch.minimum(module.gate_proj(sample).abs().max(), module.up_proj(sample).abs().max()))
        # the second sample has large values: only these show whether an MLP clamps its channels
        samples = sample, sample * min(max(_LARGEST_CHANNEL / max(largest, 1e-3), 1.0), 1e4)
        same = all(same_but_for_rounding(fused(x), module(x)) for x in samples)
    except (RuntimeError, TypeError, ValueError):
        return None
    return fused if same else None


def _activation_of(module: Any, device: torch.device) -> str | None:
    if (act_fn := getattr(module, "act_fn", None)) is None:
        return UNGATED.get(getattr(module, "activation", ""))
    near, far = torch.linspace(-6.0, 6.0, 97), torch.tensor([10.5, 20.0, 100.0, 1000.0])
    sample = torch.cat([-far, near, far]).to(device)
    try:
        expected = act_fn(sample)
    except (RuntimeError, TypeError, ValueError):
        return None

    def same(name: str) -> bool:
        return torch.allclose(activate(name, sample), expected, rtol=1e-6, atol=_SAME_ACTIVATION)

    return next(filter(same, PLAIN_ACTIVATIONS), None)


def _apply(model: nn.Module, setting: Setting) -> Undo | None:
    return give_back_modules(model, fuse_mlps(model))


CHANGE = Change(name="fused MLPs", apply=_apply, applies_to=lambda setting: setting.replaces_modules, judged=True)
