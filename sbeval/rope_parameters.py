"""What a user or a configuration may write of RoPE, in transformers' form; read without torch."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from sbeval.errors import UserError, shown
from sbeval.foreign_files import fits, kind_text, parse_json

GLOBAL_LAYERS = "full_attention"
"""The type of layers that see the whole text, where RoPE's parameters are told apart by types of layers."""
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of scaling whose frequencies depend on the length of the input."""
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
"""What the kinds of scaling known here read; transformers may know others."""
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

    It is given as "linear:4", "dynamic:4" or "yarn:4", or in transformers' form itself, as a mapping or a JSON object.
    A factor of 1 is valid: "dynamic:1" still sets the base by the request's length.

    Raises:
        UserError: the kind is unknown or the factor is no number of at least 1.
    """
    if isinstance(spec, str) and not spec.lstrip().startswith("{"):
        rope_type, _, factor = spec.partition(":")
        try:
            scaling: dict[str, Any] = {"rope_type": rope_type, "factor": float(factor)}
        except ValueError:
            scaling = {"rope_type": None}
        if scaling["rope_type"] not in _BY_FACTOR:
            raise UserError(
                f"rope_scaling must be linear:FACTOR, dynamic:FACTOR, yarn:FACTOR or a JSON object, got {shown(spec)}"
            )
    else:
        try:
            scaling = dict(parse_json(spec) if isinstance(spec, str) else spec)
        except (TypeError, ValueError) as error:
            raise UserError(f"rope_scaling is no JSON object ({error}): {shown(spec)}") from error
        if "type" in scaling:
            scaling.setdefault("rope_type", scaling.pop("type"))
        scaling.setdefault("rope_type", "default")
    if scaling["rope_type"] not in tuple(_OF_KIND):
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # takes torch along, for a kind unknown here

        known = ("default", *ROPE_INIT_FUNCTIONS)
        if scaling["rope_type"] not in known:
            raise UserError(
                f"rope_scaling's rope_type must be one of {', '.join(known)}, got {shown(scaling['rope_type'])}"
            )
    known = (*_OF_ALL, *_OF_KIND.get(scaling["rope_type"], tuple(scaling)))
    if unknown := sorted(set(scaling) - set(known)):
        raise UserError(
            f"rope_scaling of type {scaling['rope_type']!r} takes {', '.join(known)}, got {shown(', '.join(unknown))}"
        )
    check_rope_values(scaling, "rope_scaling")
    given = scaling.get("factor")
    if scaling["rope_type"] in (*_BY_FACTOR, "llama3") or given is not None:
        number = isinstance(given, int | float) and not isinstance(given, bool)
        if not number or not 1 <= float(given or 0) < float("inf"):
            raise UserError(f"rope_scaling's factor must be a number of at least 1, got {shown(given)}")
    return scaling


def check_rope_values(parameters: Mapping[str, Any], place: str = "the RoPE parameters") -> None:
    """Checks that every value known here is of its kind, and that the base and the share rotated can be.

    Beside one set of parameters for each kind of layer, transformers 5.16 saves keys without a value.

    Raises:
        UserError: naming the key.
    """
    if any(isinstance(value, Mapping) for value in parameters.values()):
        parameters = {name: value for name, value in parameters.items() if value is not None}
    for name, kind in _KIND_OF_VALUE.items():
        if name in parameters and not fits(value := parameters[name], kind):
            raise UserError(f"{name} of {place} must be of type {kind_text(kind)}, got {shown(value)}")
    if not parameters.get("rope_theta", 1) > 0:
        raise UserError(f"rope_theta must be above 0, got {parameters['rope_theta']}")
    if not 0 < parameters.get("partial_rotary_factor", 1) <= 1:
        raise UserError(f"partial_rotary_factor must lie within 0 and 1, got {parameters['partial_rotary_factor']}")


def rope_entries(parameters: object) -> dict[str, Mapping[str, Any]]:
    """Returns RoPE parameters by type of layer, under "" where all layers share them.

    Families whose layers differ, such as Gemma 3, keep one entry for each type:
    `{"full_attention": {"rope_type": ...}, "sliding_attention": {...}}`. That of layers that see the whole text is the
    first.
    """
    if not isinstance(parameters, Mapping) or not parameters:
        return {}
    nested = {str(name): entry for name, entry in parameters.items() if isinstance(entry, Mapping)}
    return dict(sorted(nested.items(), key=lambda entry: entry[0] != GLOBAL_LAYERS)) or {"": parameters}


def kind_of(entry: Mapping[str, Any]) -> str:
    """Returns the kind of an entry of RoPE parameters, such as "default" or "yarn"."""
    return str(entry.get("rope_type") or entry.get("type") or "default")


@contextlib.contextmanager
def any_factor_of_yarn() -> Iterator[None]:
    """Within it transformers does not warn of a factor of YaRN that is no ratio of two lengths: a user chose it."""

    def is_about_something_else(record: logging.LogRecord) -> bool:
        return "explicitly set RoPE scaling factor" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_rope_utils")
    logger.addFilter(is_about_something_else)
    try:
        yield
    finally:
        logger.removeFilter(is_about_something_else)
