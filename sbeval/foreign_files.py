"""Reads JSON and YAML files that users or other programs wrote, with protection against damaged and hostile files.

Only regular files are opened: opening a FIFO would block, and a device has no end. Numbers that later code cannot hold
are converted or rejected. Deep nesting, YAML aliases that multiply, and repeated keys are errors. Every error is one
sentence.
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
"""Largest configuration file. Parsed, a file takes up to twenty times its size in memory."""
MOST_RESULTS_BYTES = 2**30
"""Largest results or samples file."""
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
    """Returns the content of a regular file of at most `most` bytes.

    Raises:
        UserError: it is not a regular file, too large, or cannot be read. The message is a reason without the file's
            name, such as "it is larger than 64 MiB", for use inside a sentence.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise UserError("it is not a regular file")
        if size > most:
            raise UserError(f"it is larger than {most // 2**20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise UserError(error.strerror or type(error).__name__) from None
    except ValueError as error:  # the path contains NUL
        raise UserError(first_line(error)) from None


def parse_json(text: str | bytes, *, nan: bool = True) -> Any:
    """Parses JSON. Integers beyond 64 bits become floats, as in other parsers.

    Raises:
        UserError: it is not JSON, or it contains NaN and `nan` is false. The message is a reason for use inside a
        sentence.
    """
    try:
        return json.loads(text, parse_int=_whole_number, parse_constant=float if nan else _no_nan)
    except RecursionError:
        raise UserError("it is nested too deep") from None
    except ValueError as error:  # also invalid UTF-8
        raise UserError(f"it is not JSON: {first_line(error)}") from None


def parse_visible_json(text: str | bytes) -> Any:
    """Parses JSON and escapes all texts in it, including keys, with `visible`.

    Reports read results and samples only through this function, so that no page contains control characters, direction
    marks or halves of surrogate pairs from other files.

    Raises:
        UserError: as in `parse_json`.
    """
    value = parse_json(text)
    # a character that `visible` escapes is in JSON either beyond ASCII or one of these escapes
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


def read_json(
    path: Path, what: str, *, remedy: str = "correct the file", nan: bool = True, most: int = MOST_BYTES
) -> Any:
    """Reads a JSON file.

    Args:
        path: the file.
        what: what the file is, such as "the configuration of a checkpoint", for the message.
        remedy: what to do, for the message.
        nan: whether NaN is allowed.
        most: largest size in bytes.

    Raises:
        UserError: there is no such file, or it is not JSON.
    """
    try:
        return parse_json(read_bytes(path, most), nan=nan)
    except UserError as error:
        raise UserError(f"Expected {what} at {str(path)!r}, which cannot be read ({error}): {remedy}.") from None


def read_json_object(
    path: Path, what: str, *, remedy: str = "correct the file", nan: bool = True, most: int = MOST_BYTES
) -> dict[str, Any]:
    """Reads a JSON file that holds an object; arguments as in `read_json`.

    Raises:
        UserError: there is no such file, it is not JSON, or not an object.
    """
    value = read_json(path, what, remedy=remedy, nan=nan, most=most)
    if not isinstance(value, dict):
        raise UserError(f"Expected {what} as a JSON object at {str(path)!r}, found a {type(value).__name__}: {remedy}.")
    return value


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Reads a YAML file of settings. `what` says what the file is, such as "a recipe", for messages.

    Raises:
        UserError: there is no such file, it is not YAML, or not a mapping.
    """
    try:
        text = read_bytes(path, _MOST_YAML_BYTES).decode()
    except (UserError, UnicodeDecodeError) as error:
        reason = first_line(error)
        raise UserError(
            f"Expected {what} at {str(path)!r}, which cannot be read ({reason}): correct the path."
        ) from None
    try:
        value = parse_yaml(text)
    except UserError as error:
        raise UserError(f"{str(path)!r} is not valid YAML ({error}): correct the file.") from None
    if not isinstance(value, dict):
        raise UserError(
            f"Expected settings of {what} (`key: value` lines) in {str(path)!r}, found {_YAML_KINDS[type(value)]}: "
            "correct the file."
        )
    return value


def parse_yaml(text: str) -> Any:
    """Parses YAML with a safe loader.

    Raises:
        UserError: it is not YAML, a key is repeated, its aliases multiply, or it is nested too deep. The message is a
            reason for use inside a sentence.
    """
    _check_brackets(text)
    try:
        return yaml.load(text, _Loader)  # noqa: S506  a SafeLoader
    except yaml.YAMLError as error:
        raise UserError(first_line(ValueError(" ".join(str(error).split())))) from None
    # a number of thousands of digits, or a word that is marked as a number (!!int)
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise UserError(first_line(error)) from None


def _check_brackets(text: str) -> None:
    # PyYAML's scanner takes quadratic time in the number of brackets
    if text.count("[") + text.count("{") > _MOST_BRACKETS:
        raise UserError(f"it holds more than {_MOST_BRACKETS} brackets")


class _Counted:
    """A mixin for PyYAML's loaders that limits the number of values with all aliases written out."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()  # type: ignore[misc]
        if node is not None:
            _count_nodes(node, {})
        return node


class _Loader(_Counted, yaml.SafeLoader):
    """A safe loader that also rejects repeated keys, aliases that multiply, and deep nesting."""

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
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} is repeated", problem_mark=node.start_mark)
            seen.add(str(key))
        return super().construct_mapping(node, deep=deep)


# settings are later written as JSON: dates stay text, and other types that JSON lacks are rejected
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
    """A loader for lm-eval's task files that reads the value of `!function` as text."""


_TaskLoader.add_multi_constructor("!", lambda loader, suffix, node: str(node.value))


def parse_task_yaml(text: str | bytes) -> Any:
    """Parses the YAML file of an lm-eval task, without calling the functions that it names.

    Raises:
        ValueError: it is not YAML, its aliases multiply, or it is nested too deep.
    """
    if isinstance(text, bytes):
        text = text.decode()
    _check_brackets(text)
    # deep recursion in libyaml would crash the process; every level of a block is indented by at least one column
    if any(len(lead) > _MOST_BRACKETS for lead in _LEAD.findall(text)):
        raise ValueError("it is nested too deep")
    try:
        return yaml.load(text, _TaskLoader)  # noqa: S506  a SafeLoader
    except (yaml.YAMLError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(first_line(error)) from None


def _count_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Returns the number of nodes below a node, itself included, with every alias written out."""
    if id(node) not in known:
        known[id(node)] = _MOST_NODES  # counts for an alias inside the node that it refers to
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
        raise ValueError("it contains NaN")
    return float(constant)


def usable_number(value: object) -> float | None:
    """Returns a number as a float; None for other types, NaN, infinity and numbers whose square is infinite."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < _LARGEST_NUMBER else None


def fits(value: object, hint: Any) -> bool:
    """Whether a value from a file has a type, such as `float`, `int | None`, `list[float]` or `dict[str, int]`.

    `true` does not count as a number, nor do NaN, infinity and huge numbers.
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
    """Returns the name of a type for messages: "int", "list[float]", "float or null"."""
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
