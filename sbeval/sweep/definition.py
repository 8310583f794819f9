"""What a sweep consists of: its checkpoints, the runs that each goes through, and folder and settings of each run."""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from sbeval.checkpoints.facts import refuse_adapter
from sbeval.errors import UserError
from sbeval.hub_names import hub_commit, local_path, looks_like_path
from sbeval.results.records import LABEL
from sbeval.settings import Expected, Flag, Lengths, Limit, Name, Names, Options, Settings, Text, WholeNumber, as_whole

_UNSAFE_CHARACTERS = re.compile(r"[^\w.+-]+")


class SweepCheckpoint(Settings):
    """One model of a sweep, evaluated in one way."""

    pretrained: Text = Field(description="Checkpoint folder or hub id.")
    label: Name | None = Field(
        default=None,
        description="Name of its folder of results, by default the last part of `pretrained`, and of the model in "
        "reports. Two entries of one checkpoint, such as with and without RoPE scaling, need labels of their own.",
    )
    model: Text = Field(default="sb", description="lm-eval's name of the model.")
    model_args: Options = Field(
        default={}, description="Further arguments of the model; they win over those of a run and of the sweep."
    )

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        if "pretrained" in self.model_args:
            raise UserError.expected(
                f"pretrained of {self.pretrained!r} once", found="it in its model_args too", remedy="take that out"
            )
        return self

    @property
    def folder_name(self) -> str:
        """The label, or the checkpoint's name, as a folder can be called."""
        return folder_name(self.label or self.pretrained.rstrip("/").rpartition("/")[2])


class SweepRun(Settings):
    """One lm-eval run that every checkpoint of a sweep goes through."""

    name: Name = Field(description="Name of its folder of results.")
    tasks: Names = Field(description="lm-eval's names of tasks and groups.")
    context_lengths: Lengths | None = Field(
        default=None, description="Lengths in tokens for tasks that take them; None leaves the tasks' own."
    )
    lengths_apart: Flag = Field(
        default=False,
        description="Whether each length is a run of its own. What one run scores at several lengths is paired; "
        "lengths apart lose less time when the longest one fails.",
    )
    num_fewshot: WholeNumber | None = Field(
        default=None, description="Examples in the prompt; None leaves the tasks' own."
    )
    limit: Limit | None = Field(
        default=None, description="Documents of a task, as a number or a share below 1; None takes all."
    )
    gpus: WholeNumber | None = Field(
        default=None,
        description="GPUs of each such run with --ray, by default one where there are any. Without --ray a run has all "
        "of them, and with 0 none.",
    )
    model_args: Options = Field(default={}, description="Arguments of the model; they win over those of the sweep.")
    metadata: Options = Field(default={}, description="Further metadata for the tasks; it wins over that of the sweep.")

    @model_validator(mode="after")
    def _lengths_to_part(self) -> Self:
        if self.lengths_apart and self.context_lengths is None:
            raise UserError.expected(
                f"context_lengths in run {self.name!r} beside lengths_apart", found="none", remedy="list them"
            )
        return self

    @property
    def parts(self) -> list[tuple[str, tuple[int, ...] | None]]:
        """Folder and context lengths of each run that this one is."""
        if self.lengths_apart and self.context_lengths is not None:
            return [(folder_name(f"{self.name}-{length}"), (length,)) for length in self.context_lengths]
        return [(folder_name(self.name), self.context_lengths)]


def _batch_size(value: Any) -> int | str:
    return value if isinstance(value, str) and re.fullmatch(r"auto(:\d+(\.\d+)?)?", value) else as_whole(value, 1)


class Sweep(Settings):
    """A sweep."""

    checkpoints: tuple[SweepCheckpoint, ...] = Field(default=(), description="The models.")
    follow: Text | None = Field(
        default=None,
        description="Folder of a training whose checkpoints (`checkpoint-STEP`) are evaluated as they appear.",
    )
    runs: tuple[SweepRun, ...] = Field(default=(), description="What each of them goes through.")
    output: Text = Field(
        default="results", description="Folder of all results, one folder a checkpoint and in it one folder a run."
    )
    model_args: Options = Field(default={}, description="Arguments of every model.")
    metadata: Options = Field(default={}, description="Metadata for the tasks of every run.")
    limit: Limit | None = Field(
        default=None, description="Documents of a task for every run that does not say so itself."
    )
    batch_size: Annotated[int | str, Expected("a whole number of at least 1, or auto", _batch_size)] | None = Field(
        default=None, description="lm-eval's; None is its default."
    )
    device: Text | None = Field(default=None, description="lm-eval's; None is its default.")
    include_path: Text | None = Field(default=None, description="Folder of further task files, as lm-eval's.")
    launcher: Names | None = Field(
        default=None,
        description='Command in front of `-m sbeval run`, such as ["accelerate", "launch"]; None is this Python.',
    )

    @model_validator(mode="after")
    def _something_to_run(self) -> Self:
        if not self.checkpoints and self.follow is None:
            raise UserError.expected("checkpoints to evaluate", found="none", remedy="name at least one")
        if not self.runs:
            raise UserError.expected("a suite or runs", found="neither", remedy="name a suite or list runs")
        _check_distinct([checkpoint.folder_name for checkpoint in self.checkpoints], "checkpoints", "label")
        _check_distinct([name for run in self.runs for name, _ in run.parts], "runs", "name")
        return self


def folder_name(name: str) -> str:
    """Returns a name as one folder can be called."""
    return _UNSAFE_CHARACTERS.sub("_", name).strip("._") or "unnamed"


def _check_distinct(names: list[str], what: str, field: Literal["label", "name"]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            f"Expected {what} whose folders differ, found {', '.join(twice)} more than once: give each its own {field}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One lm-eval run of a sweep: a folder of its checkpoint's, and the `config` that lm-eval reads with `--config`."""

    label: str
    name: str
    folder: Path
    config: dict[str, Any]
    gpus: int | None = None

    @property
    def config_file(self) -> Path:
        """The file of `config`."""
        return self.folder / "run.yaml"

    @property
    def inputs_file(self) -> Path:
        """The file of what the run depends on, as it was when the run began."""
        return self.folder / "inputs.json"

    @property
    def log_file(self) -> Path:
        """What the run printed."""
        return self.folder / "log.txt"

    def __str__(self) -> str:
        return f"{self.label}/{self.name}"


def plan(sweep: Sweep) -> list[PlannedRun]:
    """Returns every run of every checkpoint, one checkpoint after another."""
    return [
        _planned(sweep, checkpoint, run, name, lengths)
        for checkpoint in sweep.checkpoints
        for run in sweep.runs
        for name, lengths in run.parts
    ]


def _planned(
    sweep: Sweep, checkpoint: SweepCheckpoint, run: SweepRun, name: str, context_lengths: tuple[int, ...] | None
) -> PlannedRun:
    folder = local_path(sweep.output) / checkpoint.folder_name / name
    lengths = {} if context_lengths is None else {"context_lengths": list(context_lengths)}
    label = {} if checkpoint.label is None else {LABEL: checkpoint.label}
    arguments = {**sweep.model_args, **run.model_args, **checkpoint.model_args}
    config = {
        "model": checkpoint.model,
        "model_args": {"pretrained": checkpoint.pretrained, **arguments},
        "tasks": list(run.tasks),
        "metadata": {**sweep.metadata, **run.metadata, **lengths, **label},
        "num_fewshot": run.num_fewshot,
        "limit": sweep.limit if run.limit is None else run.limit,
        **{name: getattr(sweep, name) for name in ("batch_size", "device", "include_path")},
        "output_path": str(folder),
        "log_samples": True,
    }
    config = {key: value for key, value in config.items() if value is not None}
    return PlannedRun(label=checkpoint.folder_name, name=name, folder=folder, config=config, gpus=run.gpus)


def check_checkpoint(config: Mapping[str, Any]) -> None:
    """Refuses a run's checkpoint that is not there; what may be a hub id is asked of the hub when the run starts.

    Raises:
        UserError: naming it.
    """
    name = str(config["model_args"]["pretrained"])
    if config["model"] not in ("sb", "hf"):
        return
    folder = local_path(name)
    if folder.exists():
        refuse_adapter(folder)
        if not (folder / "config.json").is_file():
            raise UserError(f"Expected a checkpoint's folder with its config.json at {name}, found none: correct that.")
        return
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if looks_like_path(name) or (offline and hub_commit(name, "models") is None):
        elsewhere = ", and the hub's cache has none" if offline else ""
        raise UserError(f"Expected a checkpoint at {name}, found no such folder{elsewhere}: correct the name.")
