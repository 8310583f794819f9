"""Reads settings of users into frozen pydantic models; an invalid value is an error of one sentence.

Settings come from `--metadata`, `--model_args`, sweep files, recipes and command lines. A class of settings derives
from `Settings`. The type annotation of a field checks its value and holds the text of the error message. A value means
the same everywhere: digits in quotes are a number, since command lines pass text, and `true` is not a number. Unknown
keys are errors, with one exception: lm-eval passes metadata and model arguments to all tasks in one mapping, so a task
ignores keys that are not similar to one of its own.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, PydanticUndefined, core_schema

from sbeval.errors import UserError, brief
from sbeval.hub_names import local_path

MOST_TOKENS = 2**27
"""Largest context length, more than any model supports."""
MOST_COUNTED = 2**20
"""Largest number of samples at one context length, and of parts of one sample."""
_LEAST_LIKENESS = 0.75
_LEAST_LETTERS = 3
# most file systems allow 255; endings such as .old-TIMESTAMP are added to names
_MOST_NAME_BYTES = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """The valid values of a field, as metadata that follows the Python type in `Annotated`.

    Attributes:
        text: describes the values; completes "Expected stride to be ...".
        read: converts and returns the value; raises ValueError or TypeError if it is invalid.
        hint: end of the error message, after "correct it".
    """

    text: str
    read: Callable[[Any], Any]
    hint: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._read)

    def _read(self, value: Any) -> Any:
        try:
            return self.read(value)
        except UserError:
            raise
        except (TypeError, ValueError, OverflowError):
            raise PydanticCustomError("expected", "{text}", {"text": self.text, "hint": self.hint}) from None


def whole(least: int, text: str | None = None, *, most: int | None = None, hint: str = "") -> Expected:
    """Returns the type of whole numbers from `least` to `most`; `text` and `hint` are those of `Expected`."""
    default_text = f"a whole number of at least {least}" + ("" if most is None else f" and at most {most}")
    return Expected(text or default_text, lambda value: as_whole(value, least, most), hint)


def number(text: str, accept: Callable[[float], bool]) -> Expected:
    """Returns the type of numbers that `accept` allows. They may be written as text, since YAML reads 3e-3 as text."""
    return Expected(text, lambda value: as_number(value, accept))


def as_patterns(value: Any) -> tuple[str, ...]:
    """Returns glob patterns of names from true (all names), false (none), "v_head.*:mtp.*" or a list of patterns.

    Raises:
        ValueError: the value is something else, or a pattern is empty.
    """
    if isinstance(value, bool) or str(value).lower() in ("true", "false"):
        return ("*",) if str(value).lower() == "true" else ()
    patterns = value.split(":") if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError
    return tuple(patterns)


def as_counts(value: Any) -> tuple[int, ...]:
    """Returns whole numbers from 1 to `MOST_TOKENS`, such as context lengths, sorted and without duplicates.

    `value` is a list, text with commas, or one number.

    Raises:
        ValueError: the value is something else, or empty.
    """
    listed: Sequence[Any] = [value]
    if isinstance(value, str):
        listed = value.split(",")
    elif isinstance(value, list | tuple):
        listed = value
    if not listed:
        raise ValueError
    return tuple(sorted({as_whole(item, 1, MOST_TOKENS) for item in listed}))


def as_whole(value: Any, least: int, most: int | None = None) -> int:
    """Returns the value as a whole number from `least` to `most`; digits in a text are allowed.

    Raises:
        ValueError: the value is something else.
    """
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= (most or value):
        raise ValueError
    return value


def as_number(value: Any, accept: Callable[[float], bool]) -> float:
    """Returns the value as a number for which `accept` is true.

    Raises:
        ValueError: the value is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    if not accept(read := float(value)):
        raise ValueError
    return read


def _limit(value: Any) -> float:
    # lm-eval treats a limit below 1 as a share of the documents, and silently rounds one above 1
    limit = as_number(value, lambda limit: 0 < limit < 1 or (limit.is_integer() and 1 <= limit < 2**63))
    return int(limit) if limit.is_integer() else limit


def _of(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError
        return value

    return read


def _mapping(value: Any) -> Any:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError
    return value


def _names(value: Any) -> tuple[str, ...]:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError
    return tuple(names)


def _name(value: Any) -> str:
    if not isinstance(value, str) or value.strip() in ("", ".", "..") or len(value.encode()) > _MOST_NAME_BYTES:
        raise ValueError
    if not value.isprintable() or "/" in value or "\\" in value:
        raise ValueError
    return value


WholeNumber = Annotated[int, whole(0)]
Count = Annotated[int, whole(1)]
Tokens = Annotated[int, whole(1, "a positive number of tokens")]
Counted = Annotated[int, whole(1, most=MOST_COUNTED)]
Counts = Annotated[tuple[int, ...], Expected(f"a list of whole numbers from 1 to {MOST_TOKENS}", as_counts)]
_SUCH_AS = f", for instance to [1024, 4096], none above {MOST_TOKENS}"
Lengths = Annotated[tuple[int, ...], Expected("a list of positive whole numbers of tokens", as_counts, _SUCH_AS)]
Number = Annotated[float, number("a number", math.isfinite)]
PositiveNumber = Annotated[float, number("a number above 0", lambda value: 0 < value < math.inf)]
Share = Annotated[float, number("a number from 0 to below 1", lambda value: 0 <= value < 1)]
Limit = Annotated[
    float,
    Expected(
        "a whole number of documents, or a share of them between 0 and 1",
        _limit,
        ", or leave it out for no limit",
    ),
]
Text = Annotated[str, Expected("text", _of(str), ", with quotes around text")]
Name = Annotated[str, Expected("a name that a folder can have, without slashes", _name)]
Flag = Annotated[bool, Expected("true or false", _of(bool))]
Patterns = Annotated[tuple[str, ...], Expected("true, or glob patterns of names with colons between them", as_patterns)]
Names = Annotated[tuple[str, ...], Expected("a list of names", _names)]
Options = Annotated[Mapping[str, Any], Expected("a mapping (`key: value` lines) whose keys are text", _mapping)]


def as_path(value: Any) -> Path:
    """Returns the value as a path. Empty text, such as an unset shell variable, would mean the current folder.

    Raises:
        ValueError: the text is empty.
    """
    if value == "":
        raise ValueError(value)
    return local_path(value)


PathText = Annotated[str, Expected("a path", lambda value: str(as_path(value)) and os.fspath(value))]
LocalPath = Annotated[Path, Expected("a path", as_path)]


class Settings(BaseModel):
    """Base class of settings: a frozen pydantic model in which an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError(_sentence(type(self), error, place="", source="")) from None

    # pydantic then does not call `__init__` for nested settings, so that one message names the whole path to a value
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def read(cls, values: Any, *, place: str, source: str) -> Self:
        """Reads settings from a mapping.

        Args:
            values: the mapping.
            place: what the settings belong to ("the recipe", "run 'stream'", a task's name), for messages.
            source: the file or option in which the user wrote them, for messages.

        Raises:
            UserError: `values` is not a mapping, a key is unknown or missing, or a value is invalid.
        """
        if not isinstance(values, Mapping):
            raise UserError(
                f"Expected {place} to be a mapping of settings, found {brief(values)}: "
                f"write `key: value` lines in {source}."
            )
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise UserError(_sentence(cls, error, place=place, source=source)) from None

    def changed(self, **changes: Any) -> Self:
        """Returns a copy with changed values, which are validated."""
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | changes)


def read_value(kind: Any, value: Any, *, name: str, source: str = "") -> Any:
    """Validates one value against a type of this module, such as `Lengths`, and returns it converted.

    `name` is the value's name and `source` the file or option in which the user wrote it, for messages.

    Raises:
        UserError: the value is invalid.
    """
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise UserError(_wrong_value(name, error.errors()[0], source)) from None


def described(kind: type[Settings], *, without: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Returns the name and the description of each setting, with its default, for help texts."""
    lines = []
    for name, field in kind.model_fields.items():
        if name not in without:
            has_default = field.default not in (None, PydanticUndefined)
            default = f" (default: {_plain(field.default)})" if has_default else ""
            lines.append((name, f"{field.description}{default}"))
    return lines


def _plain(default: Any) -> str:
    return ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def unknown_key(key: Any, known: Iterable[str], *, place: str, source: str) -> str:
    """Returns the error message about an unknown key, with the most similar known key."""
    names = sorted(known)
    similar = get_close_matches(str(key), names, n=1, cutoff=_LEAST_LIKENESS)
    similar = similar or [name for name in names if len(str(key)) > _LEAST_LETTERS and str(key) in name]
    hint = f"did you mean {similar[0]!r}?" if similar else f"known keys: {', '.join(names)}."
    return f"Expected keys that {place} has, found unknown key {key!r}{_in(source)}: {hint}"


def _sentence(kind: type[Settings], error: ValidationError, *, place: str, source: str) -> str:
    """Returns the error message for a validation error.

    Unknown keys come first: if a key is misspelt, the right key is missing too.
    """
    order = {"extra_forbidden": 0, "invalid_key": 0, "missing": 1}
    first = min(error.errors(), key=lambda wrong: order.get(wrong["type"], 2))
    *parents, key = first["loc"] or ("",)
    if order.get(first["type"]) == 0:
        for parent in (parent for parent in parents if isinstance(parent, str)):
            inner = kind.model_fields[parent].annotation
            kinds = (inner, *get_args(inner))
            kind = next(
                candidate for candidate in kinds if isinstance(candidate, type) and issubclass(candidate, Settings)
            )
        full_place = " of ".join([*reversed(_place_names(parents, of_key=True)), place or "these settings"])
        return unknown_key(key, kind.model_fields, place=full_place, source=source)
    name = " of ".join([*reversed(_place_names(first["loc"])), *([place] if place else [])])
    if first["type"] == "missing":
        return f"Expected {name}, found none: add it{_in(source)}."
    return _wrong_value(name, first, source)


def _place_names(location: Iterable[int | str], *, of_key: bool = False) -> list[str]:
    """Returns names that say where in nested settings a value is, from the outermost to the innermost.

    Nested keys are joined, as in "data.folder". A key inside the first entry of `rules` belongs to "rule 1"; the entry
    itself is "rules (entry 1)". With `of_key`, the location ends before the key.
    """
    steps = list(location)
    names: list[str] = []
    for place, step in enumerate(steps, start=1):
        if isinstance(step, str) and place > 1 and isinstance(steps[place - 2], str):
            names[-1] += f".{step}"
        elif isinstance(step, str):
            names.append(step)
        elif names and (of_key or place < len(steps)):
            names[-1] = f"{names[-1].removesuffix('s')} {step + 1}"
        else:
            names[-1:] = [" ".join([*names[-1:], f"(entry {step + 1})"])]
    return names


def _wrong_value(name: str, error: Any, source: str) -> str:
    context = error.get("ctx", {})
    if isinstance(user_error := context.get("error"), UserError):
        return f"{source}: {re.sub(r'^expected', 'Expected', str(user_error))}" if source else str(user_error)
    expected = {
        "expected": context.get("text"),
        "literal_error": f"one of {str(context.get('expected')).replace(' or ', ', ')}".replace("'", ""),
        "model_type": "a mapping of settings (`key: value` lines)",
        "tuple_type": "a list",
    }.get(error["type"], error["msg"].removeprefix("Input should be "))
    value, action = ("none", "add") if error["input"] is None else (brief(error["input"]), "correct")
    return f"Expected {name} to be {expected}, found {value}: {action} it{_in(source)}{context.get('hint', '')}."


def _in(source: str) -> str:
    return f" in {source}" if source else ""
