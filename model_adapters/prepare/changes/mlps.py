"""Gated MLPs whose activation and product are one kernel, where that gives the same numbers.

The kernel also writes the zeros that an aligned linear layer reads behind each row.
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
_LARGEST_CHANNEL = 100.0  # beyond what MLPs are clamped at, 7 to 16
_WEIGHTS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_SAME_ACTIVATION = 1e-5  # the two forms of GELU are 5e-4 apart


class FusedGatedMLP(nn.Module):
    """`down_proj(activation(gate_proj(x)) * up_proj(x))` with the maps of the MLP it stands in for."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, of: nn.Module, activation: str) -> None:
        super().__init__()
        for name, child in of.named_children():
            self.add_module(name, child)
        self.activation = activation
        self.training = of.training

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] to the same."""
        gate: Tensor = self.gate_proj(hidden)
        up: Tensor = self.up_proj(hidden)
        kept = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
        if kept or gate.dtype == torch.float64 or not runs_triton(gate):
            inner = activate(self.activation, gate) * up
        else:
            # triton, which runs on a GPU and is not on every machine
            from sbeval.models.kernels.gated import kernel_gated

            width = self.down_proj.padded_in_features if isinstance(self.down_proj, AlignedLinear) else None
            inner = kernel_gated(self.activation, gate, up, out_width=width)
        output: Tensor = self.down_proj(inner)
        return output


@torch.no_grad()
def fuse_mlps(model: nn.Module) -> dict[str, nn.Module]:
    """Replaces every gated MLP that computes no more than that, and returns those replaced by their names.

    Each is compared on a sample first; those with another activation, hooks or parts of their own stay as they are.
    """
    return replace_modules(model, _fused_mlp)


def _fused_mlp(module: Any) -> FusedGatedMLP | None:
    children = {name for name, _ in module.named_children()}
    if isinstance(module, FusedGatedMLP) or not _MAPS <= children <= _MAPS | {"act_fn"}:
        return None
    hooked = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    weight: Any = getattr(module.gate_proj, "weight", None)
    # a tensor plan's maps compute with what their process holds
    plain = type(weight) is nn.Parameter or hasattr(weight, "full_tensor")
    if hooked or module._parameters or not plain or weight.device.type == "meta":
        return None
    if weight.dtype not in _WEIGHTS:  # quantised
        return None
    if (activation := _activation_of(module, weight.device)) is None:
        return None
    fused = FusedGatedMLP(module, activation)
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, _SAMPLE_ROWS, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    try:
        largest = float(torch.minimum(module.gate_proj(sample).abs().max(), module.up_proj(sample).abs().max()))
        # some clamp the channels, which shows at large ones alone
        samples = sample, sample * min(max(_LARGEST_CHANNEL / max(largest, 1e-3), 1.0), 1e4)
        same = all(same_but_for_rounding(fused(x), module(x)) for x in samples)
    except (RuntimeError, TypeError, ValueError):
        return None
    return fused if same else None


def _activation_of(module: Any, device: torch.device) -> str | None:
    if (own := getattr(module, "act_fn", None)) is None:
        return UNGATED.get(getattr(module, "activation", ""))
    near, far = torch.linspace(-6.0, 6.0, 97), torch.tensor([10.5, 20.0, 100.0, 1000.0])
    sample = torch.cat([-far, near, far]).to(device)
    try:
        expected = own(sample)
    except (RuntimeError, TypeError, ValueError):
        return None

    def same(name: str) -> bool:
        return torch.allclose(activate(name, sample), expected, rtol=1e-6, atol=_SAME_ACTIVATION)

    return next(filter(same, PLAIN_ACTIVATIONS), None)


def _apply(model: nn.Module, setting: Setting) -> Undo | None:
    return give_back_modules(model, fuse_mlps(model))


CHANGE = Change(name="fused MLPs", apply=_apply, wanted=lambda setting: setting.replaces_parts, judged=True)
