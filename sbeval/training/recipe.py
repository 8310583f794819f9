"""Reads a recipe: a YAML mapping becomes a frozen dataclass, and an unknown or missing key is the user's error."""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

from sbeval.errors import UserError

RecipeT = TypeVar("RecipeT")

RECIPE_FOLDER = Path(__file__).parent / "recipes"


def load_recipe(kind: type[RecipeT], path: str | Path) -> RecipeT:
    """Reads a recipe file into a dataclass.

    Args:
        kind: a frozen keyword-only dataclass; fields that are dataclasses themselves are read from nested mappings.
        path: a YAML file, or the name of a recipe that ships with the package (`demo_rope`).

    Raises:
        UserError: no such file, not a mapping, an unknown or missing key, or a value of the wrong type.
    """
    value, file = read_mapping(path)
    return from_mapping(kind, value, where=file.name)


def read_mapping(path: str | Path) -> tuple[dict[str, Any], Path]:
    """Reads a recipe file; returns its settings and where they were found.

    A recipe with `based_on: NAME` holds what differs from that recipe, nested settings included.
    """
    file = _find(path)
    try:
        value = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(
            f"expected YAML in the recipe {file}, found {str(error).splitlines()[0]}; mend the file"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"expected settings (`key: value` lines) in the recipe {file}, found {type(value).__name__}")
    if (base := value.pop("based_on", None)) is not None:
        value = _merged(read_mapping(base)[0], value)
    return value, file


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = base | changes
    for key, change in changes.items():
        if isinstance(change, dict) and isinstance(base.get(key), dict):
            both[key] = _merged(base[key], change)
    return both


def from_mapping(kind: type[RecipeT], value: Any, *, where: str) -> RecipeT:
    """Builds the dataclass `kind` from a mapping; `where` names the place in error messages."""
    if not isinstance(value, Mapping):
        raise UserError(
            f"expected a mapping of settings in {where}, found {type(value).__name__}; write `key: value` lines"
        )
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in value:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "known keys: " + ", ".join(sorted(fields))
            raise UserError(f"unknown key {key!r} in {where}: {hint}")
    missing = [
        name
        for name, field in fields.items()
        if name not in value and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"missing key {missing[0]!r} in {where}: add it")
    hints = get_type_hints(kind)
    return kind(**{key: _convert(hints[key], item, f"{where}: {key}") for key, item in value.items()})


def _find(path: str | Path) -> Path:
    for candidate in (Path(path), RECIPE_FOLDER / str(path), RECIPE_FOLDER / f"{path}.yaml"):
        if candidate.is_file():
            return candidate
    known = ", ".join(sorted(file.stem for file in RECIPE_FOLDER.glob("*.yaml")))
    raise UserError(f"no recipe file at {path}: give a YAML file or one of the shipped recipes ({known})")


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_mapping(hint, value, where=where)
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        # YAML reads 3e-3 as text: only 3.0e-3 is a number there
        try:
            return float(value)
        except ValueError:
            pass
    expected = {"int": int, "float": float, "str": str, "bool": bool}.get(getattr(hint, "__name__", ""))
    if expected is not None and (not isinstance(value, expected) or (expected is int and isinstance(value, bool))):
        raise UserError(f"expected {expected.__name__} for {where}, found {value!r}")
    if isinstance(value, list):
        return tuple(value)
    return value
