"""Rotary position embeddings whose frequencies are values passed along, never state of a module.

transformers keeps scaled frequencies in its modules, where they depend on whatever ran before and on
`max_position_embeddings`. Here they are computed from the original training length and the request's length, put in
place for the length of a `with` block, and taken out again: for this family and for Hugging Face models alike.

Shape suffixes: B batch, H heads, L positions, D head_dim, F rotated pairs.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sbeval.errors import UserError
from sbeval.rope_parameters import GLOBAL_LAYERS, LENGTH_DEPENDENT


class RopeFrequencies(NamedTuple):
    """What a request rotates its queries and keys with.

    Attributes:
        inv_freq: [F] fp32, radians a position.
        attention_factor: factor of cosine and sine.
    """

    inv_freq: Tensor
    attention_factor: float


def rope_frequencies(
    rope_parameters: Mapping[str, Any],
    *,
    head_dim: int,
    original_length_tokens: int,
    length_tokens: int,
    max_position_embeddings: int | None = None,
) -> RopeFrequencies:
    """Returns the frequencies for one request: a function of its arguments alone.

    `rope_parameters` are base and scaling in transformers' form, such as
    `{"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0}`. The original length is that of training before any
    scaling, unless they name their own `original_max_position_embeddings`; that of the request, on which the dynamic
    kinds depend, counts all tokens it may still generate. Kinds that allow a missing factor divide
    `max_position_embeddings` by the original length.

    Raises:
        UserError: the scaling lacks a key its kind needs.
    """
    original = int(rope_parameters.get("original_max_position_embeddings") or original_length_tokens)
    parameters = {**rope_parameters, "original_max_position_embeddings": original}
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "default":
        rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponent_F = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        return RopeFrequencies(1.0 / parameters["rope_theta"] ** exponent_F, 1.0)
    pairs = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if name in parameters and len(parameters[name]) != pairs:  # a single one would count for all
            raise UserError(f"{name} of the RoPE scaling must have {pairs} numbers, got {len(parameters[name])}")
    longest = original if rope_type == "dynamic" else max_position_embeddings or original
    settings: Any = SimpleNamespace(  # what transformers' functions read from a configuration
        rope_parameters=parameters,
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=longest,
        standardize_rope_params=lambda: None,
    )
    try:
        inv_freq_F, factor = ROPE_INIT_FUNCTIONS[rope_type](settings, torch.device("cpu"), seq_len=length_tokens)
    except KeyError as error:
        raise UserError(f"RoPE scaling of type {rope_type!r} needs the key {error.args[0]!r}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"RoPE scaling of type {rope_type!r} does not fit the model: {reason}") from error
    return RopeFrequencies(inv_freq_F, float(factor))


def cos_sin(frequencies: RopeFrequencies, position_ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine [B, 1, L, F] in fp32 for integer positions [B, L]."""
    inv_freq_F = frequencies.inv_freq.to(position_ids_BL.device, torch.float32)
    angle_B1LF = (position_ids_BL.float()[..., None] * inv_freq_F).unsqueeze(1)
    return angle_B1LF.cos() * frequencies.attention_factor, angle_B1LF.sin() * frequencies.attention_factor


def rotate(x_BHLD: Tensor, cos_B1LF: Tensor, sin_B1LF: Tensor) -> Tensor:
    """Rotates the pairs (x_f, x_{f + F}) of the first 2F dimensions by their angles in fp32; returns x's dtype."""
    if x_BHLD.is_cuda and x_BHLD.dtype != torch.float64 and not torch.compiler.is_compiling():
        # triton, which runs on a GPU and is not on every machine
        from sbeval.models.kernels.rotary import rotate_in_one_pass

        return rotate_in_one_pass(x_BHLD, cos_B1LF[:, 0], sin_B1LF[:, 0])
    pairs = cos_B1LF.shape[-1]
    dtype = x_BHLD.dtype
    # bf16 times fp32 is computed in fp32: the inputs need no copy in that type
    first_BHLF = x_BHLD[..., :pairs]
    second_BHLF = x_BHLD[..., pairs : 2 * pairs]
    rest = x_BHLD[..., 2 * pairs :]
    turned_BHLF = (first_BHLF * cos_B1LF - second_BHLF * sin_B1LF).to(dtype)
    return torch.cat([turned_BHLF, (second_BHLF * cos_B1LF + first_BHLF * sin_B1LF).to(dtype), rest], dim=-1)


def scaled_parameters(own: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns a scaling with the model's own base and partial rotation unless it names them; without one, `own`."""
    if scaling is None:
        return own
    return {key: own[key] for key in ("rope_theta", "partial_rotary_factor") if key in own} | dict(scaling)


@contextmanager
def held_rope_frequencies(
    model: nn.Module,
    length_tokens: int,
    scaling: Mapping[str, Any] | None = None,
    *,
    original_length_tokens: int | None = None,
) -> Iterator[list[RopeFrequencies]]:
    """Holds a request's RoPE frequencies in `model` until the block ends: scoring, prefill and decoding alike.

    Models that rotate some layers differently (Gemma 3's windowed layers) are scaled in the others alone; a scaling of
    the checkpoint's own that depends on the length is held in layers of every type.

    `length_tokens` is the request's context length with all tokens it may generate, without padding. `scaling` is from
    `parse_rope_scaling`; None holds the checkpoint's own, which matters where that depends on the length. `rope_theta`
    and a partial rotation stay the checkpoint's unless the scaling names them. `original_length_tokens` is the training
    length before any scaling; None takes the checkpoint's.

    Yields:
        The frequencies, one for each module that has its own, and in it for each type of layer.

    Raises:
        UserError: there is a scaling but no rotary embedding, or one that is computed in a way not known here.
    """
    frequencies: list[RopeFrequencies] = []
    module: Any
    with ExitStack() as held:
        for module in model.modules():
            if hasattr(module, "held_rope_frequencies") and module.config.rope_parameters is not None:
                original = {"original_length_tokens": original_length_tokens}
                scaled = module.rope_frequencies_for(length_tokens, scaling, **original)
                of_module = [scaled]
                changed = {"held_rope_frequencies": scaled}
            elif hasattr(module, "rope_type") and hasattr(module, "config"):
                of_module, changed = _scaled_module(module, length_tokens, scaling, original_length_tokens)
            else:
                continue
            held.enter_context(_attributes(module, changed))
            frequencies += of_module
        if scaling is not None and not frequencies:
            raise UserError(f"rope_scaling needs a model with rotary embeddings; {type(model).__name__} has none")
        yield frequencies


def _scaled_module(
    module: Any, length_tokens: int, scaling: Mapping[str, Any] | None, original_length_tokens: int | None
) -> tuple[list[RopeFrequencies], dict[str, Any]]:
    """Returns a request's frequencies, and the attributes with which a rotary module of transformers gives them.

    There is one set of frequencies for every type of layer that the module tells apart. `scaling` is for layers that
    see the whole text; the other types follow the request's length where their own scaling does.
    """
    if not isinstance(module.rope_type, dict):
        frequencies, changed = _scaled_layers(module, None, length_tokens, scaling, original_length_tokens)
        return [frequencies], changed
    if scaling is not None and GLOBAL_LAYERS not in module.rope_type:
        raise _not_known(module, scaling)
    found = []
    kinds = dict(module.rope_type)
    attributes: dict[str, Any] = {}
    for layer_type in module.rope_type:
        of_type = scaling if layer_type == GLOBAL_LAYERS else None
        frequencies, changed = _scaled_layers(module, layer_type, length_tokens, of_type, original_length_tokens)
        kinds[layer_type] = changed.pop("rope_type", kinds[layer_type])
        attributes |= changed
        found.append(frequencies)
    return found, attributes | {"rope_type": kinds}


def _scaled_layers(
    module: Any,
    layer_type: str | None,
    length_tokens: int,
    scaling: Mapping[str, Any] | None,
    original_length_tokens: int | None,
) -> tuple[RopeFrequencies, dict[str, Any]]:
    """Returns the same for the layers of one type, None where a module has one for all; nothing to change for some."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    inv_freq: Tensor = getattr(module, f"{prefix}inv_freq")
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if scaling is None and kind not in LENGTH_DEPENDENT:
        return RopeFrequencies(inv_freq, float(getattr(module, f"{prefix}attention_scaling"))), {}
    own = module.config.rope_parameters
    own = own if layer_type is None else own.get(layer_type)
    before = getattr(module, f"{prefix}original_inv_freq", None)
    config = _of_layers(module.config, layer_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    longest = int(config.max_position_embeddings)
    original = original_length_tokens or (own or {}).get("original_max_position_embeddings") or longest
    frequencies = partial(rope_frequencies, head_dim=head_dim, max_position_embeddings=longest)
    known = False
    if own is not None and before is not None:
        expected = frequencies(own, original_length_tokens=longest, length_tokens=1).inv_freq
        tolerance = 1e-5 if before.dtype == torch.float32 else 1e-2
        known = before.shape == expected.shape and torch.allclose(before.float().cpu(), expected, rtol=tolerance)
    if known:
        parameters = scaled_parameters(own, scaling)
        scaled = frequencies(parameters, original_length_tokens=original, length_tokens=length_tokens)
    elif scaling is None and original_length_tokens is None and kind in ROPE_INIT_FUNCTIONS:
        named = {} if layer_type is None else {"layer_type": layer_type}
        computed = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=length_tokens, **named)
        scaled = RopeFrequencies(computed[0], float(computed[1]))
    else:
        raise _not_known(module, scaling)
    return scaled, {
        f"{prefix}inv_freq": scaled.inv_freq.to(inv_freq.device),
        f"{prefix}attention_scaling": scaled.attention_factor,
        "rope_type": "default",  # what transformers updates by itself it leaves alone under this name
    }


def _of_layers(config: Any, layer_type: str | None) -> Any:
    """Returns the configuration of one type of layers, where types differ in more than their rotation."""
    try:
        return config if layer_type is None else config.per_layer_config[layer_type]
    except (AttributeError, KeyError, TypeError, ValueError):
        return config


def _not_known(module: Any, scaling: Mapping[str, Any] | None) -> UserError:
    given = "training_length" if scaling is None else "rope_scaling"
    return UserError(
        f"RoPE scaling at evaluation time is not known for {type(module).__name__}, whose frequencies do not "
        f"follow its rope_parameters; leave {given} out"
    )


@contextmanager
def _attributes(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
