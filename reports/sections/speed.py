"""The section on what each run cost: tokens a second, peak memory, time, machine."""

from collections.abc import Sequence

from sbeval.reports.analyse.findings import parameters_text
from sbeval.reports.read.fields import shown_name
from sbeval.reports.read.models import EvaluatedModel, length_text
from sbeval.reports.read.runs import EvaluationRun
from sbeval.reports.sections.section import Section
from sbeval.reports.write.html import element, name, table

SPEED_HEADER = (
    "model",
    "tokens per second",
    "peak memory",
    "minutes",
    "longest context",
    "kernels",
    "dtype",
    "machine",
)
_TASKS_AT_MOST = 2
_NOT_RECORDED = "not recorded"


def speed_rows(models: Sequence[EvaluatedModel]) -> list[list[str]]:
    """Returns one row a run in the order of `SPEED_HEADER`."""
    return [_row(model, run) for model in models for run in model.runs]


def speed_section(models: Sequence[EvaluatedModel]) -> Section:
    """Builds the section."""
    rows: list[list[object]] = []
    runs = [(model, run) for model in models for run in model.runs]
    for (model, run), row in zip(runs, speed_rows(models), strict=True):
        parameters = model.record.parameters
        size = f"{parameters_text(parameters)} parameters, " if parameters else ""
        small = element("small", size + _tasks(run))
        cells = [
            element("td", cell, attributes={"class": "missing" if cell == _NOT_RECORDED else None}) for cell in row[1:]
        ]
        rows.append([element("span", name(model.label), small), *cells])
    content = table(
        SPEED_HEADER,
        rows,
        caption="Speed and memory of every run",
        explanation=(
            "Scored tokens per second of model time over the whole run, all lengths together. Runs on different "
            "machines or lengths do not compare."
        ),
    )
    return Section(identifier="speed", title="Speed and memory", content=(content,))


def _tasks(run: EvaluationRun) -> str:
    names = [shown_name(task.name) for task in run.tasks]
    return ", ".join(names) if len(names) <= _TASKS_AT_MOST else f"{names[0]} and {len(names) - 1} more tasks"


def _row(model: EvaluatedModel, run: EvaluationRun) -> list[str]:
    record = run.record
    speed = f"{record.tokens_per_second:,.0f}" if record.tokens_per_second else _NOT_RECORDED
    memory = f"{record.peak_memory_bytes / 2**30:.2f} GiB" if record.peak_memory_bytes else _NOT_RECORDED
    lengths = [length for task in run.tasks if task.record for length in task.record.lengths]
    return [
        model.label,
        speed,
        memory,
        _minutes(run),
        length_text(max(lengths)) if lengths else _NOT_RECORDED,
        record.kernels or _NOT_RECORDED,
        record.dtype or _NOT_RECORDED,
        record.gpu or ("CPU" if run.described else _NOT_RECORDED),
    ]


def _minutes(run: EvaluationRun) -> str:
    try:
        return f"{float(run.raw['total_evaluation_time_seconds']) / 60:.1f}"
    except (KeyError, TypeError, ValueError):
        return _NOT_RECORDED
