"""Context lengths evaluated from Python: of a model in memory, at once or while transformers' Trainer trains it."""

import contextlib
import copy
import dataclasses
import fnmatch
import importlib
import logging
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lm_eval import simple_evaluate
from lm_eval.api.registry import get_model
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback

from sbeval import registered
from sbeval.errors import UserError, shown
from sbeval.settings import Count, Flag, read_value

if TYPE_CHECKING:
    import pandas as pd

# a child of lm-eval's logger, whose level is INFO
logger = logging.getLogger("lm_eval.sbeval.evaluation")
_CHANGED = {"training", "forward", "kernels", "skip_threshold", "_attn_implementation_internal"}
"""What an evaluation sets of a model's modules and configurations."""
_NO_SEEDS = {"random_seed": None, "numpy_random_seed": None, "torch_random_seed": None}
_NOT_LOGGED = ("_perplexity", "_ci95_low", "_ci95_high")
"""Endings of numbers that follow from others, or are ends of intervals."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """What `evaluate` measured.

    Attributes:
        table: a row for each number, with the columns of a report's measurements.csv.
        by_length: context length in tokens to `TASK/METRIC` to number; `_ci95_low` and `_ci95_high` behind it name the
            ends of its interval.
        results: the same, as `sbeval.reports.draw` takes it.
    """

    table: "pd.DataFrame"
    by_length: Mapping[int, Mapping[str, float]]
    results: Any

    def figure(self, path: Path | str) -> Path:
        """Draws the curve into a file, which ends in .svg, .png or .pdf, and returns its path."""
        return Path(_reports("build").draw(self.results, path))


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tasks: str | Sequence[str],
    lengths: Sequence[int] | None = None,
    limit: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    model_args: Mapping[str, Any] | None = None,
) -> Curve:
    """Evaluates a model in memory at several context lengths.

    The model keeps its mode, its kernels and its attention, and random numbers go on as they would have. Of several
    processes, such as those of a sharded model, each is to call this, and each evaluates everything.

    Args:
        model: a causal language model of transformers, on its device.
        tokenizer: its tokenizer; a copy is used.
        tasks: names of tasks.
        lengths: context lengths in tokens; None takes each task's own.
        limit: samples of each task; None takes all.
        metadata: options of tasks, as `--metadata` takes them, such as `data_path`, and a `label` for figures.
        model_args: arguments of the model `sb`, as `--model_args` takes them.

    Raises:
        UserError: a task, an option or a text cannot be used.
    """
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"Expected a model in memory, found {shown(model)}: load it, or use `sbeval run` for files.")
    names = _checked(tasks, limit, metadata, model_args)
    if not (hasattr(model, "config") and hasattr(model, "device")):
        remedy = "pass the model inside it (model.module), or one of AutoModelForCausalLM"
        raise UserError(f"Expected a causal language model of transformers, found {type(model).__name__}: {remedy}.")
    arguments = {**(model_args or {}), "tokenizer": copy.deepcopy(tokenizer)}
    asked = {**(metadata or {}), **arguments} | ({} if lengths is None else {"context_lengths": lengths})
    with _left_as_it_was(model), tempfile.TemporaryDirectory() as folder:
        lm = get_model(registered.MODEL_NAME)(model, **arguments)
        run_tasks(lm, names, output=folder, metadata=asked, limit=limit, **_NO_SEEDS)
        results = _reports("build").load_results(folder)
    (by_length,) = _reports("publish").curves_of(results).values() or ({},)
    return Curve(table=results.measurements.drop(columns="results_file"), by_length=by_length, results=results)


def run_tasks(model: Any, tasks: Sequence[str], *, output: str, metadata: Mapping[str, Any], **asked: Any) -> None:
    """Runs tasks on a model of lm-eval, or on the name of one, into results and samples files.

    `asked` are further arguments of lm-eval's `simple_evaluate`.
    """
    tracker = EvaluationTracker(output_path=output)
    # lm-eval's own fourteen thousand task names take seconds to read and are seldom needed
    more = not all(task.startswith(registered.TASK_PREFIX) for task in tasks)
    manager = TaskManager(include_path=str(registered.tasks_folder()), include_defaults=more, metadata=dict(metadata))
    asked |= {"tasks": tasks, "log_samples": True, "metadata": metadata, "task_manager": manager}
    evaluated = simple_evaluate(model, **asked, evaluation_tracker=tracker)
    samples = evaluated.pop("samples")
    tracker.save_results_aggregated(results=evaluated, samples=samples)
    for name, rows in samples.items():
        tracker.save_results_samples(task_name=name, samples=rows)


class LengthsCallback(TrainerCallback):
    """Evaluates a model every few steps of its training, and logs to whatever the Trainer logs to.

    A number is logged as `eval_TASK/METRIC/LENGTH`. Training goes on as it would have without it, also where an
    evaluation fails: a warning says why, and the next one is tried. Of several processes, all leave out an evaluation
    that failed on one.

    Attributes:
        curves: training step to what was measured after it.
    """

    def __init__(
        self,
        trainer: Trainer,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        every_steps: int,
        tasks: str | Sequence[str],
        lengths: Sequence[int] | None = None,
        limit: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        model_args: Mapping[str, Any] | None = None,
        raise_errors: bool = False,
    ) -> None:
        """Takes the Trainer that it is added to, whose tokenizer None is, and the arguments of `evaluate`.

        With `raise_errors` an evaluation that fails ends the training.

        Raises:
            UserError: `every_steps` is no number of steps, or a task has no such name.
        """
        self.every_steps = read_value(Count, every_steps, name="every_steps", source="LengthsCallback")
        self.raise_errors = read_value(Flag, raise_errors, name="raise_errors", source="LengthsCallback")
        self.curves: dict[int, Curve] = {}
        self._trainer = trainer
        self._tokenizer = cast(Any, tokenizer or trainer.processing_class)
        if self._tokenizer is None:
            raise UserError("Expected a tokenizer, found none, nor one that the Trainer has: give it to one of them.")
        self._asked: dict[str, Any] = {
            "tasks": _checked(tasks, limit, metadata, model_args),
            "lengths": lengths,
            "limit": limit,
        }
        self._asked |= {"metadata": metadata, "model_args": model_args}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Evaluates where the number of steps is a multiple of `every_steps`.

        Raises:
            Exception: the evaluation failed, here or in another process, and `raise_errors` is set.
        """
        if state.global_step % self.every_steps:
            return
        curve, error = None, None
        try:
            curve = evaluate(model, self._tokenizer, **self._asked)
        except Exception as failed:
            error = failed
        reason = _first_reason(error)
        if reason is not None and self.raise_errors:
            raise error or UserError(f"Expected an evaluation in every process, found one that failed: {reason}")
        if reason is not None or curve is None:
            logger.warning("step %d has no numbers, and training goes on: %s", state.global_step, reason)
            return
        self.curves[state.global_step] = curve
        logged = {
            f"eval_{name}/{length}": number
            for length, numbers in curve.by_length.items()
            for name, number in numbers.items()
            if not name.endswith(_NOT_LOGGED)
        }
        self._trainer.log(logged)


def _first_reason(error: Exception | None) -> str | None:
    """Returns why an evaluation failed, in this process or in the first of others that it did; None where in none."""
    reason = None if error is None else f"{type(error).__name__}: {error}"
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return reason
    reasons: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reasons, reason)
    return reason or next(filter(None, reasons), None)


@contextlib.contextmanager
def _left_as_it_was(model: Any) -> Iterator[None]:
    both = ((module, getattr(module, "config", None)) for module in model.modules())
    changed = {id(holder): vars(holder) for pair in both for holder in pair if hasattr(holder, "__dict__")}.values()
    kept = [{name: attributes[name] for name in _CHANGED if name in attributes} for attributes in changed]
    parts = [(module, dict(module._modules)) for module in model.modules()]
    numbers = random.getstate()
    local_rank = os.environ.get("LOCAL_RANK")
    log = logging.getLogger("lm_eval.models.huggingface")
    log.addFilter(_is_about_files)
    try:
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = "0"  # lm-eval has results for no other
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            yield
    finally:
        log.removeFilter(_is_about_files)
        for module, children in parts:  # faster ones stand in for some
            module._modules.clear()
            module._modules.update(children)
        for attributes, before in zip(changed, kept, strict=True):
            for name in _CHANGED - before.keys():
                attributes.pop(name, None)
            attributes.update(before)
        random.setstate(numbers)
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank


def _checked(tasks: str | Sequence[str], limit: Any, metadata: Any, model_args: Any) -> list[str]:
    for name, value in {"metadata": metadata, "model_args": model_args}.items():
        if not isinstance(value, Mapping | None):
            raise UserError(f"Expected a dictionary for {name}, found {shown(value)}: write {{name: value}}.")
    if limit is not None:
        read_value(Count, limit, name="limit", source="evaluate")
    if given := sorted({"pretrained", "tokenizer"} & {*(model_args or {})}):
        raise UserError.expected(
            "settings alone in model_args", found=given[0], remedy="the model and tokenizer are in memory"
        )
    packaged = importlib.import_module("sbeval.tasks.packaged")
    asked = [tasks] if isinstance(tasks, str) else list(tasks)
    packaged.check_names(asked or [""])
    return [known for name in asked for known in fnmatch.filter(packaged.definitions(), name) or [name]]


def _is_about_files(record: logging.LogRecord) -> bool:
    return "`pretrained`" not in record.getMessage()  # that it is none is no news to who gave a model


def _reports(module: str) -> Any:
    return importlib.import_module(f"sbeval.reports.{module}")
