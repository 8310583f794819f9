"""The one reader of what a user sets: values become a frozen model, or one sentence says what was expected and found.

Settings come from `--metadata`, `--model_args`, sweep files, recipes and command lines. A model of them derives from
`Settings`, and the type of a field says what its value may be, in the words of the sentence. The same value means the
same everywhere: digits in quotes are the number they write, since command lines give text, and `true` is no number.
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

from sbeval.errors import UserError, shown
from sbeval.hub_names import local_path

MOST_TOKENS = 2**27
"""Of a context length: more than any model claims to read."""
MOST_COUNTED = 2**20
"""Of samples of a length, and of what a sample is made of."""
_LEAST_LIKENESS = 0.75
_LEAST_LETTERS = 3
# most file systems hold 255; endings such as .old-TIMESTAMP come behind a name
_MOST_NAME_BYTES = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """What the value of a field may be; stands beside the Python type in `Annotated`.

    Attributes:
        text: completes "Expected stride to be ...".
        read: returns the value as the field holds it; raises ValueError or TypeError for one that cannot be.
        hint: ends the sentence behind "correct it".
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
    """Returns the type of whole numbers from `least` to `most`; `text` and `hint` are as `Expected` has them."""
    known = f"a whole number of at least {least}" + ("" if most is None else f" and at most {most}")
    return Expected(text or known, lambda value: as_whole(value, least, most), hint)


def number(text: str, accept: Callable[[float], bool]) -> Expected:
    """Returns the type of numbers that `accept` takes; YAML reads 3e-3 as text, so text that writes one is a number."""
    return Expected(text, lambda value: as_number(value, accept))


def as_patterns(value: Any) -> tuple[str, ...]:
    """Returns glob patterns of names from true (all names), false (none), "v_head.*:mtp.*" or a list of patterns.

    Raises:
        ValueError: it is something else, or a pattern is empty.
    """
    if isinstance(value, bool) or str(value).lower() in ("true", "false"):
        return ("*",) if str(value).lower() == "true" else ()
    patterns = value.split(":") if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError
    return tuple(patterns)


def as_counts(value: Any) -> tuple[int, ...]:
    """Returns whole numbers from 1 to `MOST_TOKENS`, such as context lengths in tokens, ascending and each once.

    They are given as a list, as text with commas between them, or as one number.

    Raises:
        ValueError: it is something else, or holds none.
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
    """Returns a whole number from `least` to `most`; raises ValueError for anything else."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= (most or value):
        raise ValueError
    return value


def as_number(value: Any, accept: Callable[[float], bool]) -> float:
    """Returns a number that `accept` takes; raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    if not accept(read := float(value)):
        raise ValueError
    return read


def _limit(value: Any) -> float:
    # below 1 lm-eval takes it for a share of the documents, and above it rounds without a word
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
    """Returns a path; an empty text, as of a variable of the shell that is not set, would be the working folder."""
    if value == "":
        raise ValueError(value)
    return local_path(value)


PathText = Annotated[str, Expected("a path", lambda value: str(as_path(value)) and os.fspath(value))]
LocalPath = Annotated[Path, Expected("a path", as_path)]


class Settings(BaseModel):
    """A set of settings, which never change once read; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError(_sentence(type(self), error, place="", source="")) from None

    # settings within settings are read without it, so that the sentence names the place from the outermost on
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def read(cls, values: Any, *, place: str, source: str) -> Self:
        """Reads settings from a mapping.

        Messages name the `place`, what the settings are of ("the recipe", "run 'stream'", a task's name), and the
        `source`, where the user wrote them: a file or an option.

        Raises:
            UserError: no mapping, an unknown or a missing key, or a value that cannot be.
        """
        if not isinstance(values, Mapping):
            raise UserError(
                f"Expected {place} to be a mapping of settings, found {shown(values)}: "
                f"write `key: value` lines in {source}."
            )
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise UserError(_sentence(cls, error, place=place, source=source)) from None

    def changed(self, **changes: Any) -> Self:
        """Returns these settings with some of them changed, checked as all are."""
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | changes)


def read_value(kind: Any, value: Any, *, name: str, source: str = "") -> Any:
    """Reads a value of a field's type, such as `Lengths`; its name and where the user wrote it are for messages.

    Raises:
        UserError: the value cannot be.
    """
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise UserError(_wrong_value(name, error.errors()[0], source)) from None


def described(kind: type[Settings], *, without: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Returns name and meaning of each setting, with its default where it has one; for help."""
    lines = []
    for name, field in kind.model_fields.items():
        if name not in without:
            said = field.default not in (None, PydanticUndefined)
            default = f" (default: {_plain(field.default)})" if said else ""
            lines.append((name, f"{field.description}{default}"))
    return lines


def _plain(default: Any) -> str:
    return ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def unknown_key(key: Any, known: Iterable[str], *, place: str, source: str) -> str:
    """Returns the sentence about a key that some settings do not have."""
    names = sorted(known)
    near = get_close_matches(str(key), names, n=1, cutoff=_LEAST_LIKENESS)
    near = near or [name for name in names if len(str(key)) > _LEAST_LETTERS and str(key) in name]
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(names)}."
    return f"Expected keys that {place} has, found unknown key {key!r}{_in(source)}: {hint}"


def _sentence(kind: type[Settings], error: ValidationError, *, place: str, source: str) -> str:
    """Returns what is wrong with some settings: a misspelt key first, since the right one may be missing for it."""
    order = {"extra_forbidden": 0, "invalid_key": 0, "missing": 1}
    first = min(error.errors(), key=lambda wrong: order.get(wrong["type"], 2))
    *parents, key = first["loc"] or ("",)
    if order.get(first["type"]) == 0:
        for parent in (parent for parent in parents if isinstance(parent, str)):
            inner = kind.model_fields[parent].annotation
            kinds = (inner, *get_args(inner))
            kind = next(held for held in kinds if isinstance(held, type) and issubclass(held, Settings))
        whole_place = " of ".join([*reversed(_place_names(parents, of_key=True)), place or "these settings"])
        return unknown_key(key, kind.model_fields, place=whole_place, source=source)
    name = " of ".join([*reversed(_place_names(first["loc"])), *([place] if place else [])])
    if first["type"] == "missing":
        return f"Expected {name}, found none: add it{_in(source)}."
    return _wrong_value(name, first, source)


def _place_names(location: Iterable[int | str], *, of_key: bool = False) -> list[str]:
    """Returns the names of a value's places from the outermost on: "data.folder" is one place.

    A key within the first entry of `rules` is a key of "rule 1"; the entry itself is "rules (entry 1)". With `of_key`
    the location is that of a key that is not named.
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
    if isinstance(said := context.get("error"), UserError):
        return f"{source}: {re.sub(r'^expected', 'Expected', str(said))}" if source else str(said)
    expected = {
        "expected": context.get("text"),
        "literal_error": f"one of {str(context.get('expected')).replace(' or ', ', ')}".replace("'", ""),
        "model_type": "a mapping of settings (`key: value` lines)",
        "tuple_type": "a list",
    }.get(error["type"], error["msg"].removeprefix("Input should be "))
    given, do = ("none", "add") if error["input"] is None else (shown(error["input"]), "correct")
    return f"Expected {name} to be {expected}, found {given}: {do} it{_in(source)}{context.get('hint', '')}."


def _in(source: str) -> str:
    return f" in {source}" if source else ""
