"""`sbeval demo`: runs lm-eval on the shipped checkpoints and the sources of Python's standard library."""

import datetime
import importlib
import importlib.resources
import itertools
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sbeval import registered
from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.processes.progress import one_bar
from sbeval.results.saving import saved_whole

CHECKPOINTS = ("stickbreaking", "rope")
TRAINING_LENGTH_TOKENS = 1024


class DemoTask(NamedTuple):
    """One task of the demo.

    Attributes:
        name: name of the lm-eval task.
        context_lengths: context lengths in tokens, ascending.
        blocks: number of documents to run (`--limit`), each scored at every length.
    """

    name: str
    context_lengths: tuple[int, ...]
    blocks: int


def lengths(longest_multiple: int) -> tuple[int, ...]:
    """Returns context lengths: half the training length, doubled up to `longest_multiple` times the training length."""
    longest = TRAINING_LENGTH_TOKENS * longest_multiple
    doublings = (TRAINING_LENGTH_TOKENS // 2 * 2**power for power in range(longest.bit_length()))
    return tuple(length for length in doublings if length <= longest)


_START, _PAGES = "start", "pages"
# shares of the time of all evaluations, on two cores
_START_SHARE, _PAGES_SHARE = 0.05, 0.1
# at least 20 blocks each: confidence intervals need 20 documents
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
    build_pages: Callable[[Path], Path] | None = None,
) -> Path:
    """Evaluates checkpoints on the demo's tasks, and prints for each evaluation the command that does the same.

    One progress bar shows how far all evaluations and the pages are.

    Args:
        results: folder in which a new folder is made for this run.
        checkpoints: checkpoint folders; None takes the shipped ones.
        tasks: tasks to run; None chooses by device, fewer on a CPU.
        text: file or folder to read in place of the standard library.
        build_pages: builds pages of the folder of this run's results and samples files, and returns one.

    Returns:
        What `build_pages` returns; without it, the folder of this run's results and samples files.

    Raises:
        UserError: a checkpoint is missing.
    """
    checkpoints = shipped_checkpoints() if checkpoints is None else checkpoints
    run = local_path(results) / datetime.datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    import torch  # imported after the checks above, since the import takes seconds

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if tasks is None:
        tasks = ON_GPU if device == "cuda" else ON_CPU
    steps = {f"{checkpoint.name} on {task.name}": (checkpoint, task) for checkpoint in checkpoints for task in tasks}
    tokens = {name: float(task.blocks * sum(task.context_lengths)) for name, (_, task) in steps.items()}
    scoring = sum(tokens.values())
    pages = {} if build_pages is None else {_PAGES: _PAGES_SHARE * scoring}
    with one_bar({_START: _START_SHARE * scoring, **tokens, **pages}) as bar:
        with bar.stage(_START):
            importlib.import_module("sbeval.evaluation")  # imports lm-eval
        for name, (checkpoint, task) in steps.items():
            print(f"\n{name}; the same as")
            print(program(), shlex.join(command(checkpoint, task, text, device)[1:]), flush=True)
            with bar.stage(name), saved_whole(str(run / checkpoint.name)) as output:
                _evaluate_one(checkpoint, task, text, output, device)
        if build_pages is None:
            return run
        with bar.stage(_PAGES):
            return build_pages(run)


def program() -> str:
    """Returns the shell command for `sbeval`: its name if it is on the PATH, else the path of the running script."""
    return "sbeval" if shutil.which("sbeval") else shlex.quote(sys.argv[0])


def shipped_checkpoints() -> list[Path]:
    """Returns the folders of the checkpoints shipped with the package."""
    folder = Path(str(importlib.resources.files("sbeval.demo"))) / "checkpoints"
    return [require_checkpoint(folder / name) for name in CHECKPOINTS]


def require_checkpoint(folder: Path) -> Path:
    """Returns the folder; raises a `UserError` if it has no weights."""
    if not (folder / "model.safetensors").is_file():
        raise UserError(
            f"The demo's checkpoint {folder} has no model.safetensors: install sbeval again from a complete clone."
        )
    return folder


def model_args(checkpoint: Path) -> dict[str, Any]:
    """Returns `--model_args` for a checkpoint."""
    return {"pretrained": str(checkpoint), "dtype": "float32"}


def _evaluate_one(checkpoint: Path, task: DemoTask, text: Path | None, output: str, device: str) -> None:
    from lm_eval.utils import setup_logging  # imports torch, which checking the options does without

    from sbeval.checkpoints.quiet import without_bars  # imports transformers
    from sbeval.evaluation import run_tasks  # imports lm-eval and torch

    setup_logging("WARNING")
    arguments = model_args(checkpoint)
    with without_bars():
        run_tasks(
            registered.MODEL_NAME,
            [task.name],
            output=output,
            metadata={**arguments, **_metadata(task, text)},
            model_args=arguments,
            device=device,
            limit=task.blocks,
        )


def command(checkpoint: Path, task: DemoTask, text: Path | None, device: str) -> list[str]:
    """Returns the `sbeval run` command line that is equivalent to one evaluation of the demo."""
    options = {
        "--model_args": ",".join(f"{key}={value}" for key, value in model_args(checkpoint).items()),
        "--tasks": task.name,
        "--metadata": json.dumps(_metadata(task, text)),
        "--limit": str(task.blocks),
        "--output_path": "results/",
    }
    return ["sbeval", "run", *itertools.chain.from_iterable(options.items())]


def _metadata(task: DemoTask, text: Path | None) -> dict[str, Any]:
    lengths = {"context_lengths": list(task.context_lengths)}
    return lengths if text is None else {**lengths, "data_path": str(text)}
