"""What a sweep consists of, as its YAML file writes it."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sbeval.errors import UserError
from sbeval.training.recipe import from_mapping

_UNSAFE_CHARACTERS = re.compile(r"[^\w.+-]+")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """One model of a sweep, evaluated in one way.

    Attributes:
        pretrained: checkpoint folder or hub id.
        label: name of its folder of results; by default the last part of `pretrained`. Two entries of one checkpoint,
            such as with and without RoPE scaling, need labels of their own.
        model: lm-eval's name of the model.
        model_args: further arguments of the model; they win over those of a run and of the sweep.
    """

    pretrained: str
    label: str = ""
    model: str = "sb"
    model_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_mapping("model_args", self.model_args)
        if "pretrained" in self.model_args:
            raise UserError(
                f"Expected pretrained of {self.pretrained!r} once, found it in its model_args too: take that out."
            )

    @property
    def folder_name(self) -> str:
        """The label, or the checkpoint's name, as a folder can be called."""
        return folder_name(self.label or self.pretrained.rstrip("/").rpartition("/")[2])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """One lm-eval run that every checkpoint of a sweep goes through.

    Attributes:
        name: name of its folder of results.
        tasks: lm-eval's names of tasks and groups.
        context_lengths: lengths in tokens, ascending, for tasks that take them; None leaves the tasks' own.
        lengths_apart: whether each length is a run of its own. What one run scores at several lengths is paired;
            lengths apart need less time lost when the longest one fails.
        num_fewshot: examples in the prompt; None leaves the tasks' own.
        limit: documents of a task, as a number or a share below 1; None takes all.
        model_args: arguments of the model; they win over those of the sweep.
        metadata: further metadata for the tasks; it wins over that of the sweep.
    """

    name: str
    tasks: tuple[str, ...]
    context_lengths: tuple[int, ...] | None = None
    lengths_apart: bool = False
    num_fewshot: int | None = None
    limit: float | None = None
    model_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"run {self.name!r}"
        object.__setattr__(self, "tasks", _names(self.tasks, f"tasks of {where}"))
        object.__setattr__(self, "context_lengths", check_lengths(self.context_lengths, where))
        if self.lengths_apart and self.context_lengths is None:
            raise UserError(f"Expected context_lengths in {where} beside lengths_apart, found none: list them.")
        if self.num_fewshot is not None and (not _is_whole(self.num_fewshot) or self.num_fewshot < 0):
            raise UserError(f"Expected num_fewshot of {where} as a whole number from 0, found {self.num_fewshot!r}.")
        check_limit(self.limit, where)
        _check_mapping("model_args", self.model_args)
        _check_mapping("metadata", self.metadata)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SweepSettings:
    """A sweep.

    Attributes:
        checkpoints: the models.
        runs: what each of them goes through.
        output: folder of all results, one folder a checkpoint and in it one folder a run.
        model_args: arguments of every model.
        metadata: metadata for the tasks of every run.
        limit: documents of a task for every run that does not say so itself.
        batch_size: lm-eval's, None for its default.
        device: lm-eval's, None for its default.
        include_path: folder of further task files, as lm-eval's.
        launcher: command in front of `-m sbeval run`, such as ["accelerate", "launch"]; None for this Python.
    """

    checkpoints: tuple[CheckpointSettings, ...]
    runs: tuple[RunSettings, ...]
    output: str = "results"
    model_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    limit: float | None = None
    batch_size: int | str | None = None
    device: str | None = None
    include_path: str | None = None
    launcher: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.checkpoints:
            raise UserError("Expected checkpoints to evaluate, found none: name at least one.")
        if not self.runs:
            raise UserError("Expected a suite or runs, found neither: name a suite or list runs.")
        _check_mapping("model_args", self.model_args)
        _check_mapping("metadata", self.metadata)
        check_limit(self.limit, "the sweep")
        if self.launcher is not None:
            object.__setattr__(self, "launcher", _names(self.launcher, "launcher"))
        _check_distinct([checkpoint.folder_name for checkpoint in self.checkpoints], "checkpoints", "label")
        _check_distinct([folder_name(run.name) for run in self.runs], "runs", "name")


def load_sweep(path: Path) -> SweepSettings:
    """Reads a sweep file.

    Its keys are the fields of `SweepSettings`; `suite` names a set of runs (`context_lengths` beside it chooses their
    lengths), `runs` lists further ones, and a checkpoint may be written as its path alone.

    Raises:
        UserError: no such file, no YAML, an unknown or missing key, or a value that cannot be.
    """
    from sbeval.sweep.suites import suite_runs

    try:
        written = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Expected a sweep file at {str(path)!r}, found none that can be read ({error}).") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"Expected YAML in {str(path)!r}, found something else ({reason}): mend the file.") from None
    if not isinstance(written, dict):
        raise UserError(f"Expected settings (`key: value` lines) in {str(path)!r}, found {type(written).__name__}.")
    values = dict(written)
    lengths = check_lengths(values.pop("context_lengths", None), path.name)
    suite = values.pop("suite", None)
    listed = _listed(values.pop("runs", None), "runs", path)
    runs = [from_mapping(RunSettings, run, where=f"{path.name}: runs") for run in listed]
    if suite is None and lengths is not None:
        runs = [run if run.context_lengths else dataclasses.replace(run, context_lengths=lengths) for run in runs]
    if suite is not None:
        runs = [*suite_runs(suite, lengths), *runs]
    checkpoints = [
        from_mapping(
            CheckpointSettings,
            {"pretrained": item} if isinstance(item, str) else item,
            where=f"{path.name}: checkpoints",
        )
        for item in _listed(values.pop("checkpoints", None), "checkpoints", path)
    ]
    return from_mapping(SweepSettings, {**values, "checkpoints": checkpoints, "runs": runs}, where=path.name)


def folder_name(name: str) -> str:
    """Returns a name as one folder can be called."""
    return _UNSAFE_CHARACTERS.sub("_", name).strip("._") or "unnamed"


def check_lengths(value: Any, where: str) -> tuple[int, ...] | None:
    """Returns context lengths ascending and each once, None where none are given."""
    if value is None:
        return None
    values = [value] if _is_whole(value) else value
    if not isinstance(values, list | tuple) or not values or not all(_is_whole(item) and item > 0 for item in values):
        raise UserError(f"Expected context_lengths of {where} as a list of positive whole numbers, found {value!r}.")
    return tuple(sorted(set(values)))


def check_limit(value: Any, where: str) -> None:
    """Refuses a limit that is no number above zero."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
        raise UserError(f"Expected limit of {where} as a number above 0, found {value!r}: leave it out for no limit.")


def _names(value: Any, what: str) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"Expected {what} as a list of names, found {value!r}.")
    return tuple(names)


def _listed(value: Any, key: str, path: Path) -> Sequence[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise UserError(f"Expected {key} in {str(path)!r} as a list (lines that begin with `- `), found {value!r}.")
    return value


def _check_mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise UserError(f"Expected {name} as a mapping (`key: value` lines), found {value!r}.")


def _check_distinct(names: list[str], what: str, field: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(
            f"Expected {what} whose folders differ, found {', '.join(twice)} more than once: give each its own {field}."
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
