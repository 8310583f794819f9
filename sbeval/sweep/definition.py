"""The settings of a sweep (checkpoints and runs), and the folder and lm-eval configuration of each planned run."""

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
    """One checkpoint of a sweep, with its label and its model arguments."""

    pretrained: Text = Field(description="Checkpoint folder or hub id.")
    label: Name | None = Field(
        default=None,
        description="Name of the folder for its results and of the model in reports, by default the last part of "
        "`pretrained`. Two entries with the same checkpoint, such as with and without RoPE scaling, need different "
        "labels.",
    )
    model: Text = Field(default="sb", description="lm-eval's name of the model.")
    model_args: Options = Field(
        default={}, description="Further model arguments; they override those of a run and of the sweep."
    )

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        if "pretrained" in self.model_args:
            raise UserError(
                f"The checkpoint {self.pretrained!r} also has pretrained in its model_args: remove it there."
            )
        return self

    @property
    def folder_name(self) -> str:
        """The label, or else the checkpoint's name, in a form that is safe as a folder's name."""
        return folder_name(self.label or self.pretrained.rstrip("/").rpartition("/")[2])


class SweepRun(Settings):
    """One lm-eval run of a sweep, which evaluates every checkpoint."""

    name: Name = Field(description="Name of the folder for its results.")
    tasks: Names = Field(description="lm-eval's names of tasks and groups.")
    context_lengths: Lengths | None = Field(
        default=None, description="Lengths in tokens for tasks that take them; None leaves the tasks' defaults."
    )
    lengths_apart: Flag = Field(
        default=False,
        description="Whether each length is a run of its own. Lengths that one run scores are paired, which gives "
        "narrower intervals; separate runs lose less time when the longest one fails.",
    )
    num_fewshot: WholeNumber | None = Field(
        default=None, description="Examples in the prompt; None leaves the tasks' defaults."
    )
    limit: Limit | None = Field(
        default=None, description="Documents of a task, as a number or a share below 1; None means all."
    )
    gpus: WholeNumber | None = Field(
        default=None,
        description="GPUs of the run with --ray, by default one if the cluster has any. Without --ray a run sees all "
        "GPUs, or none with 0.",
    )
    model_args: Options = Field(default={}, description="Model arguments; they override those of the sweep.")
    metadata: Options = Field(default={}, description="Further metadata for the tasks; it overrides the sweep's.")

    @model_validator(mode="after")
    def _lengths_to_part(self) -> Self:
        if self.lengths_apart and self.context_lengths is None:
            raise UserError(
                f"Run {self.name!r} has lengths_apart but no context_lengths: list the lengths in context_lengths."
            )
        return self

    @property
    def parts(self) -> list[tuple[str, tuple[int, ...] | None]]:
        """Folder name and context lengths of each lm-eval run.

        With `lengths_apart` each context length is an lm-eval run; otherwise there is only one.
        """
        if self.lengths_apart and self.context_lengths is not None:
            return [(folder_name(f"{self.name}-{length}"), (length,)) for length in self.context_lengths]
        return [(folder_name(self.name), self.context_lengths)]


def _batch_size(value: Any) -> int | str:
    return value if isinstance(value, str) and re.fullmatch(r"auto(:\d+(\.\d+)?)?", value) else as_whole(value, 1)


class Sweep(Settings):
    """The settings of a sweep, as a sweep file holds them."""

    checkpoints: tuple[SweepCheckpoint, ...] = Field(default=(), description="The models.")
    follow: Text | None = Field(
        default=None,
        description="Folder of a training whose checkpoints (`checkpoint-STEP`) are evaluated as they appear.",
    )
    runs: tuple[SweepRun, ...] = Field(default=(), description="The lm-eval runs that evaluate each checkpoint.")
    output: Text = Field(
        default="results",
        description="Folder for all results: one folder for each checkpoint, and in it one folder for each run.",
    )
    model_args: Options = Field(default={}, description="Model arguments for every checkpoint.")
    metadata: Options = Field(default={}, description="Metadata for the tasks of every run.")
    limit: Limit | None = Field(default=None, description="Documents of a task, for every run that sets no limit.")
    batch_size: Annotated[int | str, Expected("a whole number of at least 1, or auto", _batch_size)] | None = Field(
        default=None, description="Passed on to lm-eval; None takes its default."
    )
    device: Text | None = Field(default=None, description="Passed on to lm-eval; None takes its default.")
    include_path: Text | None = Field(default=None, description="Folder of further task files, passed on to lm-eval.")
    launcher: Names | None = Field(
        default=None,
        description='Command in front of `-m sbeval run`, such as ["accelerate", "launch"]; None is this Python.',
    )

    @model_validator(mode="after")
    def _something_to_run(self) -> Self:
        if not self.checkpoints and self.follow is None:
            raise UserError("The sweep has no checkpoints to evaluate: name at least one.")
        if not self.runs:
            raise UserError("The sweep has neither a suite nor runs: name a suite or list runs.")
        _check_distinct([checkpoint.folder_name for checkpoint in self.checkpoints], "checkpoints", "label")
        _check_distinct([name for run in self.runs for name, _ in run.parts], "runs", "name")
        return self


def folder_name(name: str) -> str:
    """Returns the name in a form that is safe as a folder's name."""
    return _UNSAFE_CHARACTERS.sub("_", name).strip("._") or "unnamed"


def _check_distinct(names: list[str], what: str, field: Literal["label", "name"]) -> None:
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            f"Expected {what} with different folders, found {', '.join(duplicates)} more than once: give each its own "
            f"{field}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One lm-eval run of a sweep for one checkpoint.

    Attributes:
        label: name of the checkpoint's folder.
        name: name of the run's folder, inside the checkpoint's.
        folder: the run's folder.
        config: the configuration that lm-eval reads with `--config`.
        gpus: number of GPUs that Ray gives the run; None means one if the cluster has any.
    """

    label: str
    name: str
    folder: Path
    config: dict[str, Any]
    gpus: int | None = None

    @property
    def config_file(self) -> Path:
        """Path of the file that holds `config`."""
        return self.folder / "run.yaml"

    @property
    def inputs_file(self) -> Path:
        """Path of the record of the run's settings and inputs (hashes of files, commits of hub ids)."""
        return self.folder / "inputs.json"

    @property
    def log_file(self) -> Path:
        """Path of the log with everything that the run printed."""
        return self.folder / "log.txt"

    def __str__(self) -> str:
        return f"{self.label}/{self.name}"


def plan(sweep: Sweep) -> list[PlannedRun]:
    """Returns the planned runs of a sweep: all runs of the first checkpoint, then all runs of the next."""
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
    """Checks that a run's checkpoint exists.

    A name that may be a hub id is accepted without a check; the run asks the hub when it starts.

    Raises:
        UserError: there is no such folder, it has no config.json, or it holds an adapter.
    """
    name = str(config["model_args"]["pretrained"])
    if config["model"] not in ("sb", "hf"):
        return
    folder = local_path(name)
    if folder.exists():
        refuse_adapter(folder)
        if not (folder / "config.json").is_file():
            raise UserError(f"The checkpoint {name} has no config.json: name a folder that holds a checkpoint.")
        return
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if looks_like_path(name) or (offline and hub_commit(name, "models") is None):
        elsewhere = ", and the hub's cache has no such model" if offline else ""
        raise UserError(f"Expected a checkpoint at {name}, found no such folder{elsewhere}: correct the name.")
