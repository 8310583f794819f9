"""Reads results files field by field: one of another kind than expected counts as missing, the rest stays.

Numbers must be such that one can count with them, metric keys name a context length, and text is made safe to show: no
control characters, no marks that turn the writing direction.
"""

import dataclasses
import itertools
import math
import re
import typing
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sbeval.errors import unseen
from sbeval.foreign_files import fits, usable_number
from sbeval.results.records import ModelRecord, TaskRecord, parse_metric_key

K = TypeVar("K")
V = TypeVar("V")
RecordT = TypeVar("RecordT", ModelRecord, TaskRecord)
_POSITIVE = (
    "training_length_tokens",
    "declared_length_tokens",
    "sliding_window",
    "parameters",
    "max_length",
    "peak_memory_bytes",
    "tokens_per_second",
    "targets_per_window",
)


def read_record(kind: type[RecordT], written: Mapping[str, Any]) -> tuple[RecordT | None, list[str]]:
    """Builds a record from the fields that have the right types.

    Returns:
        The record, None where a field that it cannot do without is missing or has another type; and the names of the
        fields left out.
    """
    hints = typing.get_type_hints(kind)
    kept = {}
    left_out = []
    for field in dataclasses.fields(kind):
        if field.name not in written:
            continue
        value = written[field.name]
        number = usable_number(value)
        positive = field.name not in _POSITIVE or value is None or (number is not None and number > 0)
        if fits(value, hints[field.name]) and positive:
            kept[field.name] = value
        else:
            left_out.append(field.name)
    unset = dataclasses.MISSING
    needed = [field.name for field in dataclasses.fields(kind) if field.default is field.default_factory is unset]
    if lacking := [name for name in needed if name not in kept]:
        return None, lacking
    return kind.from_json(kept), left_out


def agrees(recorded: object, computed: float) -> bool:
    """Whether samples give the number of a results file, or one of the two is none; some tasks add up in fp32."""
    number = usable_number(recorded)
    return number is None or math.isnan(computed) or math.isclose(number, computed, rel_tol=1e-6, abs_tol=1e-12)


LARGEST_NATS = 700.0
"""NLL beyond which a perplexity is no number a computer holds."""
_LONGEST_TOKENS = 1 << 40


def context_metric(key: str) -> tuple[str, int] | None:
    """Splits a metric key into metric and context length; None where it names no length of 1 token to 2^40."""
    parsed = parse_metric_key(key)
    return parsed if parsed is not None and is_length(parsed[1]) else None


def is_length(tokens: int) -> bool:
    """Whether a number can be a context length."""
    return 1 <= tokens <= _LONGEST_TOKENS


# folders that say what lies in them, not which model it is
_PLAIN_FOLDER = re.compile(r"(checkpoint|model|run|output|final|last|latest|best|hf)s?", re.IGNORECASE)
_NUMBERED_FOLDER = re.compile(r"(checkpoint|step|epoch)[-_]?\d+", re.IGNORECASE)


def telling_name(name: str, pretrained: str) -> str:
    """Returns a checkpoint's name; where that is `checkpoint` or the like, that of a folder above that says more."""
    parts = [part for part in pretrained.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    numbered = _NUMBERED_FOLDER.fullmatch(name) is not None
    if not parts or parts[-1] != name or not (numbered or _PLAIN_FOLDER.fullmatch(name)):
        return name
    above = next((part for part in reversed(parts[:-1]) if not _PLAIN_FOLDER.fullmatch(part)), None)
    if above is None:
        return name
    return f"{above}/{name}" if numbered else above


def shown_name(value: str) -> str:
    """Returns a name on one line without control characters and direction marks; letters of every script stay."""
    return "".join(letter for letter in " ".join(value.split()) if not unseen(letter)).strip() or "unnamed"


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Returns each first member with the second members that come with it, in their order."""
    groups: dict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return dict(groups)


def ranked(name: str, order: Sequence[str]) -> tuple[int, str]:
    """Returns what sorts names by an order, those that are not in it behind the others and by themselves."""
    return (order.index(name) if name in order else len(order), name)


def unique_name(name: str, taken: Collection[str], numbered: str) -> str:
    """Returns a name, or where it is taken the first that is not of those that `numbered` makes of it and 2, 3, 4."""
    names = itertools.chain([name], (numbered.format(name, number) for number in itertools.count(2)))
    return next(candidate for candidate in names if candidate not in taken)


def length_text(tokens: int) -> str:
    """Writes a context length as people say it: 512, 1K, 64K, 1M."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return f"{tokens:,}"


_UNCLEAR = re.compile(r"[,;]|: | and ")


def in_words(label: str) -> str:
    """Returns a name as it stands in a sentence: one with a comma in quotes, so that lists of names stay lists."""
    if not _UNCLEAR.search(label):
        return label
    return f"\N{LEFT DOUBLE QUOTATION MARK}{label}\N{RIGHT DOUBLE QUOTATION MARK}"


def name_list(labels: Iterable[str], *, at_most: int | None = None) -> str:
    """Joins names; of more than `at_most` the last are counted."""
    names = [in_words(label) for label in labels]
    if at_most is not None and len(names) > at_most:
        names = [*names[: at_most - 1], f"{len(names) - at_most + 1} others"]
    if len(names) > 1:
        return f"{', '.join(names[:-1])} and {names[-1]}"
    return names[0] if names else ""


def listed(sentences: Sequence[str]) -> str:
    """Joins what is said about each line to one sentence; of more than four lines the last are counted."""
    return "; ".join(sentences if len(sentences) <= 4 else [*sentences[:3], f"{len(sentences) - 3} more lines"]) + "."


def first_listed(sentences: Sequence[str]) -> str:
    """Joins the first four of what is said about each line; the others are counted behind them."""
    return "; ".join(sentences[:4]) + (f"; {len(sentences) - 4} more lines." if len(sentences) > 4 else ".")
