"""From a sweep to its runs: a folder and a configuration of `sbeval run` for each."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbeval.errors import UserError
from sbeval.hub_names import hub_commit
from sbeval.results.records import LABEL
from sbeval.sweep.definition import Sweep, SweepCheckpoint, SweepRun


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One lm-eval run of a sweep.

    Attributes:
        label: the checkpoint's folder.
        name: the run's folder in it.
        folder: where everything of the run lies.
        config: what lm-eval reads with `--config`.
        gpus: how many it needs, None where its run does not say.
    """

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


def check_checkpoint(config: Mapping[str, Any]) -> None:
    """Refuses a checkpoint that is not there; what may be a hub id is asked of the hub when the run starts.

    Args:
        config: of a run.

    Raises:
        UserError: naming it.
    """
    name = str(config["model_args"]["pretrained"])
    if config["model"] not in ("sb", "hf"):
        return
    folder = Path(name).expanduser()
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise UserError(f"Expected a checkpoint's folder with its config.json at {name}, found none: correct that.")
        return
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or (offline and hub_commit(name, "models") is None):
        elsewhere = ", and the hub's cache has none" if offline else ""
        raise UserError(f"Expected a checkpoint at {name}, found no such folder{elsewhere}: correct the name.")


def _planned(
    sweep: Sweep,
    checkpoint: SweepCheckpoint,
    run: SweepRun,
    name: str,
    context_lengths: tuple[int, ...] | None,
) -> PlannedRun:
    folder = Path(sweep.output) / checkpoint.folder_name / name
    lengths = {} if context_lengths is None else {"context_lengths": list(context_lengths)}
    label = {} if checkpoint.label is None else {LABEL: checkpoint.label}
    config = {
        "model": checkpoint.model,
        "model_args": {
            "pretrained": checkpoint.pretrained,
            **sweep.model_args,
            **run.model_args,
            **checkpoint.model_args,
        },
        "tasks": list(run.tasks),
        "metadata": {**sweep.metadata, **run.metadata, **lengths, **label},
        "num_fewshot": run.num_fewshot,
        "limit": sweep.limit if run.limit is None else run.limit,
        "batch_size": sweep.batch_size,
        "device": sweep.device,
        "include_path": sweep.include_path,
    }
    return PlannedRun(
        label=checkpoint.folder_name,
        name=name,
        folder=folder,
        gpus=run.gpus,
        config={
            **{key: value for key, value in config.items() if value is not None},
            "output_path": str(folder),
            "log_samples": True,
        },
    )
