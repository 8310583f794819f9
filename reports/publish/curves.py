"""Curves in experiment trackers: one run a model, one step a context length.

Both trackers are optional packages. Neither is asked for an account: wandb heeds `WANDB_MODE=offline`, and trackio
keeps runs on this machine.
"""

import contextlib
import importlib
from collections.abc import Mapping
from typing import Any, Literal

import pandas as pd

from sbeval.errors import UserError
from sbeval.reports.read.results import Results, records

Tracker = Literal["wandb", "trackio"]
STEP = "context_length_tokens"


def curves_of(results: Results) -> dict[str, dict[int, dict[str, float]]]:
    """Returns, by model and context length in tokens, every number that has a length.

    A number is named `TASK/METRIC`; the ends of its interval are `TASK/METRIC_ci95_low` and `..._high`. What is missing
    is left out.
    """
    curves: dict[str, dict[int, dict[str, float]]] = {}
    for row in records(results.measurements.dropna(subset=[STEP, "value"])):
        numbers = curves.setdefault(row["setting"], {}).setdefault(int(row[STEP]), {})
        name = f"{row['task']}/{row['metric']}"
        numbers[name] = float(row["value"])
        for end in ("ci95_low", "ci95_high"):
            if not pd.isna(row[end]):
                numbers[f"{name}_{end}"] = float(row[end])
    return {model: dict(sorted(lengths.items())) for model, lengths in curves.items()}


def log_curves(results: Results, tracker: Tracker, *, project: str) -> list[str]:
    """Logs the curves of every model, with the context length as the step.

    Args:
        results: models and their numbers.
        tracker: the package.
        project: project of the tracker; each model becomes one run of it.

    Returns:
        The models logged.

    Raises:
        UserError: the package is not installed, no number has a context length, or the tracker fails.
    """
    curves = curves_of(results)
    if not curves:
        raise UserError(f"Expected numbers with a context length for --{tracker}, found none: evaluate sb_ tasks.")
    package = _imported(tracker)
    for model, lengths in curves.items():
        facts = results.model(model).record.to_json()
        try:
            _log_run(package, tracker, project, model, facts, lengths)
        except UserError:
            raise
        except Exception as error:  # the trackers raise classes of their own, and those of their transports
            raise UserError(
                f"Expected --{tracker} to log {model}, found that it fails ({type(error).__name__}: {error}): correct "
                f"the project, log in, or log on this machine{_OFFLINE[tracker]}."
            ) from error
    return list(curves)


_OFFLINE = {"wandb": " with WANDB_MODE=offline", "trackio": ""}


def _imported(tracker: Tracker) -> Any:
    try:
        return importlib.import_module(tracker)
    except ImportError as error:
        raise UserError(
            f"Expected the package {tracker} for --{tracker}, found none: pip install 'sbeval[{tracker}]'."
        ) from error


def _log_run(
    package: Any,
    tracker: Tracker,
    project: str,
    model: str,
    facts: Mapping[str, Any],
    lengths: Mapping[int, Mapping[str, float]],
) -> None:
    known = {name: value for name, value in facts.items() if value is not None}
    with contextlib.ExitStack() as stack:
        if tracker == "wandb":
            run = package.init(project=project, name=model, config=known)
            stack.callback(run.finish)
            run.define_metric(STEP)
            run.define_metric("*", step_metric=STEP)
            for length, numbers in lengths.items():
                run.log({STEP: length, **numbers}, step=length)
        else:
            package.init(project=project, name=model, config=known)
            stack.callback(package.finish)
            for length, numbers in lengths.items():
                package.log({STEP: length, **numbers}, step=length)
