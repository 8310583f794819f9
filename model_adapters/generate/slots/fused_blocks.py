"""A step of Llama-style blocks in six kernels each; a model's own code takes about twenty.

The kernels of the linear maps also compute the norms, biases, activations and residual sums beside them, and read the
model's own weights. Blocks are recognised by the names of their parts; `served` tests whether they compute the same.

Shape suffixes: E hidden_size, F channels of the MLP, H query heads, G key/value heads, D head_dim, V
vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from sbeval.model_adapters.prepare.changes.linear import AlignedLinear
from sbeval.model_adapters.prepare.changes.mlps import FusedGatedMLP
from sbeval.model_adapters.prepare.changes.sums import RowParallelForward
from sbeval.models import SbevalForCausalLM
from sbeval.models.mlp import UNGATED
from sbeval.models.rope import cos_sin
from sbeval.models.slots import SlotCache, SlotLayer, softmax_decode

_ACTIVATIONS = ("silu", "gelu")
_WIDTH_MULTIPLE = 32
_DTYPES = (torch.bfloat16, torch.float32)  # sums that are normed late might overflow fp16


class _Block(NamedTuple):
    """The parts of one block."""

    attention: Any
    maps: tuple[nn.Linear, nn.Linear, nn.Linear]
    output: nn.Linear
    gated: tuple[nn.Linear, nn.Linear]
    down: nn.Linear
    norms: tuple[nn.Module, nn.Module]
    activation: str
    head_dim: int
    residual_multiplier: float


class FusedBlocks:
    """The blocks of a model, for steps of one slot: with more rows, the library's matrix products are faster."""

    def __init__(self, model: Any, blocks: list[_Block]) -> None:
        self._model, self._blocks = model, blocks

    @classmethod
    def of(cls, model: Any) -> Self:
        """Returns a model's blocks.

        Raises:
            ValueError: the blocks have other parts.
        """
        layers = getattr(getattr(model, "model", None), "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ValueError("it keeps its blocks in another place than Llama")
        if model.dtype not in _DTYPES:
            raise ValueError(f"it computes in {str(model.dtype).removeprefix('torch.')}")
        # the same angles serve every layer
        attentions = [getattr(layer, "self_attn", None) for layer in layers]
        if len({bool(getattr(part, "rotates", getattr(part, "use_rope", True))) for part in attentions}) > 1:
            raise ValueError("some of its layers rotate and others do not")
        return cls(model, [_block_of(layer, model.config) for layer in layers])

    def logits(self, token_11: Tensor, cache: SlotCache, rope: Any | None) -> Tensor:
        """Returns logits [1, V] of a step that has begun; without `rope`, a transformers model rotates."""
        model, config = self._model, self._model.config
        hidden_1E = model.get_input_embeddings()(token_11)[:, 0]
        own = isinstance(model, SbevalForCausalLM)
        if own and config.embedding_multiplier is not None:
            hidden_1E = hidden_1E * config.embedding_multiplier
        position_11 = cache.position_B[:, None].long()
        angles: dict[str, Tensor] = {}
        if own and rope is not None:
            cos, sin = cos_sin(rope, position_11)
            angles = {"cos_F": cos[0, 0, 0], "sin_F": sin[0, 0, 0]}
        elif not own:
            cos, sin = model.model.rotary_emb(hidden_1E[:, None], position_ids=position_11)
            angles = {"cos_F": cos[0, 0, : cos.shape[-1] // 2], "sin_F": sin[0, 0, : sin.shape[-1] // 2]}
        layers: list[Any] = cache.layers
        for block, layer in zip(self._blocks, layers, strict=True):
            self._step(block, hidden_1E, layer, cache, angles)
        normed_11E = model.model.norm(hidden_1E[:, None])
        logits_11V: Tensor = model.head_logits(normed_11E) if own else model.get_output_embeddings()(normed_11E)
        return logits_11V[:, 0]

    def _step(
        self, block: _Block, hidden_1E: Tensor, layer: SlotLayer, cache: SlotCache, angles: dict[str, Tensor]
    ) -> None:
        # triton, which runs on a GPU and is not on every machine
        from sbeval.models.kernels.one_row import Slot, map_row

        head_dim = block.head_dim
        weights = [_held(linear) for linear in block.maps]
        query_width, key_width = len(weights[0]), len(weights[1])
        heads_1T = hidden_1E.new_empty(1, query_width + 2 * key_width)
        before, after = block.norms
        biases = _biases(*block.maps)
        q_1H1D = heads_1T[:, :query_width].view(1, -1, 1, head_dim)
        v_1G1D = heads_1T[:, query_width + key_width :].view(1, -1, 1, head_dim)
        if not layer.is_initialized:
            layer.lazy_initialization(v_1G1D, v_1G1D)
        assert layer.keys is not None
        assert layer.values is not None
        slot = Slot(k_GKD=layer.keys[0], v_GKD=layer.values[0], position_1=cache.position_B, **angles)
        map_row(hidden_1E, weights, biases, out=heads_1T, norm_E=before.weight, eps=_eps(before), slot=slot)  # type: ignore[arg-type]
        keys, values = layer.attended()
        if hasattr(block.attention, "mixer"):
            mixed = block.attention.mixer.step(q_1H1D, v_1G1D, cache, keys, values)
        else:
            mixed = softmax_decode(q_1H1D, keys, values, cache.length_B, scale=block.attention.scaling)
        mixed_1T = mixed.reshape(1, query_width)
        norm: Callable[[Tensor], Tensor] | None = getattr(block.attention, "head_norm", None)
        if norm is not None:
            mixed_1T = norm(mixed_1T[:, None])[:, 0]
        _add_row(mixed_1T, block.output, hidden_1E, block.residual_multiplier)
        inner_1F = hidden_1E.new_empty(1, _readable(block.down))
        weights = [_held(linear) for linear in block.gated]
        before_it: dict[str, Any] = {"norm_E": after.weight, "eps": _eps(after)}
        map_row(hidden_1E, weights, _biases(*block.gated), out=inner_1F, activation=block.activation, **before_it)
        _add_row(inner_1F, block.down, hidden_1E, block.residual_multiplier)


def _add_row(x_1F: Tensor, linear: nn.Linear, hidden_1E: Tensor, scale: float) -> None:
    """Adds a map of a row to the residual stream."""
    # triton, which runs on a GPU and is not on every machine
    from sbeval.models.kernels.one_row import map_row

    if isinstance(linear.forward, RowParallelForward):
        addend_1E = map_row(x_1F, [_held(linear)], out=torch.empty_like(hidden_1E), scale=scale)
        hidden_1E += linear.forward.total(addend_1E)
    else:
        map_row(x_1F, [linear.weight], _biases(linear), out=hidden_1E, scale=scale, add=True)


def _held(linear: nn.Linear, name: str = "weight") -> Tensor:
    """What this process holds of a parameter."""
    parameter: Any = getattr(linear, name)
    return cast(Tensor, parameter.to_local() if hasattr(parameter, "to_local") else parameter)


def _biases(*linears: nn.Linear) -> list[Tensor] | None:
    return None if linears[0].bias is None else [_held(linear, "bias") for linear in linears]


def _block_of(layer: Any, config: Any) -> _Block:
    try:
        attention, mlp = layer.self_attn, layer.mlp
        maps = (attention.q_proj, attention.k_proj, attention.v_proj)
        gated = (mlp.gate_proj, mlp.up_proj)
        norms = (
            layer.input_norm if hasattr(layer, "input_norm") else layer.input_layernorm,
            layer.post_attention_norm if hasattr(layer, "post_attention_norm") else layer.post_attention_layernorm,
        )
        head_dim = int(attention.head_dim)
        linears = (*maps, attention.o_proj, *gated, mlp.down_proj)
    except AttributeError as error:
        raise ValueError(f"a part of its blocks has no {error.name}") from error
    activation = _activation(mlp, config)
    if (reason := _other_parts(attention, linears, norms, activation)) is not None:
        raise ValueError(reason)
    scale = float(getattr(layer, "residual_multiplier", None) or 1.0)
    return _Block(attention, maps, attention.o_proj, gated, mlp.down_proj, norms, activation, head_dim, scale)


def _other_parts(attention: Any, linears: Sequence[Any], norms: Sequence[Any], activation: str) -> str | None:
    """The first part that the kernels do not compute, None if they compute all."""
    if activation not in _ACTIVATIONS:
        return f"its activation is {activation}"
    if any(type(part) not in (nn.Linear, AlignedLinear) for part in linears):
        return "its linear maps are of another kind"
    if any(hasattr(linear.weight, "to_local") for linear in linears):
        summed = [
            linear for linear in linears if isinstance(linear.forward, RowParallelForward) and linear.bias is None
        ]
        given, taken = (len(_held(linears[i])) for i in (0, 4)), (_held(linears[i]).shape[1] for i in (3, 6))
        if summed != [linears[3], linears[6]] or [*given] != [*taken]:
            return "processes share its linear maps in another way"
    if other := [type(norm).__name__ for norm in norms if _eps(norm) is None]:
        return f"its norms are {', '.join(other)}"
    named = ("q_norm", "k_norm", "head_gate", "exclusive")
    if more := [name for name in named if getattr(attention, name, None) not in (None, False)]:
        return f"its attention has {', '.join(more)}"
    if getattr(getattr(attention, "mixer", None), "bias", None) is not None:
        return "its attention has a bias"
    maps, gated = linears[:3], linears[4:6]
    if any(len({part.bias is None for part in parts}) > 1 for parts in (maps, gated)):
        return "some of its maps have a bias and others have none"
    if attention.head_dim % 2 or any(len(_held(part)) % _WIDTH_MULTIPLE for part in maps):
        return f"its heads together are no multiple of {_WIDTH_MULTIPLE} wide, or each has an odd width"
    return None


def _activation(mlp: Any, config: Any) -> str:
    name = mlp.activation if isinstance(mlp, FusedGatedMLP) else getattr(mlp, "activation", None)
    name = getattr(config, "hidden_act", "") if name is None else name
    return str(UNGATED.get(name, name))


def _eps(norm: Any) -> Any:
    """The epsilon of an RMSNorm, None for other norms."""
    if not type(norm).__name__.endswith("RMSNorm") or getattr(norm, "weight", None) is None:
        return None
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)


def _readable(part: nn.Linear) -> int:
    """Width of its input rows, padding included."""
    return part.padded_in_features if isinstance(part, AlignedLinear) else _held(part).shape[1]
