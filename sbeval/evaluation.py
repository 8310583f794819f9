"""Evaluates a model in memory at several context lengths, once or while transformers' Trainer trains it.

`evaluate` runs lm-eval into a temporary folder and reads the results as a report does, so its numbers, tables and
figures equal those of a report. Afterwards it restores the model's training or evaluation mode, kernels, attention and
patched forwards, and the random states.
"""

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
from sbeval.errors import UserError, brief
from sbeval.settings import Count, Flag, read_value

if TYPE_CHECKING:
    import pandas as pd

# a child of lm-eval's logger, whose level is INFO
logger = logging.getLogger("lm_eval.sbeval.evaluation")
_CHANGED = {"training", "forward", "kernels", "skip_threshold", "_attn_implementation_internal"}
"""Attributes of a model's modules and configurations that an evaluation changes and restores."""
_NO_SEEDS = {"random_seed": None, "numpy_random_seed": None, "torch_random_seed": None}
_NOT_LOGGED = ("_perplexity", "_ci95_low", "_ci95_high")
"""Endings of metric names that are not logged: these metrics follow from other metrics, or are ends of intervals."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """The results of `evaluate`.

    Attributes:
        table: one row for each number, with the columns of a report's measurements.csv.
        by_length: maps a context length in tokens to a dictionary from `TASK/METRIC` to a number;
            `TASK/METRIC_ci95_low` and `_ci95_high` are the ends of the number's interval.
        results: the same results for `sbeval.reports.draw`.
    """

    table: "pd.DataFrame"
    by_length: Mapping[int, Mapping[str, float]]
    results: Any

    def figure(self, path: Path | str) -> Path:
        """Draws the curve into a file, whose name ends in .svg, .png or .pdf, and returns its path."""
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

    The model's mode, kernels and attention, and the random states, are restored afterwards. With several ranks, such as
    those of a sharded model, every rank must call this, and every rank evaluates everything.

    Args:
        model: a causal language model of transformers, on its device.
        tokenizer: its tokenizer; a copy is used.
        tasks: names of tasks.
        lengths: context lengths in tokens; None means each task's default.
        limit: largest number of samples of each task; None means all.
        metadata: options of tasks, as `--metadata` takes them, such as `data_path`, and a `label` for figures.
        model_args: arguments of the model `sb`, as `--model_args` takes them.

    Raises:
        UserError: a task, an option or a text cannot be used.
    """
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"Expected a model in memory, found {brief(model)}: load it, or use `sbeval run` for files.")
    names = _checked(tasks, limit, metadata, model_args)
    if not (hasattr(model, "config") and hasattr(model, "device")):
        remedy = "pass the model inside it (model.module), or one of AutoModelForCausalLM"
        raise UserError(f"Expected a causal language model of transformers, found {type(model).__name__}: {remedy}.")
    arguments = {**(model_args or {}), "tokenizer": copy.deepcopy(tokenizer)}
    task_metadata = {**(metadata or {}), **arguments} | ({} if lengths is None else {"context_lengths": lengths})
    with _restored(model), tempfile.TemporaryDirectory() as folder:
        lm = get_model(registered.MODEL_NAME)(model, **arguments)
        run_tasks(lm, names, output=folder, metadata=task_metadata, limit=limit, **_NO_SEEDS)
        results = _reports("build").load_results(folder)
    (by_length,) = _reports("publish").curves_of(results).values() or ({},)
    return Curve(table=results.measurements.drop(columns="results_file"), by_length=by_length, results=results)


def run_tasks(model: Any, tasks: Sequence[str], *, output: str, metadata: Mapping[str, Any], **options: Any) -> None:
    """Runs tasks on a model of lm-eval, or on the name of one, and writes results and samples files to `output`.

    `options` are further arguments of lm-eval's `simple_evaluate`.
    """
    tracker = EvaluationTracker(output_path=output)
    # reading the names of lm-eval's own 14,000 tasks takes seconds
    needs_lm_eval_tasks = not all(task.startswith(registered.TASK_PREFIX) for task in tasks)
    manager = TaskManager(
        include_path=str(registered.tasks_folder()), include_defaults=needs_lm_eval_tasks, metadata=dict(metadata)
    )
    options |= {"tasks": tasks, "log_samples": True, "metadata": metadata, "task_manager": manager}
    evaluated = simple_evaluate(model, **options, evaluation_tracker=tracker)
    samples = evaluated.pop("samples")
    tracker.save_results_aggregated(results=evaluated, samples=samples)
    for name, rows in samples.items():
        tracker.save_results_samples(task_name=name, samples=rows)


class LengthsCallback(TrainerCallback):
    """A callback of transformers' Trainer that evaluates the model every few steps and logs the numbers.

    A number is logged with `Trainer.log` as `eval_TASK/METRIC/LENGTH`. The evaluation does not change the training. If
    it fails, a warning says why, and training goes on. With several ranks, all ranks discard an evaluation that failed
    on one of them.

    Attributes:
        curves: maps a training step to the results of the evaluation after that step.
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
        """Makes the callback; it still must be added to the Trainer. Further arguments are those of `evaluate`.

        Args:
            trainer: the Trainer, which transformers does not pass to callbacks.
            tokenizer: defaults to the trainer's.
            every_steps: training steps between evaluations.
            tasks: names of tasks.
            lengths: context lengths in tokens.
            limit: largest number of samples of each task.
            metadata: options of tasks.
            model_args: arguments of the model `sb`.
            raise_errors: whether an evaluation that fails ends the training.

        Raises:
            UserError: `every_steps` is not a positive whole number, there is no such task, or there is no tokenizer.
        """
        self.every_steps = read_value(Count, every_steps, name="every_steps", source="LengthsCallback")
        self.raise_errors = read_value(Flag, raise_errors, name="raise_errors", source="LengthsCallback")
        self.curves: dict[int, Curve] = {}
        self._trainer = trainer
        self._tokenizer = cast(Any, tokenizer or trainer.processing_class)
        if self._tokenizer is None:
            raise UserError("There is no tokenizer: pass one to LengthsCallback or to the Trainer (processing_class).")
        self._arguments: dict[str, Any] = {
            "tasks": _checked(tasks, limit, metadata, model_args),
            "lengths": lengths,
            "limit": limit,
            "metadata": metadata,
            "model_args": model_args,
        }

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Evaluates if the number of steps is a multiple of `every_steps`.

        Raises:
            Exception: the evaluation failed, on this or another rank, and `raise_errors` is set.
        """
        if state.global_step % self.every_steps:
            return
        curve, error = None, None
        try:
            curve = evaluate(model, self._tokenizer, **self._arguments)
        except Exception as failed:
            error = failed
        reason = _first_reason(error)
        if reason is not None and self.raise_errors:
            raise error or UserError(f"The evaluation failed on another rank: {reason}")
        if reason is not None or curve is None:
            logger.warning("the evaluation at step %d failed, and training goes on: %s", state.global_step, reason)
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
    """Returns why an evaluation failed on this rank, or else on the first rank where it failed; None if on no rank."""
    reason = None if error is None else f"{type(error).__name__}: {error}"
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return reason
    reasons: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reasons, reason)
    return reason or next(filter(None, reasons), None)


@contextlib.contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Restores attributes and sub-modules of the model, random states and LOCAL_RANK after the block."""
    holders = [holder for module in model.modules() for holder in (module, getattr(module, "config", None))]
    dicts = {id(holder): vars(holder) for holder in holders if hasattr(holder, "__dict__")}.values()
    values_before = [{name: attributes[name] for name in _CHANGED if name in attributes} for attributes in dicts]
    children_before = [(module, dict(module._modules)) for module in model.modules()]
    random_state = random.getstate()
    local_rank = os.environ.get("LOCAL_RANK")
    log = logging.getLogger("lm_eval.models.huggingface")
    log.addFilter(_is_not_about_pretrained)
    try:
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = "0"  # lm-eval returns results only on rank 0
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            yield
    finally:
        log.removeFilter(_is_not_about_pretrained)
        for module, children in children_before:  # some sub-modules were replaced by faster ones
            module._modules.clear()
            module._modules.update(children)
        for attributes, values in zip(dicts, values_before, strict=True):
            for name in _CHANGED - values.keys():
                attributes.pop(name, None)
            attributes.update(values)
        random.setstate(random_state)
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank


def _checked(tasks: str | Sequence[str], limit: Any, metadata: Any, model_args: Any) -> list[str]:
    for name, value in {"metadata": metadata, "model_args": model_args}.items():
        if not isinstance(value, Mapping | None):
            raise UserError(f"Expected a dictionary for {name}, found {brief(value)}: write {{name: value}}.")
    if limit is not None:
        read_value(Count, limit, name="limit", source="evaluate")
    if forbidden := sorted({"pretrained", "tokenizer"} & {*(model_args or {})}):
        raise UserError(f"model_args contains {forbidden[0]}, but model and tokenizer are in memory: remove it.")
    packaged = importlib.import_module("sbeval.tasks.packaged")
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    packaged.check_names(names or [""])
    return [known for name in names for known in fnmatch.filter(packaged.definitions(), name) or [name]]


def _is_not_about_pretrained(record: logging.LogRecord) -> bool:
    """Filters lm-eval's warning that `pretrained` is a model object, which is intended here."""
    return "`pretrained`" not in record.getMessage()


def _reports(module: str) -> Any:
    return importlib.import_module(f"sbeval.reports.{module}")
