"""The MLP of a decoder block, and the mixture of experts that may replace it.

Tokens are sorted by expert, and all experts run in one grouped matmul (`torch.nn.functional.grouped_mm`), on a GPU
without waiting for the number of tokens of each expert. If rows are not a multiple of 16 bytes, or in fp64,
`grouped_mm` does not run, and the experts run one after another.

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
"""Most tokens that pass the experts at once without gradients: each token is copied for each of its experts."""
UNGATED = {"swiglu": "silu", "geglu": "gelu"}
"""The activation that a gated activation applies to its gate."""


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


def activate(name: str, x: Tensor) -> Tensor:
    """Applies an activation by its name in the configuration; for a gated name, the one it applies to its gate."""
    return _FUNCTIONS[UNGATED.get(name, name)](x)


def activated(name: str, gate: Tensor | None, up: Tensor) -> Tensor:
    """Applies a plain activation if `gate` is None, else a gated one.

    On a GPU without gradients, a gated activation is one fused kernel.
    """
    if gate is None:
        return activate(name, up)
    unfused = gate.dtype == torch.float64 or torch.is_grad_enabled() or torch.compiler.is_compiling()
    if gate.is_cuda and not unfused:
        from sbeval.models.kernels.gated import kernel_gated  # imports triton, which not every machine has

        return kernel_gated(UNGATED[name], gate, up)
    return activate(name, gate) * up


class MLP(nn.Module):
    """MLP with up, down and, for a gated activation, gate projection."""

    def __init__(self, config: SbevalConfig, width: int) -> None:
        super().__init__()
        bias = "mlp" in config.bias
        self.activation = config.activation
        gated = config.activation in GATED_ACTIVATIONS
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=bias) if gated else None
        self.up_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns [B, L, hidden_size]."""
        gate = None if self.gate_proj is None else self.gate_proj(hidden)
        output: Tensor = self.down_proj(activated(self.activation, gate, self.up_proj(hidden)))
        return output


class Experts(nn.Module):
    """The weight matrices of all experts, [X, O, I], applied in one grouped matmul."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, x_SI: Tensor, end_X: Tensor) -> Tensor:
        """Returns [S, O]; the rows of expert x follow those of expert x - 1 and end before row `end_X[x]` (int32)."""
        is_aligned = not any(width * x_SI.element_size() % _ROW_BYTES for width in self.weight.shape[1:])
        if x_SI.dtype in _GROUPED_DTYPES and is_aligned:
            return grouped_mm(x_SI, self.weight.mT, offs=end_X)
        bounds = [0, *end_X.tolist()]
        ranges = zip(bounds[:-1], bounds[1:], self.weight, strict=True)
        return torch.cat([x_SI[start:end] @ weight.T for start, end, weight in ranges])


class Assignment:
    """The order of rows sorted by expert, from the indices `index_NT` (int64) of each token's experts.

    Attributes:
        token_S: int64 token of each row; rows are sorted by expert.
        end_X: int32 end of each expert's rows.
    """

    def __init__(self, index_NT: Tensor, experts: int) -> None:
        self._shape = index_NT.shape
        sorted_S, self._order_S = index_NT.flatten().sort(stable=True)
        self.token_S = self._order_S // index_NT.shape[1]
        every_X = torch.arange(experts, device=index_NT.device)
        self.end_X = torch.searchsorted(sorted_S, every_X, right=True).to(torch.int32)

    def rows(self, x_NTI: Tensor) -> Tensor:
        """Sorts rows by expert, from [N, T, I] to [S, I]."""
        return x_NTI.flatten(0, 1)[self._order_S]

    def by_token(self, x_SO: Tensor) -> Tensor:
        """Sorts rows back by token, from [S, O] to [N, T, O]."""
        return torch.empty_like(x_SO).index_copy(0, self._order_S, x_SO).view(*self._shape, x_SO.shape[-1])

    def mixed(self, x_SO: Tensor, weight_NT: Tensor) -> Tensor:
        """Returns each token's weighted sum of its experts' outputs, from [S, O] to [N, O]."""
        return torch.bmm(weight_NT[:, None], self.by_token(x_SO))[:, 0]


class Mixture(nn.Module):
    """Mixture of experts: a router, the experts, and an optional shared expert for every token."""

    def __init__(self, config: SbevalConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        assert config.num_experts_per_token is not None
        width, inner = config.hidden_size, config.intermediate_size
        self.activation = config.activation
        self.experts_per_token = config.num_experts_per_token
        self.normalizes = config.normalize_expert_weights
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
        softmax_dtype = torch.promote_types(logits_NX.dtype, torch.float32)
        if self.balance is not None:
            index_NT = (
                (logits_NX.softmax(-1, dtype=softmax_dtype) + self.balance).topk(self.experts_per_token, dim=-1).indices
            )
            return logits_NX.gather(-1, index_NT).softmax(-1, dtype=softmax_dtype).to(x_NE.dtype), index_NT
        if self.normalizes:
            logit_NT, index_NT = logits_NX.topk(self.experts_per_token, dim=-1)
            return logit_NT.softmax(-1, dtype=softmax_dtype).to(x_NE.dtype), index_NT
        weight_NT, index_NT = (
            logits_NX.softmax(-1, dtype=softmax_dtype).to(x_NE.dtype).topk(self.experts_per_token, dim=-1)
        )
        return weight_NT, index_NT

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns [B, L, E]; without gradients, in chunks of `MOST_TOKENS` tokens."""
        x_NE = hidden.flatten(0, -2)
        if torch.is_grad_enabled() or len(x_NE) <= MOST_TOKENS:
            return self._mixed(x_NE).view(hidden.shape)
        output_NE = torch.empty_like(x_NE)
        for start in range(0, len(x_NE), MOST_TOKENS):
            output_NE[start : start + MOST_TOKENS] = self._mixed(x_NE[start : start + MOST_TOKENS])
        return output_NE.view(hidden.shape)

    def _mixed(self, x_NE: Tensor) -> Tensor:
        weight_NT, index_NT = self.choose(x_NE)
        assignment = Assignment(index_NT, self.up_proj.weight.shape[0])
        x_SE = x_NE[assignment.token_S]
        gate_SI = None if self.gate_proj is None else self.gate_proj(x_SE, assignment.end_X)
        inner_SI = activated(self.activation, gate_SI, self.up_proj(x_SE, assignment.end_X))
        output_NE = assignment.mixed(self.down_proj(inner_SI, assignment.end_X), weight_NT)
        if self.shared is None:
            return output_NE
        shared_NE: Tensor = self.shared(x_NE)
        if self.shared_gate is not None:
            shared_NE = shared_NE * self.shared_gate(x_NE).sigmoid()
        return output_NE + shared_NE
