"""Fails once the installed lm-eval has a change of its refactor to 0.5; one test for each row in CONTRIBUTING."""

import dataclasses
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval import evaluator_utils, tasks
from lm_eval.api import instance, metrics, registry, task
from lm_eval.config.task import TaskConfig
from lm_eval.models.huggingface import HFLM

LM_EVAL = Path(lm_eval.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"


def looks_for_plugins() -> bool:
    files = (LM_EVAL / name for name in ("__init__.py", "api/registry.py", "models/__init__.py", "tasks/__init__.py"))
    return any("entry_points(" in file.read_text() for file in files)


def required(kind: Any) -> set[str]:
    none = dataclasses.MISSING
    return {field.name for field in dataclasses.fields(kind) if field.default is field.default_factory is none}


LANDED: dict[str, Callable[[], bool]] = {
    "`api/task.py` is a package": lambda: hasattr(task, "__path__"),
    "`ConfigurableTask` is an alias": lambda: task.ConfigurableTask is task.Task,
    "`Task.dataset` is loaded": lambda: isinstance(
        inspect.getattr_static(task.ConfigurableTask, "dataset", None), property
    ),
    "`construct_requests` gets": lambda: "metadata=(" not in inspect.getsource(task.Task.build_all_requests),
    "`Instance` needs": lambda: {"doc_id", "task_name"} & required(instance.Instance) != set(),
    "`Task.process_instances` scores": lambda: hasattr(task.Task, "process_instances"),
    "New `scorers/`": lambda: (LM_EVAL / "scorers").exists(),
    "`loglikelihood_rolling` gets": lambda: hasattr(task, "LoglikelihoodRollingTask"),
    "`evaluator_utils.torch_gather_object` replaces": lambda: not hasattr(HFLM, "gather_object"),
    "`HFLM` has no `tp_plan`": lambda: "tp_plan" not in inspect.signature(HFLM.__init__).parameters,
    "`get_sample_size` is private": lambda: not hasattr(evaluator_utils, "get_sample_size"),
    "`TaskManager.task_index` is private": lambda: not hasattr(tasks.TaskManager, "task_index"),
    "A group's members are": lambda: hasattr(TaskConfig, "_qualified_name"),
    "`api/metrics.py` is a package": lambda: hasattr(metrics, "__path__"),
    "New `config/formats/`": lambda: (LM_EVAL / "config" / "formats").exists(),
    "An empty registry": lambda: "lazy_module" in inspect.signature(registry.Registry.__init__).parameters,
    "InfiniteBench and other tasks": lambda: not (LM_EVAL / "tasks" / "infinitebench").exists(),
    "Models and tasks are found": looks_for_plugins,
}


def rows() -> dict[str, str]:
    """Returns the rows of CONTRIBUTING's table: the change in lm-eval to its effect here."""
    table = CONTRIBUTING.read_text().partition("| change in lm-eval | effect here |")[2]
    return dict(re.findall(r"^\| (?!---)(.+?) \| (.+) \|$", table, re.MULTILINE))


@pytest.mark.parametrize("change", LANDED)
def test_this_change_of_lm_eval_has_not_landed(change: str) -> None:
    [(what, breaks)] = [row for row in rows().items() if row[0].startswith(change)]
    version = importlib.metadata.version("lm_eval")
    assert not LANDED[change](), f"lm-eval {version} has what CONTRIBUTING foresees: {what}. It breaks here: {breaks}."


def test_every_row_has_a_test() -> None:
    assert len(rows()) == len(LANDED)
