"""A decode step of Llama-style blocks with six kernels for each block; the model's own code launches about twenty.

The kernels of the linear layers also compute the norms, biases, activations and residual additions before or after
them. They read the weights of the model in place. A block is recognised by the names of its submodules, and `served`
tests whether its logits agree with those of the model's own code.

Shape suffixes: E hidden_size, F channels of the MLP, H query heads, G key/value heads, D head_dim, V vocabulary.
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
_DTYPES = (torch.bfloat16, torch.float32)  # not fp16: sums that are normalised after the matmul might overflow


class _Block(NamedTuple):
    """The submodules of one Llama-style block that the kernels read."""

    attention: Any
    projections: tuple[nn.Linear, nn.Linear, nn.Linear]
    output: nn.Linear
    gated: tuple[nn.Linear, nn.Linear]
    down: nn.Linear
    norms: tuple[nn.Module, nn.Module]
    activation: str
    head_dim: int
    residual_multiplier: float


class FusedBlocks:
    """The blocks of a model, for decode steps with a batch of one. For larger batches cuBLAS's matmuls are faster."""

    def __init__(self, model: Any, blocks: list[_Block]) -> None:
        self._model, self._blocks = model, blocks

    @classmethod
    def of(cls, model: Any) -> Self:
        """Returns the blocks of a model, if the kernels can compute all their submodules.

        Raises:
            ValueError: the kernels cannot compute a submodule of the blocks; the message names it.
        """
        layers = getattr(getattr(model, "model", None), "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ValueError("its blocks are not in model.layers, as Llama's are")
        if model.dtype not in _DTYPES:
            raise ValueError(f"it computes in {str(model.dtype).removeprefix('torch.')}")
        # all layers share one table of cosines and sines
        attentions = [getattr(layer, "self_attn", None) for layer in layers]
        if len({bool(getattr(part, "rotates", getattr(part, "use_rope", True))) for part in attentions}) > 1:
            raise ValueError("some of its layers have rotary embeddings and others do not")
        return cls(model, [_block_of(layer, model.config) for layer in layers])

    def logits(self, token_11: Tensor, cache: SlotCache, rope: Any | None) -> Tensor:
        """Returns the logits [1, V] of a decode step; call `cache.begin_step` before.

        `rope` are the RoPE frequencies; they are not used for a transformers model, which has its own rotary embedding.
        """
        model, config = self._model, self._model.config
        hidden_1E = model.get_input_embeddings()(token_11)[:, 0]
        is_ours = isinstance(model, SbevalForCausalLM)
        if is_ours and config.embedding_multiplier is not None:
            hidden_1E = hidden_1E * config.embedding_multiplier
        position_11 = cache.position_B[:, None].long()
        angles: dict[str, Tensor] = {}
        if is_ours and rope is not None:
            cos, sin = cos_sin(rope, position_11)
            angles = {"cos_F": cos[0, 0, 0], "sin_F": sin[0, 0, 0]}
        elif not is_ours:
            cos, sin = model.model.rotary_emb(hidden_1E[:, None], position_ids=position_11)
            angles = {"cos_F": cos[0, 0, : cos.shape[-1] // 2], "sin_F": sin[0, 0, : sin.shape[-1] // 2]}
        layers: list[Any] = cache.layers
        for block, layer in zip(self._blocks, layers, strict=True):
            self._step(block, hidden_1E, layer, cache, angles)
        normed_11E = model.model.norm(hidden_1E[:, None])
        logits_11V: Tensor = model.head_logits(normed_11E) if is_ours else model.get_output_embeddings()(normed_11E)
        return logits_11V[:, 0]

    def _step(
        self, block: _Block, hidden_1E: Tensor, layer: SlotLayer, cache: SlotCache, angles: dict[str, Tensor]
    ) -> None:
        # imported here because triton is not installed on every machine
        from sbeval.models.kernels.one_row import Slot, map_row

        head_dim = block.head_dim
        weights = [_local(linear) for linear in block.projections]
        query_width, key_width = len(weights[0]), len(weights[1])
        heads_1T = hidden_1E.new_empty(1, query_width + 2 * key_width)
        before, after = block.norms
        biases = _biases(*block.projections)
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
        weights = [_local(linear) for linear in block.gated]
        before_it: dict[str, Any] = {"norm_E": after.weight, "eps": _eps(after)}
        map_row(hidden_1E, weights, _biases(*block.gated), out=inner_1F, activation=block.activation, **before_it)
        _add_row(inner_1F, block.down, hidden_1E, block.residual_multiplier)


def _add_row(x_1F: Tensor, linear: nn.Linear, hidden_1E: Tensor, scale: float) -> None:
    """Applies a linear layer to a row and adds the result to the residual stream."""
    # imported here because triton is not installed on every machine
    from sbeval.models.kernels.one_row import map_row

    if isinstance(linear.forward, RowParallelForward):
        addend_1E = map_row(x_1F, [_local(linear)], out=torch.empty_like(hidden_1E), scale=scale)
        hidden_1E += linear.forward.total(addend_1E)
    else:
        map_row(x_1F, [linear.weight], _biases(linear), out=hidden_1E, scale=scale, add=True)


def _local(linear: nn.Linear, name: str = "weight") -> Tensor:
    """Returns a parameter of a linear layer, or this rank's shard if the parameter is a DTensor."""
    parameter: Any = getattr(linear, name)
    return cast(Tensor, parameter.to_local() if hasattr(parameter, "to_local") else parameter)


def _biases(*linears: nn.Linear) -> list[Tensor] | None:
    return None if linears[0].bias is None else [_local(linear, "bias") for linear in linears]


def _block_of(layer: Any, config: Any) -> _Block:
    try:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        gated = (mlp.gate_proj, mlp.up_proj)
        norms = (
            layer.input_norm if hasattr(layer, "input_norm") else layer.input_layernorm,
            layer.post_attention_norm if hasattr(layer, "post_attention_norm") else layer.post_attention_layernorm,
        )
        head_dim = int(attention.head_dim)
        linears = (*projections, attention.o_proj, *gated, mlp.down_proj)
    except AttributeError as error:
        raise ValueError(f"a part of its blocks has no {error.name}") from error
    activation = _activation(mlp, config)
    if (reason := _other_parts(attention, linears, norms, activation)) is not None:
        raise ValueError(reason)
    scale = float(getattr(layer, "residual_multiplier", None) or 1.0)
    return _Block(attention, projections, attention.o_proj, gated, mlp.down_proj, norms, activation, head_dim, scale)


def _other_parts(attention: Any, linears: Sequence[Any], norms: Sequence[Any], activation: str) -> str | None:
    """Returns the name of the first submodule that the kernels cannot compute, None if they can compute all."""
    if activation not in _ACTIVATIONS:
        return f"its activation is {activation}"
    if any(type(part) not in (nn.Linear, AlignedLinear) for part in linears):
        return "its linear layers are of another class"
    if any(hasattr(linear.weight, "to_local") for linear in linears):
        query, _, _, output, gate, _, down = linears
        row_parallel = [
            linear for linear in linears if isinstance(linear.forward, RowParallelForward) and linear.bias is None
        ]
        widths_agree = len(_local(query)) == _local(output).shape[1] and len(_local(gate)) == _local(down).shape[1]
        if row_parallel != [output, down] or not widths_agree:
            return "ranks shard its linear layers in another way"
    if other := [type(norm).__name__ for norm in norms if _eps(norm) is None]:
        return f"its norms are {', '.join(other)}"
    named = ("q_norm", "k_norm", "head_gate", "exclusive", "query_scale")
    if more := [name for name in named if getattr(attention, name, None) not in (None, False)]:
        return f"its attention has {', '.join(more)}"
    if getattr(getattr(attention, "mixer", None), "needs_key_positions", False):
        return "its attention has a bias that needs the positions of keys"
    projections, gated = linears[:3], linears[4:6]
    if any(len({linear.bias is None for linear in group}) > 1 for group in (projections, gated)):
        return "some of its linear layers have a bias and others have none"
    if attention.head_dim % 2 or any(len(_local(linear)) % _WIDTH_MULTIPLE for linear in projections):
        return f"its head_dim is odd, or all heads together are no multiple of {_WIDTH_MULTIPLE} wide"
    return None


def _activation(mlp: Any, config: Any) -> str:
    name = mlp.activation if isinstance(mlp, FusedGatedMLP) else getattr(mlp, "activation", None)
    name = getattr(config, "hidden_act", "") if name is None else name
    return str(UNGATED.get(name, name))


def _eps(norm: Any) -> Any:
    """Returns the epsilon of an RMSNorm, None for other norms."""
    if not type(norm).__name__.endswith("RMSNorm") or getattr(norm, "weight", None) is None:
        return None
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)


def _readable(linear_layer: nn.Linear) -> int:
    """Returns the width of the input rows that a linear layer reads, padding included."""
    return linear_layer.padded_in_features if isinstance(linear_layer, AlignedLinear) else _local(linear_layer).shape[1]
