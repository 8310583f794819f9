"""`sbeval demo`: lm-eval on the shipped checkpoints and the Python standard library's own sources."""

import datetime
import importlib.resources
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sbeval import registered
from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.results.saving import saved_whole

CHECKPOINTS = ("stickbreaking", "rope")
TRAINING_LENGTH_TOKENS = 1024


class DemoTask(NamedTuple):
    """One task of the demo and how much of it is run.

    Attributes:
        name: lm-eval's name of the task.
        context_lengths: lengths in tokens, ascending.
        blocks: documents of the task, each scored at every length.
    """

    name: str
    context_lengths: tuple[int, ...]
    blocks: int


def lengths(longest_multiple: int) -> tuple[int, ...]:
    """Returns half the training length and its doublings up to a multiple of the training length."""
    longest = TRAINING_LENGTH_TOKENS * longest_multiple
    doublings = (TRAINING_LENGTH_TOKENS // 2 * 2**power for power in range(longest.bit_length()))
    return tuple(length for length in doublings if length <= longest)


# Intervals take 20 documents.
ON_CPU = (DemoTask(name="sb_stdlib_fixed_target", context_lengths=lengths(4), blocks=40),)
ON_GPU = (
    DemoTask(name="sb_stdlib_stream", context_lengths=lengths(64), blocks=24),
    DemoTask(name="sb_stdlib_fixed_target", context_lengths=lengths(16), blocks=120),
)


def evaluate(
    results: Path,
    *,
    checkpoints: Sequence[Path] | None = None,
    tasks: Sequence[DemoTask] | None = None,
    text: Path | None = None,
) -> Path:
    """Evaluates checkpoints on the demo's tasks and shows what it does.

    Args:
        results: folder that gets a new folder for this run.
        checkpoints: checkpoint folders; None takes those shipped.
        tasks: what to run; None takes what suits this machine.
        text: file or folder to read in place of the standard library.

    Returns:
        The folder of this run's results and samples files.

    Raises:
        UserError: a checkpoint is missing.
    """
    checkpoints = shipped_checkpoints() if checkpoints is None else checkpoints
    run = local_path(results) / datetime.datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    import torch  # it is seconds, and what is wrong is said before

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if tasks is None:
        tasks = ON_GPU if device == "cuda" else ON_CPU
    steps = [(checkpoint, task) for checkpoint in checkpoints for task in tasks]
    for number, (checkpoint, task) in enumerate(steps, start=1):
        print(f"\n[{number}/{len(steps)}] {checkpoint.name} on {task.name}; the same as")
        print(program(), shlex.join(command(checkpoint, task, text, device)[1:]), flush=True)
        with saved_whole(str(run / checkpoint.name)) as output:
            _evaluate_one(checkpoint, task, text, output, device)
    return run


def program() -> str:
    """Returns what a shell takes for `sbeval`: the name where it finds one, else the path that was called."""
    return "sbeval" if shutil.which("sbeval") else shlex.quote(sys.argv[0])


def shipped_checkpoints() -> list[Path]:
    """Returns the folders of the checkpoints that come with the package."""
    folder = Path(str(importlib.resources.files("sbeval.demo"))) / "checkpoints"
    return [require_checkpoint(folder / name) for name in CHECKPOINTS]


def require_checkpoint(folder: Path) -> Path:
    """Returns the folder, or raises a `UserError` where it holds no weights."""
    if not (folder / "model.safetensors").is_file():
        raise UserError(
            f"Expected a checkpoint of the demo in {folder}, found no model.safetensors there: install sbeval again "
            "from a complete clone."
        )
    return folder


def model_args(checkpoint: Path) -> dict[str, Any]:
    """Returns the arguments of the model `sb` for a checkpoint."""
    return {"pretrained": str(checkpoint), "dtype": "float32"}


def _evaluate_one(checkpoint: Path, task: DemoTask, text: Path | None, output: str, device: str) -> None:
    from lm_eval.utils import setup_logging  # takes seconds to import, which checking the options does without

    from sbeval.evaluation import run_tasks  # as above

    setup_logging("WARNING")
    chosen = model_args(checkpoint)
    metadata = {**chosen, **_metadata(task, text)}
    asked = {"device": device, "limit": task.blocks}
    run_tasks(registered.MODEL_NAME, [task.name], output=output, metadata=metadata, model_args=chosen, **asked)


def command(checkpoint: Path, task: DemoTask, text: Path | None, device: str) -> list[str]:
    """Returns the command line that does the same as one step of the demo."""
    options = {
        "--model_args": ",".join(f"{key}={value}" for key, value in model_args(checkpoint).items()),
        "--tasks": task.name,
        "--metadata": json.dumps(_metadata(task, text)),
        "--limit": str(task.blocks),
        "--output_path": "results/",
    }
    return ["sbeval", "run", *(part for option in options.items() for part in option)]


def _metadata(task: DemoTask, text: Path | None) -> dict[str, Any]:
    lengths = {"context_lengths": list(task.context_lengths)}
    return lengths if text is None else {**lengths, "data_path": str(text)}
