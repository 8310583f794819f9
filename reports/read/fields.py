"""Checks and formats single fields of results files.

A field of the wrong type counts as missing, and the other fields of the record are kept. Numbers must be finite. The
key of a metric may contain a context length. Control characters and Unicode direction marks are removed from text, so
that it is safe to show.
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
    """Builds a record from those fields of a JSON object that have the right types.

    Returns:
        The record, and the names of the fields that were left out. If a required field is missing or has the wrong
        type: None, and the names of these required fields.
    """
    hints = typing.get_type_hints(kind)
    usable = {}
    left_out = []
    for field in dataclasses.fields(kind):
        if field.name not in written:
            continue
        value = written[field.name]
        number = usable_number(value)
        positive = field.name not in _POSITIVE or value is None or (number is not None and number > 0)
        if fits(value, hints[field.name]) and positive:
            usable[field.name] = value
        else:
            left_out.append(field.name)
    unset = dataclasses.MISSING
    required = [field.name for field in dataclasses.fields(kind) if field.default is field.default_factory is unset]
    missing = [name for name in required if name not in usable]
    if missing:
        return None, missing
    return kind.from_json(usable), left_out


def agrees(recorded: object, computed: float) -> bool:
    """Whether a number computed from samples equals the number in the results file; True if one of them is missing.

    The relative tolerance is 1e-6, since some tasks add up numbers in fp32.
    """
    number = usable_number(recorded)
    return number is None or math.isnan(computed) or math.isclose(number, computed, rel_tol=1e-6, abs_tol=1e-12)


LARGEST_NATS = 700.0
"""Largest NLL in nats whose perplexity, exp(NLL), fits a float64."""
_LONGEST_TOKENS = 1 << 40


def context_metric(key: str) -> tuple[str, int] | None:
    """Splits a metric key into (metric, context length in tokens); None if the key has no valid context length."""
    parsed = parse_metric_key(key)
    return parsed if parsed is not None and is_length(parsed[1]) else None


def is_length(tokens: int) -> bool:
    """Whether a number can be a context length: from 1 to 2^40 tokens."""
    return 1 <= tokens <= _LONGEST_TOKENS


# folder names that do not tell which model is in the folder
_PLAIN_FOLDER = re.compile(r"(checkpoint|model|run|output|final|last|latest|best|hf)s?", re.IGNORECASE)
_NUMBERED_FOLDER = re.compile(r"(checkpoint|step|epoch)[-_]?\d+", re.IGNORECASE)


def telling_name(name: str, pretrained: str) -> str:
    """Returns a name for a checkpoint: its recorded name, or that of a parent folder if its own is like `checkpoint`.

    A numbered name such as `step-1000` gets the name of the parent folder in front: `parent/step-1000`.

    Args:
        name: the checkpoint's recorded name.
        pretrained: the model argument `pretrained`, a path or a hub name.
    """
    parts = [part for part in pretrained.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    numbered = _NUMBERED_FOLDER.fullmatch(name) is not None
    if not parts or parts[-1] != name or not (numbered or _PLAIN_FOLDER.fullmatch(name)):
        return name
    above = next((part for part in reversed(parts[:-1]) if not _PLAIN_FOLDER.fullmatch(part)), None)
    if above is None:
        return name
    return f"{above}/{name}" if numbered else above


def display_name(value: str) -> str:
    """Returns a name on one line, without control characters and Unicode direction marks; "unnamed" if none is left."""
    return "".join(letter for letter in " ".join(value.split()) if not unseen(letter)).strip() or "unnamed"


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Groups (key, value) pairs: returns key to the list of its values; keys and values keep their order."""
    groups: dict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return dict(groups)


def ranked(name: str, order: Sequence[str]) -> tuple[int, str]:
    """Returns a sort key: names in `order` come first, in that order; all other names follow alphabetically."""
    return (order.index(name) if name in order else len(order), name)


def unique_name(name: str, taken: Collection[str], numbered: str) -> str:
    """Returns a name that is not in use: `name` itself, or `name` with the lowest free number from 2 on.

    Args:
        name: the wanted name.
        taken: names that are in use.
        numbered: format of a numbered name, such as "{} ({})".
    """
    names = itertools.chain([name], (numbered.format(name, number) for number in itertools.count(2)))
    return next(candidate for candidate in names if candidate not in taken)


def length_text(tokens: int) -> str:
    """Returns a context length in tokens as text, such as 512, 1K, 64K or 1M; 1K is 1,024."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return f"{tokens:,}"


_UNCLEAR = re.compile(r"[,;]|: | and ")


def quote_name(label: str) -> str:
    """Returns a name for use in a sentence: in quotes if it contains a comma or "and", so that lists stay readable."""
    if not _UNCLEAR.search(label):
        return label
    return f"\N{LEFT DOUBLE QUOTATION MARK}{label}\N{RIGHT DOUBLE QUOTATION MARK}"


def name_list(labels: Iterable[str], *, at_most: int | None = None) -> str:
    """Joins names to "a, b and c"; with more than `at_most` names the last ones become "N others"."""
    names = [quote_name(label) for label in labels]
    if at_most is not None and len(names) > at_most:
        names = [*names[: at_most - 1], f"{len(names) - at_most + 1} others"]
    if len(names) > 1:
        return f"{', '.join(names[:-1])} and {names[-1]}"
    return names[0] if names else ""


def listed(sentences: Sequence[str]) -> str:
    """Joins clauses, one for each line of a figure, to a sentence.

    With more than four clauses, it has the first three and the number of the others.
    """
    return "; ".join(sentences if len(sentences) <= 4 else [*sentences[:3], f"{len(sentences) - 3} more lines"]) + "."


def first_listed(sentences: Sequence[str]) -> str:
    """Joins clauses, one for each line of a figure, to a sentence: the first four, and the number of the others."""
    others = len(sentences) - 4
    return "; ".join([*sentences[:4], *([f"{others} more line{'s' * (others > 1)}"] if others > 0 else [])]) + "."
