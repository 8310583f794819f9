"""What a training run leaves behind: its loss curve, its parts, and the record beside the checkpoint."""

import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sbeval.errors import UserError
from sbeval.foreign_files import MOST_RESULTS_BYTES, fits, parse_json, read_bytes
from sbeval.keeping.writing import whole_file
from sbeval.settings import Settings
from sbeval.training.recipe import TrainRecipe

OTHER_FOLDER = "choose another --out, with space, that you may write to"
_KINDS: dict[str, dict[str, Any]] = {  # of what is read again
    "runs.jsonl": {"command": str, "last_step": int, "seconds": float, "gpu": str | None},
    "training_log.jsonl": {"step": int},
}
_PACKAGES = ("torch", "triton", "transformers", "accelerate", "tokenizers", "numpy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPart:
    """One command's share of a run.

    Attributes:
        command: as typed.
        first_step: steps done before it.
        last_step: steps done after it; of a command that was killed, those of the last state it saved.
        seconds: of the whole command.
        gpu: device name, None on a CPU.
        peak_memory_bytes: most device memory allocated, None on a CPU; of several processes, the first's.
        processes: that trained together.
    """

    command: str
    first_step: int
    last_step: int
    seconds: float
    gpu: str | None
    peak_memory_bytes: int | None
    processes: int = 1


class RunParts(NamedTuple):
    """What a run left: one entry for each command, and the points of its loss curve."""

    runs: list[dict[str, Any]]
    curve: list[dict[str, Any]]


def write_lines(file: Path, values: Sequence[Mapping[str, Any]]) -> None:
    """Writes JSON lines, whole or not at all."""
    with whole_file(file, "the record of a run", remedy=OTHER_FOLDER) as part:
        part.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Reads JSON lines of a run, without a last one that was cut off by a kill or a full disk; no file is no lines.

    Raises:
        UserError: it cannot be read, or a line is none that a run wrote.
    """
    values: list[dict[str, Any]] = []
    kinds = _KINDS[file.name].items()
    try:
        for line in read_bytes(file, MOST_RESULTS_BYTES).split(b"\n")[:-1] if file.exists() else []:
            value = parse_json(line)
            if not fits(value, dict) or not all(fits(value.get(name), kind) for name, kind in kinds):
                raise UserError("it is not what a run writes")
            values.append(value)
    except UserError as error:
        raise UserError(
            f"Expected line {len(values) + 1} of {file} as a run wrote it, found another ({error}); mend or remove it"
        ) from None
    return values


def trim_log(log: Path, last_step: int) -> None:
    """Drops points after `last_step`: steps lost in a crash are logged again when they are done again."""
    if log.is_file():
        write_lines(log, [point for point in read_lines(log) if point["step"] <= last_step])


def training_record(
    *,
    recipe: TrainRecipe,
    data: Mapping[str, Any],
    epochs: float,
    parameters: int,
    parts: RunParts,
) -> dict[str, Any]:
    """Returns how a checkpoint was made: recipe, data, seeds, tokens, hardware, time and loss curve."""
    return {
        "name": recipe.name,
        "recipe": recipe.model_dump(mode="json"),
        "parameters": parameters,
        "tokens_seen": recipe.optimization.steps * recipe.optimization.batch_tokens,
        "epochs": round(epochs, 3),
        **_common(data, parts),
    }


def extension_record(
    *,
    extension: Settings,
    parent: Mapping[str, Any],
    data: Mapping[str, Any],
    epochs: float,
    tokens_seen: int,
    parameters: int,
    parts: RunParts,
) -> dict[str, Any]:
    """Returns how a checkpoint was extended: its parent, the settings, data, tokens, hardware, time and loss curve."""
    return {
        "extension": extension.model_dump(mode="json"),
        "parent": dict(parent),
        "parameters": parameters,
        "tokens_seen": tokens_seen,
        "epochs": round(epochs, 3),
        **_common(data, parts),
    }


def _common(data: Mapping[str, Any], parts: RunParts) -> dict[str, Any]:
    runs, curve = parts
    return {
        "unique_tokens": data["unique_tokens"],
        "commands": [part["command"] for part in runs],
        "runs": runs,
        "seconds": round(sum(part["seconds"] for part in runs), 1),
        "gpus": sorted({part["gpu"] for part in runs if part["gpu"]}),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "data": dict(data),
        "loss_curve": curve,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
