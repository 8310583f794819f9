"""What a user sets with `--metadata`: lengths, samples, seed, depths, and everything RULER lets one configure.

lm-eval merges `--metadata` and `--model_args` into one mapping and hands it to every task, so a key that a task does
not know is left aside, unless it is nearly one the task knows; `{"sb_niah_multikey_1": {...}}` sets keys for one task
alone, and there unknown keys are errors. A task's definition in YAML holds options too, which `--metadata` overrides.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sbeval.errors import UserError

DEFAULT_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
GRID_DEPTHS = 11
_LEAST_LIKENESS = 0.85
_TASKS = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Options every task here has.

    Attributes:
        context_lengths: lengths to run, in tokens, ascending.
        dropped_lengths: default lengths the model is too short for, ascending.
        seed: seed of all draws.
        num_samples: samples at each length.
        depths_percent: depths the samples go through in turn, None for RULER's random depths.
    """

    context_lengths: tuple[int, ...]
    dropped_lengths: tuple[int, ...]
    seed: int
    num_samples: int
    depths_percent: tuple[float, ...] | None


def task_metadata(metadata: Mapping[str, Any], task: str, known: frozenset[str]) -> dict[str, Any]:
    """Returns the metadata as one task sees it: its own entry on top of what all tasks share.

    Raises:
        UserError: the task's own entry is no mapping or has a key the task does not know, a shared key is nearly one it
            knows, or an entry is for a task there is not.
    """
    own = metadata.get(task, {})
    if not isinstance(own, Mapping):
        raise UserError(f"Expected --metadata '{{\"{task}\": {{...}}}}' to hold options, found {own!r}.")
    unknown = sorted(set(own) - known)
    if unknown:
        raise UserError(f"{task} has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
    for key, value in metadata.items():
        if key.startswith("sb_") and isinstance(value, Mapping):
            if key != task:
                _check_entry(key)
        elif key not in known and (near := get_close_matches(key, known, n=1, cutoff=_LEAST_LIKENESS)):
            raise UserError(f"{task} expected {near[0]} in --metadata and found {key}; correct the name.")
    return {**metadata, **own}


def _check_entry(name: str) -> None:
    """Refuses options under a name that is no packaged task's, which would reach none."""
    tasks, groups = _packaged()
    if name in tasks:
        return
    if name in groups:
        raise UserError(f"{name} is a group, and options are for one task: give them to all tasks, or under each name.")
    near = get_close_matches(name, tasks, n=3) or sorted(tasks)
    raise UserError(
        f"Expected options in --metadata under the name of a task, found {name}; did you mean {' or '.join(near)}?"
    )


@functools.cache
def _packaged() -> tuple[frozenset[str], frozenset[str]]:
    """Returns the names of the packaged tasks and groups."""
    tasks: set[str] = set()
    groups: set[str] = set()
    for path in _TASKS.rglob("sb_*.yaml"):
        lines = path.read_text(encoding="utf-8").splitlines()
        (groups if any(line.startswith("group:") for line in lines) else tasks).add(path.stem)
    return frozenset(tasks), frozenset(groups)


RUN_KEYS = frozenset({"context_lengths", "seed", "num_samples", "depths"})


def run_options(metadata: Mapping[str, Any], task: str, default_lengths: tuple[int, ...]) -> RunOptions:
    """Reads the shared options.

    Raises:
        UserError: a value has the wrong type or range, or a length asked for is longer than the model takes.
    """
    lengths, dropped = context_lengths(metadata, task, default_lengths)
    return RunOptions(
        context_lengths=lengths,
        dropped_lengths=dropped,
        seed=whole_number(metadata, "seed", 42, least=0),
        num_samples=whole_number(metadata, "num_samples", 500, least=1),
        depths_percent=_depths(metadata.get("depths")),
    )


def context_lengths(
    metadata: Mapping[str, Any], task: str, defaults: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Reads `context_lengths`; returns the lengths to run and the default ones the model is too short for.

    Raises:
        UserError: they are no lengths, or longer than the model takes.
    """
    longest = model_length(metadata)
    asked = metadata.get("context_lengths")
    if asked is None:
        lengths = tuple(n for n in defaults if longest is None or n <= longest)
        if not lengths:
            raise UserError(
                f"The shortest default length of {task} is {defaults[0]} tokens and the model takes {longest}; "
                "set --model_args max_length=... or --metadata '{\"context_lengths\": [...]}'."
            )
        return lengths, tuple(n for n in defaults if n not in lengths)
    lengths = _lengths(asked)
    if longest is not None and lengths[-1] > longest:
        raise UserError(
            f"context_lengths asks for {lengths[-1]} tokens and the model takes {longest}; set "
            f"--model_args max_length={lengths[-1]}, or leave that length out."
        )
    return lengths, ()


def whole_number(metadata: Mapping[str, Any], key: str, default: int, *, least: int) -> int:
    """Reads a whole number of at least `least`.

    Raises:
        UserError: the value is something else.
    """
    value = metadata.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"Expected {key} to be a whole number of at least {least}, found {value!r}.")
    return value


def _lengths(asked: Any) -> tuple[int, ...]:
    listed = [asked] if isinstance(asked, int) and not isinstance(asked, bool) else asked
    if (
        not isinstance(listed, list | tuple)
        or not listed
        or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in listed)
    ):
        raise UserError(f"Expected context_lengths to be a list of whole numbers of tokens, found {asked!r}.")
    return tuple(sorted(set(listed)))


def _depths(asked: Any) -> tuple[float, ...] | None:
    if asked is None or asked == "random":
        return None
    if asked == "grid":
        asked = GRID_DEPTHS
    if isinstance(asked, int) and not isinstance(asked, bool) and asked >= 2:
        return tuple(round(100 * i / (asked - 1), 6) for i in range(asked))
    if isinstance(asked, list | tuple) and asked and all(_is_percent(depth) for depth in asked):
        return tuple(float(depth) for depth in asked)
    raise UserError(
        'Expected depths to be "random", "grid", a number of depths of at least 2, or a list of percents from 0 to '
        f"100, found {asked!r}."
    )


def _is_percent(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 100


def model_length(metadata: Mapping[str, Any]) -> int | None:
    """Returns the longest input lm-eval will give the model whole, in tokens; None where it cannot be told.

    That is `max_length` of the model arguments, else what a local checkpoint's configuration names; a longer prompt
    would be cut on the left without a word in the results.
    """
    asked = metadata.get("max_length")
    if isinstance(asked, int) and not isinstance(asked, bool):
        return asked
    pretrained = metadata.get("pretrained")
    path = Path(str(pretrained)) / "config.json" if isinstance(pretrained, str) else None
    if path is None or not path.is_file():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("n_positions", "max_position_embeddings", "n_ctx"):
        if isinstance(value := config.get(key), int):
            return value
    return None


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
