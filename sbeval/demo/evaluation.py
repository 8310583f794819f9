"""`sbeval demo`: lm-eval on the shipped checkpoints and the Python standard library's own sources."""

import datetime
import importlib.resources
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sbeval import plugin
from sbeval.errors import UserError

CHECKPOINTS = ("stickbreaking", "rope")
TRAINING_LENGTH_TOKENS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoTask:
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
    """Returns a quarter of the training length and its doublings up to a multiple of the training length."""
    longest = TRAINING_LENGTH_TOKENS * longest_multiple
    doublings = (TRAINING_LENGTH_TOKENS // 4 * 2**power for power in range(longest.bit_length()))
    return tuple(length for length in doublings if length <= longest)


# Sized for about five minutes on two cores. Intervals need 20 files, so fixed_target takes that many at least; few
# files of the standard library are long enough for more than 16x inside one file, joined ones go on to 64x.
ON_CPU = (
    DemoTask(name="sb_stdlib_stream", context_lengths=lengths(16), blocks=2),
    DemoTask(name="sb_stdlib_fixed_target", context_lengths=lengths(16), blocks=20),
)
ON_GPU = (
    DemoTask(name="sb_stdlib_stream", context_lengths=lengths(64), blocks=24),
    DemoTask(name="sb_stdlib_fixed_target", context_lengths=lengths(16), blocks=120),
)


def evaluate(
    results: Path, *, checkpoints: Sequence[Path] | None = None, tasks: Sequence[DemoTask] | None = None
) -> Path:
    """Evaluates checkpoints on the demo's tasks and shows what it does.

    Args:
        results: folder that gets a new folder for this run.
        checkpoints: checkpoint folders; None takes those shipped.
        tasks: what to run; None takes what suits this machine.

    Returns:
        The folder of this run's results and samples files.

    Raises:
        UserError: a checkpoint is missing.
    """
    checkpoints = shipped_checkpoints() if checkpoints is None else checkpoints
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if tasks is None:
        tasks = ON_GPU if device == "cuda" else ON_CPU
    run = results / datetime.datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    steps = [(checkpoint, task) for checkpoint in checkpoints for task in tasks]
    for number, (checkpoint, task) in enumerate(steps, start=1):
        print(f"\n[{number}/{len(steps)}] {checkpoint.name} on {task.name}; the same as\n{_command(checkpoint, task)}")
        _evaluate_one(checkpoint, task, run / checkpoint.name, device)
    return run


def shipped_checkpoints() -> list[Path]:
    """Returns the folders of the checkpoints that come with the package."""
    folder = Path(str(importlib.resources.files("sbeval.demo"))) / "checkpoints"
    found = [folder / name for name in CHECKPOINTS]
    for checkpoint in found:
        if not (checkpoint / "model.safetensors").is_file():
            raise UserError(
                f"expected the demo's checkpoint in {checkpoint}, found no model.safetensors there: "
                "install sbeval again from a complete clone"
            )
    return found


def _evaluate_one(checkpoint: Path, task: DemoTask, output: Path, device: str) -> None:
    plugin.install()
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import setup_logging

    setup_logging("WARNING")
    model_args = {"pretrained": str(checkpoint), "dtype": "float32"}
    metadata = {**model_args, "context_lengths": list(task.context_lengths)}
    tracker = EvaluationTracker(output_path=str(output))
    # lm-eval's own fourteen thousand task names take seconds to read and are not needed
    manager = TaskManager(include_path=str(plugin.tasks_folder()), include_defaults=False, metadata=metadata)
    evaluated = simple_evaluate(
        model=plugin.MODEL_NAME,
        model_args=model_args,
        tasks=[task.name],
        device=device,
        limit=task.blocks,
        log_samples=True,
        evaluation_tracker=tracker,
        task_manager=manager,
        metadata=metadata,
    )
    samples = evaluated.pop("samples")
    tracker.save_results_aggregated(results=evaluated, samples=samples)
    for name, rows in samples.items():
        tracker.save_results_samples(task_name=name, samples=rows)


def _command(checkpoint: Path, task: DemoTask) -> str:
    options = {
        "--model_args": f"pretrained={checkpoint},dtype=float32",
        "--tasks": task.name,
        "--metadata": json.dumps({"context_lengths": list(task.context_lengths)}),
        "--limit": str(task.blocks),
        "--output_path": "results/",
    }
    return shlex.join(["sbeval", "run", *(part for option in options.items() for part in option)])
