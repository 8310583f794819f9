"""Reads records from results files field by field: one of another kind than expected is missing, the rest counts."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from sbeval.records import ModelRecord, TaskRecord
from sbeval.reports.usable import usable_number

RecordT = TypeVar("RecordT", ModelRecord, TaskRecord)
_POSITIVE = (
    "training_length_tokens",
    "sliding_window",
    "parameters",
    "max_length",
    "peak_memory_bytes",
    "tokens_per_second",
    "targets_per_window",
)


def read_record(kind: type[RecordT], written: Mapping[str, Any]) -> tuple[RecordT | None, list[str]]:
    """Builds a record of the fields that have their types.

    Args:
        kind: the record's class.
        written: what the results file holds.

    Returns:
        The record, None where a field that it cannot do without is missing or has another type; and the names of the
        fields left out.
    """
    hints = typing.get_type_hints(kind)
    kept, left_out = {}, []
    for field in dataclasses.fields(kind):
        if field.name not in written:
            continue
        value = written[field.name]
        positive = (
            field.name not in _POSITIVE
            or value is None
            or ((number := usable_number(value)) is not None and number > 0)
        )
        if _fits(value, hints[field.name]) and positive:
            kept[field.name] = value
        else:
            left_out.append(field.name)
    needed = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if lacking := [name for name in needed if name not in kept]:
        return None, lacking
    return kind.from_json(kept), left_out


def _fits(value: object, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, arguments[1]) for item in value.values())
    if hint is float:
        return usable_number(value) is not None
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
