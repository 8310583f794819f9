"""A task's own options: its definition in YAML, overridden by `--metadata`."""

from collections.abc import Mapping, Sequence
from typing import Any

from sbeval.errors import UserError
from sbeval.tasks.ruler.options import whole_number

FIXED = frozenset({"dataset"})
"""Keys of a definition that are what the task's name says, so that no option changes them."""


class Choices:
    """Reads one task's options and refuses values that make no sense.

    Args:
        task: named in errors.
        defaults: the task's definition; its keys but for `FIXED` are the options there are.
        metadata: what the user gave.
    """

    def __init__(self, task: str, defaults: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        self._task = task
        self.values = {**defaults, **{key: metadata[key] for key in defaults.keys() - FIXED if key in metadata}}
        self._metadata = metadata

    def one_of(self, key: str, allowed: Sequence[str]) -> str:
        """Returns a value that must be one of some words."""
        if self.values[key] not in allowed:
            raise UserError(
                f"{self._task} expected {key} to be one of {', '.join(allowed)}, and found {self.values[key]!r}."
            )
        return str(self.values[key])

    def count(self, key: str, *, least: int = 1) -> int:
        """Returns a whole number of at least `least`."""
        return whole_number(self.values, key, least, least=least)

    def number(self, key: str, *, above: float) -> float:
        """Returns a number above a bound."""
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > above:
            raise UserError(f"{self._task} expected {key} to be a number above {above}, and found {value!r}.")
        return float(value)

    def path(self, key: str) -> str | None:
        """Returns a local path given by the user, None where there is none."""
        value = self._metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise UserError(f"{self._task} expected {key} to be a path, and found {value!r}.")
        return value
