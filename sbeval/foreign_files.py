"""The one reader of files that others wrote: JSON and YAML, read whole or refused in one sentence.

Nothing is opened that is no regular file: a FIFO would be waited for, a device read for ever. Numbers are such that
everything behind can hold them, and no alias of YAML stands for more than was written.
"""

import json
import math
import re
import types
import typing
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sbeval.errors import UserError, first_line, visible

MOST_BYTES = 64 * 2**20
"""Of a configuration; parsed, a file takes up to twenty times its size."""
MOST_RESULTS_BYTES = 2**30
"""Of a results file, and of what a run logs."""
_MOST_YAML_BYTES = 2**20
_MOST_NODES = 100_000
_DEEPEST = 100
_MOST_BRACKETS = 5000
_YAML_KINDS = defaultdict(lambda: "a single value", {types.NoneType: "an empty file", list: "a list"})
_MAY_ACT = re.compile(r"[\x00\x7f]|\\[bfru]")
_LEAD = re.compile(r"^[-?: \t]+", re.MULTILINE)
_LARGEST_WHOLE_NUMBER = 2**63
_LARGEST_NUMBER = 1e100


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Returns what a regular file holds, no more than `most` bytes.

    Raises:
        UserError: it is none, too large, or cannot be read; the message says what is wrong, to stand in a sentence.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise UserError("it is no regular file")
        if size > most:
            raise UserError(f"it is larger than {most // 2**20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise UserError(error.strerror or type(error).__name__) from None
    except ValueError as error:  # a name that no file can have
        raise UserError(first_line(error)) from None


def parse_json(text: str | bytes, *, nan: bool = True) -> Any:
    """Returns what a JSON text holds; whole numbers beyond 64 bits become floats, as they do elsewhere.

    Raises:
        UserError: it is no JSON, or without `nan` holds NaN; the message says why, to stand in a sentence.
    """
    try:
        return json.loads(text, parse_int=_whole_number, parse_constant=float if nan else _no_nan)
    except RecursionError:
        raise UserError("it is nested too deep") from None
    except ValueError as error:  # broken UTF-8 among them
        raise UserError(f"it is no JSON: {first_line(error)}") from None


def parse_visible_json(text: str | bytes) -> Any:
    """Returns what a JSON text holds, with every text in it, keys included, as `visible` shows it.

    Reports read results and samples through this function alone, so that no file they write holds a control character,
    a direction mark or half a surrogate pair of somebody else's.

    Raises:
        UserError: as `parse_json` does.
    """
    value = parse_json(text)
    # json.dumps writes what `visible` changes as one of these, or beyond ASCII
    plain = text.isascii() and _MAY_ACT.search(text if isinstance(text, str) else text.decode("ascii")) is None
    try:
        return value if plain else _visible_texts(value)
    except RecursionError:
        raise UserError("it is nested too deep") from None


def _visible_texts(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else visible(value)
    if isinstance(value, list):
        return [_visible_texts(item) for item in value]
    if isinstance(value, dict):
        return {_visible_texts(key): _visible_texts(item) for key, item in value.items()}
    return value


def read_json(path: Path, what: str, *, remedy: str = "mend the file", nan: bool = True, most: int = MOST_BYTES) -> Any:
    """Reads a JSON file of at most so many bytes; `what` it is, such as "the configuration of a checkpoint", is told.

    Raises:
        UserError: there is none, or it is no JSON.
    """
    try:
        return parse_json(read_bytes(path, most), nan=nan)
    except UserError as error:
        raise UserError(f"Expected {what} at {str(path)!r}, found none that can be read ({error}): {remedy}.") from None


def read_json_object(
    path: Path, what: str, *, remedy: str = "mend the file", nan: bool = True, most: int = MOST_BYTES
) -> dict[str, Any]:
    """Reads a JSON file that holds an object; see `read_json`."""
    value = read_json(path, what, remedy=remedy, nan=nan, most=most)
    if not isinstance(value, dict):
        raise UserError(f"Expected {what} as a JSON object at {str(path)!r}, found a {type(value).__name__}: {remedy}.")
    return value


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Reads a YAML file of settings; `what` is for messages: "a recipe".

    Raises:
        UserError: there is no such file, or it holds no settings.
    """
    try:
        text = read_bytes(path, _MOST_YAML_BYTES).decode()
    except (UserError, UnicodeDecodeError) as error:
        reason = first_line(error)
        raise UserError(f"Expected {what} at {str(path)!r}, found none that can be read ({reason}).") from None
    try:
        value = parse_yaml(text)
    except UserError as error:
        raise UserError(f"Expected YAML in {str(path)!r}, found something else ({error}): mend the file.") from None
    if not isinstance(value, dict):
        raise UserError(
            f"Expected settings of {what} (`key: value` lines) in {str(path)!r}, found {_YAML_KINDS[type(value)]}: "
            "correct the file."
        )
    return value


def parse_yaml(text: str) -> Any:
    """Returns what a YAML text holds.

    Raises:
        UserError: it is no YAML, a key stands twice, or its aliases stand for more than can be meant; the message says
            why, to stand in a sentence.
    """
    _check_brackets(text)
    try:
        return yaml.load(text, _Loader)  # noqa: S506  a SafeLoader
    except yaml.YAMLError as error:
        raise UserError(first_line(ValueError(" ".join(str(error).split())))) from None
    # a number of thousands of digits, or what is marked as a number (!!int) and is none
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise UserError(first_line(error)) from None


def _check_brackets(text: str) -> None:
    # the scanner takes time with the square of them
    if text.count("[") + text.count("{") > _MOST_BRACKETS:
        raise UserError(f"it holds more than {_MOST_BRACKETS} brackets")


class _Counted:
    """Refuses aliases that multiply; for a loader of PyYAML's."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()  # type: ignore[misc]
        if node is not None:
            _count_nodes(node, {})
        return node


class _Loader(_Counted, yaml.SafeLoader):
    """Refuses what a safe loader lets through: a key given twice, aliases that multiply, and endless nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"it is nested more than {_DEEPEST} deep")
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"):
            if isinstance(key, str) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} stands twice", problem_mark=node.start_mark)
            seen.add(str(key))
        return super().construct_mapping(node, deep=deep)


# what JSON does not know stays text, such as a date, or is refused: settings are written to JSON files again
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] not in ("timestamp", "binary", "set", "omap", "pairs")
}


class _TaskLoader(_Counted, yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """Reads what a task's `!function` names as the text it is."""


_TaskLoader.add_multi_constructor("!", lambda loader, suffix, node: str(node.value))


def parse_task_yaml(text: str | bytes) -> Any:
    """Returns what the YAML of an lm-eval task holds; nothing that it names is called.

    Raises:
        ValueError: it is no YAML, or its aliases or its nesting are more than can be meant.
    """
    if isinstance(text, bytes):
        text = text.decode()
    _check_brackets(text)
    # libyaml's recursion ends the process; each level of a block stands at least one column further in
    if any(len(lead) > _MOST_BRACKETS for lead in _LEAD.findall(text)):
        raise ValueError("it is nested too deep")
    try:
        return yaml.load(text, _TaskLoader)  # noqa: S506  a SafeLoader
    except (yaml.YAMLError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(first_line(error)) from None


def _count_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Returns how many nodes a node makes with every alias written out."""
    if id(node) not in known:
        known[id(node)] = _MOST_NODES  # an alias of what it stands in
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        known[id(node)] = 1 + sum(_count_nodes(child, known) for child in inner)
    if known[id(node)] > _MOST_NODES:
        raise yaml.MarkedYAMLError(
            problem=f"with its aliases written out it holds more than {_MOST_NODES} values",
            problem_mark=node.start_mark,
        )
    return known[id(node)]


def _whole_number(digits: str) -> int | float:
    # int() refuses thousands of digits; no value of 64 bits has 20
    number: int | float = int(digits) if len(digits) <= 20 else float(digits)
    return number if abs(number) < _LARGEST_WHOLE_NUMBER else float(number)


def _no_nan(constant: str) -> float:
    if constant == "NaN":
        raise ValueError("NaN stands for a number")
    return float(constant)


def usable_number(value: object) -> float | None:
    """Returns a number as a float; None for anything else, NaN, infinity and what has an infinite square."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < _LARGEST_NUMBER else None


def fits(value: object, hint: Any) -> bool:
    """Whether a value from a file is of a type, a union of types, or a list or dict of them.

    `true` is no number, and NaN, infinity and huge numbers are none.
    """
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, kind) for kind in arguments)
    if origin is list:
        return isinstance(value, list) and all(fits(item, arguments[0]) for item in value)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(fits(item, arguments[1]) for item in value.values())
    if hint is float:
        return usable_number(value) is not None and (isinstance(value, float) or fits(value, int))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST_WHOLE_NUMBER
    return isinstance(value, hint) and not (isinstance(value, float) and math.isnan(value))


def kind_text(hint: Any) -> str:
    """Returns a type as messages name it: "int", "list[float]", "float or null"."""
    arguments = typing.get_args(hint)
    kinds = ["null" if kind is types.NoneType else getattr(kind, "__name__", str(kind)) for kind in arguments]
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if union:
        return " or ".join(kinds)
    return str(hint) if kinds else getattr(hint, "__name__", str(hint))


def has_tokenizer_files(folder: Path) -> bool:
    """Whether a folder may hold a tokenizer, judged by file names. With remote code the answer is always yes."""
    likely = re.compile(r"tok|tek|vocab|merges|sentencepiece|spiece|spm|bpe|dict|\.(model|py|gguf)$")
    config = folder / "config.json"
    has_likely_name = any(likely.search(path.name.lower()) for path in folder.iterdir())
    return has_likely_name or (config.is_file() and b"auto_map" in config.read_bytes())
