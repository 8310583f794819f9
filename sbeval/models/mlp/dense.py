"""The MLP of a block, and activations by their names in the configuration."""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from sbeval.models.config import GATED_ACTIVATIONS, SbevalConfig

UNGATED = {"swiglu": "silu", "geglu": "gelu"}
"""What a gated activation applies to its gate."""


def activate(name: str, x: Tensor) -> Tensor:
    """Applies an activation by its name in the configuration, gated ones to their gate."""
    match name:
        case "swiglu" | "silu":
            return silu(x)
        case "geglu" | "gelu":
            return gelu(x)
        case "gelu_tanh":
            return gelu(x, approximate="tanh")
        case "relu":
            return relu(x)
    raise ValueError(f"no activation is called {name!r}")


def gated(name: str, gate: Tensor, up: Tensor) -> Tensor:
    """Applies a gated activation by its name in the configuration: in one pass on a GPU where no gradient is kept."""
    plain = gate.dtype == torch.float64 or torch.is_grad_enabled() or torch.compiler.is_compiling()
    if gate.is_cuda and not plain:
        from sbeval.models.kernels.gated import kernel_gated

        return kernel_gated(UNGATED[name], gate, up)
    return activate(name, gate) * up


class MLP(nn.Module):
    """Two linear maps around an activation, or three with a gate."""

    def __init__(self, config: SbevalConfig, width: int) -> None:
        super().__init__()
        assert isinstance(config.bias, list)
        bias = "mlp" in config.bias
        self.activation = config.activation
        gated = config.activation in GATED_ACTIVATIONS
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=bias) if gated else None
        self.up_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, L, hidden_size] to the same."""
        inner = self.up_proj(hidden)
        if self.gate_proj is None:
            inner = activate(self.activation, inner)
        else:
            inner = gated(self.activation, self.gate_proj(hidden), inner)
        output: Tensor = self.down_proj(inner)
        return output
