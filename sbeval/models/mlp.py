"""What a block does to each position alone: an MLP, or experts, through which tokens go in one grouped product.

Shape suffixes: N tokens, E hidden_size, X experts, T experts of a token, S = N * T rows sorted by expert, I and O
widths in and out.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, grouped_mm, relu, silu

from sbeval.models.config import GATED_ACTIVATIONS, SbevalConfig

_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROW_BYTES = 16
MOST_TOKENS = 16384
"""Tokens that go through experts at once where no gradient is kept: each is held as often as it has experts."""
UNGATED = {"swiglu": "silu", "geglu": "gelu"}
"""What a gated activation applies to its gate."""


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


def activate(name: str, x: Tensor) -> Tensor:
    """Applies an activation by its name in the configuration, gated ones to their gate."""
    return _FUNCTIONS[UNGATED.get(name, name)](x)


def activated(name: str, gate: Tensor | None, up: Tensor) -> Tensor:
    """Applies an activation by its name in the configuration: gated in one pass on a GPU without gradients."""
    if gate is None:
        return activate(name, up)
    plain = gate.dtype == torch.float64 or torch.is_grad_enabled() or torch.compiler.is_compiling()
    if gate.is_cuda and not plain:
        from sbeval.models.kernels.gated import kernel_gated  # triton, which runs on a GPU and is not on every machine

        return kernel_gated(UNGATED[name], gate, up)
    return activate(name, gate) * up


class MLP(nn.Module):
    """Two linear maps around an activation, or three with a gate."""

    def __init__(self, config: SbevalConfig, width: int) -> None:
        super().__init__()
        bias = "mlp" in config.bias
        self.activation = config.activation
        gated = config.activation in GATED_ACTIVATIONS
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=bias) if gated else None
        self.up_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, L, hidden_size] to the same."""
        gate = None if self.gate_proj is None else self.gate_proj(hidden)
        output: Tensor = self.down_proj(activated(self.activation, gate, self.up_proj(hidden)))
        return output


class Experts(nn.Module):
    """One matrix an expert, [X, O, I]."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, x_SI: Tensor, end_X: Tensor) -> Tensor:
        """Maps rows to [S, O]; those of expert x end before row `end_X[x]` (int32) and begin where x - 1's end."""
        whole = not any(width * x_SI.element_size() % _ROW_BYTES for width in self.weight.shape[1:])
        if x_SI.dtype in _GROUPED_DTYPES and whole:
            return grouped_mm(x_SI, self.weight.mT, offs=end_X)
        bounds = [0, *end_X.tolist()]
        ranges = zip(bounds[:-1], bounds[1:], self.weight, strict=True)
        return torch.cat([x_SI[start:end] @ weight.T for start, end, weight in ranges])


class Assignment:
    """Which rows go to which expert, from the experts `index_NT` (int64) of each token.

    Attributes:
        token_S: int64 token of each row, rows sorted by expert.
        end_X: int32 end of each expert's rows.
    """

    def __init__(self, index_NT: Tensor, experts: int) -> None:
        self._shape = index_NT.shape
        sorted_S, self._order_S = index_NT.flatten().sort(stable=True)
        self.token_S = self._order_S // index_NT.shape[1]
        every_X = torch.arange(experts, device=index_NT.device)
        self.end_X = torch.searchsorted(sorted_S, every_X, right=True).to(torch.int32)

    def rows(self, x_NTI: Tensor) -> Tensor:
        """[N, T, I] to [S, I] in the order of experts."""
        return x_NTI.flatten(0, 1)[self._order_S]

    def by_token(self, x_SO: Tensor) -> Tensor:
        """[S, O] to [N, T, O] in the order of tokens."""
        return torch.empty_like(x_SO).index_copy(0, self._order_S, x_SO).view(*self._shape, x_SO.shape[-1])

    def mixed(self, x_SO: Tensor, weight_NT: Tensor) -> Tensor:
        """[S, O] to the sum of each token's rows by their weights, [N, O]."""
        return torch.bmm(weight_NT[:, None], self.by_token(x_SO))[:, 0]


class Mixture(nn.Module):
    """A router, the experts it chooses for each token, and an MLP beside them that every token goes through."""

    def __init__(self, config: SbevalConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        assert config.num_experts_per_token is not None
        width, inner = config.hidden_size, config.intermediate_size
        self.activation = config.activation
        self.chosen, self.normalizes = config.num_experts_per_token, config.normalize_expert_weights
        self.router = nn.Linear(width, config.num_experts, bias=False)
        self.balance = nn.Parameter(torch.zeros(config.num_experts)) if config.balanced_experts else None
        is_gated = config.activation in GATED_ACTIVATIONS
        self.gate_proj = Experts(config.num_experts, width, inner) if is_gated else None
        self.up_proj = Experts(config.num_experts, width, inner)
        self.down_proj = Experts(config.num_experts, inner, width)
        shared = config.shared_intermediate_size
        self.shared = None if shared is None else MLP(config, shared)
        self.shared_gate = nn.Linear(width, 1, bias=False) if config.shared_expert_gating else None

    def choose(self, x_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights and indices of each token's experts, [N, T] each."""
        logits_NX = self.router(x_NE)
        exact = torch.promote_types(logits_NX.dtype, torch.float32)
        if self.balance is not None:
            index_NT = (logits_NX.softmax(-1, dtype=exact) + self.balance).topk(self.chosen, dim=-1).indices
            return logits_NX.gather(-1, index_NT).softmax(-1, dtype=exact).to(x_NE.dtype), index_NT
        if self.normalizes:
            logit_NT, index_NT = logits_NX.topk(self.chosen, dim=-1)
            return logit_NT.softmax(-1, dtype=exact).to(x_NE.dtype), index_NT
        weight_NT, index_NT = logits_NX.softmax(-1, dtype=exact).to(x_NE.dtype).topk(self.chosen, dim=-1)
        return weight_NT, index_NT

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, L, E] to the same."""
        x_NE = hidden.flatten(0, -2)
        if torch.is_grad_enabled() or len(x_NE) <= MOST_TOKENS:
            return self._mixed(x_NE).view(hidden.shape)
        output_NE = torch.empty_like(x_NE)
        for start in range(0, len(x_NE), MOST_TOKENS):
            output_NE[start : start + MOST_TOKENS] = self._mixed(x_NE[start : start + MOST_TOKENS])
        return output_NE.view(hidden.shape)

    def _mixed(self, x_NE: Tensor) -> Tensor:
        weight_NT, index_NT = self.choose(x_NE)
        assigned = Assignment(index_NT, self.up_proj.weight.shape[0])
        x_SE = x_NE[assigned.token_S]
        gate_SI = None if self.gate_proj is None else self.gate_proj(x_SE, assigned.end_X)
        inner_SI = activated(self.activation, gate_SI, self.up_proj(x_SE, assigned.end_X))
        output_NE = assigned.mixed(self.down_proj(inner_SI, assigned.end_X), weight_NT)
        if self.shared is None:
            return output_NE
        beside_NE: Tensor = self.shared(x_NE)
        return output_NE + (beside_NE if self.shared_gate is None else beside_NE * self.shared_gate(x_NE).sigmoid())
