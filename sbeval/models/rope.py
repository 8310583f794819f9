"""Rotary position embeddings: frequencies for one request, and a context manager that sets them in a model.

transformers keeps scaled frequencies as state of its modules; this state depends on earlier forward passes and on
`max_position_embeddings`. Here they are computed from the original training length and the length of the request, set
for the duration of a `with` block, and restored afterwards, in sbeval models and in models of transformers alike.

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
    """RoPE frequencies for one request.

    Attributes:
        inv_freq: [F] fp32, radians per position.
        attention_factor: factor of the cosine and sine tables.
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
    """Computes the frequencies for one request, which depend on nothing but the arguments.

    Args:
        rope_parameters: base and scaling in transformers' form, such as
            `{"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0}`.
        head_dim: size of a head.
        original_length_tokens: training length before any scaling; `original_max_position_embeddings` in
            `rope_parameters` takes precedence.
        length_tokens: length of the request with all tokens it may generate; the dynamic types depend on it.
        max_position_embeddings: some types allow `factor` to be missing; the factor is then this number divided by the
            original length.

    Raises:
        UserError: the scaling lacks a key that its type needs, or does not fit the model.
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
        if name in parameters and len(parameters[name]) != pairs:  # a list of one number would be broadcast
            raise UserError(f"{name} of the RoPE scaling must have {pairs} numbers, got {len(parameters[name])}")
    longest = original if rope_type == "dynamic" else max_position_embeddings or original
    config: Any = SimpleNamespace(  # the attributes of a configuration that transformers' functions read
        rope_parameters=parameters,
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=longest,
        standardize_rope_params=lambda: None,
    )
    try:
        inv_freq_F, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=length_tokens)
    except KeyError as error:
        raise UserError(f"RoPE scaling of type {rope_type!r} needs the key {error.args[0]!r}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"RoPE scaling of type {rope_type!r} does not fit the model: {reason}") from error
    return RopeFrequencies(inv_freq_F, float(factor))


def cos_sin(frequencies: RopeFrequencies, position_ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cosine and sine tables, [B, 1, L, F] each in fp32, for integer positions [B, L]."""
    inv_freq_F = frequencies.inv_freq.to(position_ids_BL.device, torch.float32)
    angle_B1LF = (position_ids_BL.float()[..., None] * inv_freq_F).unsqueeze(1)
    return angle_B1LF.cos() * frequencies.attention_factor, angle_B1LF.sin() * frequencies.attention_factor


def rotate(x_BHLD: Tensor, cos_B1LF: Tensor, sin_B1LF: Tensor) -> Tensor:
    """Rotates the pairs (x_f, x_{f + F}) of the first 2F dimensions by their angles in fp32; returns x's dtype."""
    if x_BHLD.is_cuda and x_BHLD.dtype != torch.float64 and not torch.compiler.is_compiling():
        # imports triton, which not every machine has
        from sbeval.models.kernels.rotary import rotate_in_one_pass

        return rotate_in_one_pass(x_BHLD, cos_B1LF[:, 0], sin_B1LF[:, 0])
    pairs, dtype = cos_B1LF.shape[-1], x_BHLD.dtype
    # bf16 times fp32 is computed in fp32, so x needs no copy in fp32
    first_BHLF, second_BHLF, rest = x_BHLD[..., :pairs], x_BHLD[..., pairs : 2 * pairs], x_BHLD[..., 2 * pairs :]
    turned_BHLF = (first_BHLF * cos_B1LF - second_BHLF * sin_B1LF).to(dtype)
    return torch.cat([turned_BHLF, (second_BHLF * cos_B1LF + first_BHLF * sin_B1LF).to(dtype), rest], dim=-1)


def scaled_parameters(checkpoint_rope: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Completes a scaling that lacks `rope_theta` or `partial_rotary_factor` with those of the checkpoint.

    Without a scaling, returns the checkpoint's RoPE parameters.
    """
    if scaling is None:
        return checkpoint_rope
    inherited = {key: checkpoint_rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in checkpoint_rope}
    return inherited | dict(scaling)


@contextmanager
def setting_rope_frequencies(
    model: nn.Module,
    length_tokens: int,
    scaling: Mapping[str, Any] | None = None,
    *,
    original_length_tokens: int | None = None,
) -> Iterator[list[RopeFrequencies]]:
    """Sets the RoPE frequencies of one request in `model` until the `with` block ends.

    In models whose layer types have different RoPE parameters (Gemma 3), `scaling` applies only to the layers with full
    attention. A scaling in the checkpoint that depends on the length is set in layers of every type.

    Args:
        model: an sbeval model or a model of transformers.
        length_tokens: context length of the request with all tokens it may generate, without padding.
        scaling: from `parse_rope_scaling`; `rope_theta` and a partial rotation default to the checkpoint's. None keeps
            the checkpoint's scaling, computed for this length.
        original_length_tokens: training length before any scaling; None means the checkpoint's.

    Yields:
        The frequencies: one for each rotary module, or for each layer type of a module that distinguishes them.

    Raises:
        UserError: a scaling is given and the model has no RoPE, or its frequencies are computed in an unknown way.
    """
    frequencies: list[RopeFrequencies] = []
    module: Any
    with ExitStack() as restored_at_exit:
        for module in model.modules():
            if hasattr(module, "setting_rope_frequencies") and module.config.rope_parameters is not None:
                original = {"original_length_tokens": original_length_tokens}
                scaled = module.rope_frequencies_for(length_tokens, scaling, **original)
                module_frequencies, new_attributes = [scaled], {"setting_rope_frequencies": scaled}
            elif hasattr(module, "rope_type") and hasattr(module, "config"):
                module_frequencies, new_attributes = _scaled_module(
                    module, length_tokens, scaling, original_length_tokens
                )
            else:
                continue
            restored_at_exit.enter_context(_attributes(module, new_attributes))
            frequencies += module_frequencies
        if scaling is not None and not frequencies:
            raise UserError(
                f"rope_scaling needs a model with rotary embeddings; {type(model).__name__} has none: remove the option"
            )
        yield frequencies


def _scaled_module(
    module: Any, length_tokens: int, scaling: Mapping[str, Any] | None, original_length_tokens: int | None
) -> tuple[list[RopeFrequencies], dict[str, Any]]:
    """Returns a request's frequencies for a rotary module of transformers, and the attributes that set them there.

    There is one set of frequencies for each layer type that the module distinguishes. `scaling` applies to layers with
    full attention; other types keep their scaling, computed for the length of the request if it depends on it.
    """
    if not isinstance(module.rope_type, dict):
        frequencies, new_attributes = _scaled_layers(module, None, length_tokens, scaling, original_length_tokens)
        return [frequencies], new_attributes
    if scaling is not None and GLOBAL_LAYERS not in module.rope_type:
        raise _unknown_rope(module, scaling)
    all_frequencies = []
    rope_types = dict(module.rope_type)
    attributes: dict[str, Any] = {}
    for layer_type in module.rope_type:
        type_scaling = scaling if layer_type == GLOBAL_LAYERS else None
        frequencies, new_attributes = _scaled_layers(
            module, layer_type, length_tokens, type_scaling, original_length_tokens
        )
        rope_types[layer_type] = new_attributes.pop("rope_type", rope_types[layer_type])
        attributes |= new_attributes
        all_frequencies.append(frequencies)
    return all_frequencies, attributes | {"rope_type": rope_types}


def _scaled_layers(
    module: Any,
    layer_type: str | None,
    length_tokens: int,
    scaling: Mapping[str, Any] | None,
    original_length_tokens: int | None,
) -> tuple[RopeFrequencies, dict[str, Any]]:
    """Returns frequencies and attributes as `_scaled_module` does, but for one layer type.

    `layer_type` is None if the module has one set of frequencies for all layers. The attributes are empty if the module
    already has the right frequencies.
    """
    prefix = "" if layer_type is None else f"{layer_type}_"
    inv_freq: Tensor = getattr(module, f"{prefix}inv_freq")
    rope_type = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if scaling is None and rope_type not in LENGTH_DEPENDENT:
        return RopeFrequencies(inv_freq, float(getattr(module, f"{prefix}attention_scaling"))), {}
    checkpoint_rope = module.config.rope_parameters
    if layer_type is not None:
        checkpoint_rope = checkpoint_rope.get(layer_type)
    initial_inv_freq = getattr(module, f"{prefix}original_inv_freq", None)
    config = _of_layers(module.config, layer_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    longest = int(config.max_position_embeddings)
    original = original_length_tokens or (checkpoint_rope or {}).get("original_max_position_embeddings") or longest
    frequencies = partial(rope_frequencies, head_dim=head_dim, max_position_embeddings=longest)
    # scaling is recomputed here only for modules whose frequencies `rope_frequencies` reproduces from rope_parameters
    is_reproduced = False
    if checkpoint_rope is not None and initial_inv_freq is not None:
        expected = frequencies(checkpoint_rope, original_length_tokens=longest, length_tokens=1).inv_freq
        if initial_inv_freq.shape == expected.shape:
            tolerance = 1e-5 if initial_inv_freq.dtype == torch.float32 else 1e-2
            is_reproduced = torch.allclose(initial_inv_freq.float().cpu(), expected, rtol=tolerance)
    if is_reproduced:
        parameters = scaled_parameters(checkpoint_rope, scaling)
        scaled = frequencies(parameters, original_length_tokens=original, length_tokens=length_tokens)
    elif scaling is None and original_length_tokens is None and rope_type in ROPE_INIT_FUNCTIONS:
        arguments = {} if layer_type is None else {"layer_type": layer_type}
        inv_freq_F, factor = ROPE_INIT_FUNCTIONS[rope_type](
            module.config, torch.device("cpu"), seq_len=length_tokens, **arguments
        )
        scaled = RopeFrequencies(inv_freq_F, float(factor))
    else:
        raise _unknown_rope(module, scaling)
    return scaled, {
        f"{prefix}inv_freq": scaled.inv_freq.to(inv_freq.device),
        f"{prefix}attention_scaling": scaled.attention_factor,
        "rope_type": "default",  # transformers does not recompute frequencies of this type in forward
    }


def _of_layers(config: Any, layer_type: str | None) -> Any:
    """Returns the configuration of one layer type, or `config` if layer types have no separate configurations."""
    try:
        return config if layer_type is None else config.per_layer_config[layer_type]
    except (AttributeError, KeyError, TypeError, ValueError):
        return config


def _unknown_rope(module: Any, scaling: Mapping[str, Any] | None) -> UserError:
    option = "training_length" if scaling is None else "rope_scaling"
    return UserError(
        f"the RoPE scaling of {type(module).__name__} cannot be changed, since its frequencies do not follow from its "
        f"rope_parameters; remove {option}"
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
