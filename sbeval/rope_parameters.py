"""Reads and checks RoPE parameters and RoPE scaling, in transformers' form, without torch."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from sbeval.errors import UserError, brief
from sbeval.foreign_files import fits, kind_text, parse_json

GLOBAL_LAYERS = "full_attention"
"""Type of the layers with full attention, if RoPE parameters differ between types of layers."""
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types of RoPE scaling whose frequencies depend on the length of the input."""
_BY_FACTOR = ("linear", "dynamic", "yarn")
_OF_ALL = ("rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_OF_KIND: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Parameters of each type of scaling that is known here; transformers may know more types."""
_KIND_OF_VALUE: dict[str, Any] = {
    **dict.fromkeys(("rope_type", "type"), str),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor"), float),
    "original_max_position_embeddings": int | None,
    **dict.fromkeys(("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"), float | None),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), float),
    **dict.fromkeys(("short_factor", "long_factor"), list[float]),
    **dict.fromkeys(("truncate",), bool),
}


def parse_rope_scaling(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """Returns a RoPE scaling in transformers' form.

    `spec` is "linear:4", "dynamic:4" or "yarn:4", or transformers' form as a mapping or a JSON object. A factor of 1 is
    valid: "dynamic:1" still computes the base from the request's length.

    Raises:
        UserError: the type or a parameter is unknown, or the factor is not a number of at least 1.
    """
    if isinstance(spec, str) and not spec.lstrip().startswith("{"):
        rope_type, _, factor = spec.partition(":")
        try:
            scaling: dict[str, Any] = {"rope_type": rope_type, "factor": float(factor)}
        except ValueError:
            scaling = {"rope_type": None}
        if scaling["rope_type"] not in _BY_FACTOR:
            raise UserError(
                f"rope_scaling must be linear:FACTOR, dynamic:FACTOR, yarn:FACTOR or a JSON object, got {brief(spec)}"
            )
    else:
        try:
            scaling = dict(parse_json(spec) if isinstance(spec, str) else spec)
        except (TypeError, ValueError) as error:
            raise UserError(f"rope_scaling is not a JSON object ({error}): {brief(spec)}") from error
        if "type" in scaling:
            scaling.setdefault("rope_type", scaling.pop("type"))
        scaling.setdefault("rope_type", "default")
    if scaling["rope_type"] not in tuple(_OF_KIND):
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # imports torch, only for unknown types

        known = ("default", *ROPE_INIT_FUNCTIONS)
        if scaling["rope_type"] not in known:
            raise UserError(
                f"rope_scaling's rope_type must be one of {', '.join(known)}, got {brief(scaling['rope_type'])}"
            )
    known = (*_OF_ALL, *_OF_KIND.get(scaling["rope_type"], tuple(scaling)))
    if unknown := sorted(set(scaling) - set(known)):
        raise UserError(
            f"rope_scaling of type {scaling['rope_type']!r} takes {', '.join(known)}, got {brief(', '.join(unknown))}"
        )
    check_rope_values(scaling, "rope_scaling")
    scaling_factor = scaling.get("factor")
    if scaling["rope_type"] in (*_BY_FACTOR, "llama3") or scaling_factor is not None:
        is_number = isinstance(scaling_factor, int | float) and not isinstance(scaling_factor, bool)
        if not is_number or not 1 <= float(scaling_factor or 0) < float("inf"):
            raise UserError(f"rope_scaling's factor must be a number of at least 1, got {brief(scaling_factor)}")
    return scaling


def check_rope_values(parameters: Mapping[str, Any], place: str = "the RoPE parameters") -> None:
    """Checks the types of all known RoPE parameters, and the ranges of `rope_theta` and `partial_rotary_factor`.

    Raises:
        UserError: a value has another type or is out of range. The message names the key.
    """
    # transformers 5.16 saves additional keys with null beside the parameters of each type of layer
    if any(isinstance(value, Mapping) for value in parameters.values()):
        parameters = {name: value for name, value in parameters.items() if value is not None}
    for name, kind in _KIND_OF_VALUE.items():
        if name in parameters and not fits(value := parameters[name], kind):
            raise UserError(f"{name} of {place} must be of type {kind_text(kind)}, got {brief(value)}")
    if not parameters.get("rope_theta", 1) > 0:
        raise UserError(f"rope_theta must be above 0, got {parameters['rope_theta']}")
    if not 0 < parameters.get("partial_rotary_factor", 1) <= 1:
        raise UserError(
            f"partial_rotary_factor must be above 0 and at most 1, got {parameters['partial_rotary_factor']}"
        )


def rope_entries(parameters: object) -> dict[str, Mapping[str, Any]]:
    """Returns RoPE parameters by type of layer; the key is "" if all layers share them.

    Model families whose layers have different RoPE, such as Gemma 3, have one entry for each type of layer:
    `{"full_attention": {"rope_type": ...}, "sliding_attention": {...}}`. The entry of layers with full attention comes
    first.
    """
    if not isinstance(parameters, Mapping) or not parameters:
        return {}
    nested = {str(name): entry for name, entry in parameters.items() if isinstance(entry, Mapping)}
    return dict(sorted(nested.items(), key=lambda entry: entry[0] != GLOBAL_LAYERS)) or {"": parameters}


def kind_of(entry: Mapping[str, Any]) -> str:
    """Returns the RoPE type of an entry of RoPE parameters, such as "default" or "yarn"."""
    return str(entry.get("rope_type") or entry.get("type") or "default")


@contextlib.contextmanager
def any_factor_of_yarn() -> Iterator[None]:
    """Inside this context, hides transformers' warning that a YaRN factor is not the ratio of two lengths."""

    def is_about_something_else(record: logging.LogRecord) -> bool:
        return "explicitly set RoPE scaling factor" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_rope_utils")
    logger.addFilter(is_about_something_else)
    try:
        yield
    finally:
        logger.removeFilter(is_about_something_else)
