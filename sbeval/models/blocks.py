"""One block of the decoder: attention and MLP, each behind a norm and added to the residual stream."""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from sbeval.models.attention import Attention, Positions
from sbeval.models.config import GATED_ACTIVATIONS, SbevalConfig

UNGATED = {"swiglu": "silu", "geglu": "gelu"}
"""What a gated activation applies to its gate."""


def make_norm(config: SbevalConfig) -> nn.Module:
    """Returns the norm a configuration asks for, over the residual stream."""
    kind = nn.RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps)


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

    def __init__(self, config: SbevalConfig) -> None:
        super().__init__()
        assert isinstance(config.bias, list)
        bias = "mlp" in config.bias
        self.activation = config.activation
        gated = config.activation in GATED_ACTIVATIONS
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias) if gated else None
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, L, hidden_size] to the same."""
        inner = self.up_proj(hidden)
        if self.gate_proj is None:
            inner = activate(self.activation, inner)
        else:
            inner = gated(self.activation, self.gate_proj(hidden), inner)
        output: Tensor = self.down_proj(inner)
        return output


class DecoderBlock(GradientCheckpointingLayer):  # type: ignore[no-untyped-call]
    """Attention and MLP, each normed before and scaled by the residual multiplier after."""

    def __init__(self, config: SbevalConfig, layer_index: int) -> None:
        super().__init__()
        self.residual_multiplier = config.residual_multiplier
        self.input_norm = make_norm(config)
        self.self_attn = Attention(config, layer_index)
        self.post_attention_norm = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, positions: Positions, past_key_values: Cache | None = None) -> Tensor:
        """[B, L, hidden_size] to the same."""
        hidden = hidden + self._scaled(self.self_attn(self.input_norm(hidden), positions, past_key_values))
        return hidden + self._scaled(self.mlp(self.post_attention_norm(hidden)))

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.residual_multiplier is None else branch * self.residual_multiplier
