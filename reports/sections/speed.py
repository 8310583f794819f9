"""The section on what each run cost: tokens a second, peak memory, time, machine."""

from collections.abc import Sequence

from sbeval.reports.analyse.findings import parameters_text
from sbeval.reports.read.fields import shown_name
from sbeval.reports.read.runs import Run
from sbeval.reports.read.settings import Setting, length_text
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


def speed_rows(settings: Sequence[Setting]) -> list[list[str]]:
    """Returns one row a run in the order of `SPEED_HEADER`."""
    return [_row(setting, run) for setting in settings for run in setting.runs]


def speed_section(settings: Sequence[Setting]) -> Section:
    """Builds the section."""
    rows: list[list[object]] = []
    runs = [(setting, run) for setting in settings for run in setting.runs]
    for (setting, run), row in zip(runs, speed_rows(settings), strict=True):
        parameters = setting.model.parameters
        size = f"{parameters_text(parameters)} parameters, " if parameters else ""
        small = element("small", size + _tasks(run))
        cells = [
            element("td", cell, attributes={"class": "missing" if cell == _NOT_RECORDED else None}) for cell in row[1:]
        ]
        rows.append([element("span", name(setting.label), small), *cells])
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


def _tasks(run: Run) -> str:
    names = [shown_name(task.name) for task in run.tasks]
    return ", ".join(names) if len(names) <= _TASKS_AT_MOST else f"{names[0]} and {len(names) - 1} more tasks"


def _row(setting: Setting, run: Run) -> list[str]:
    model = run.model
    speed = f"{model.tokens_per_second:,.0f}" if model.tokens_per_second else _NOT_RECORDED
    memory = f"{model.peak_memory_bytes / 2**30:.2f} GiB" if model.peak_memory_bytes else _NOT_RECORDED
    lengths = [length for task in run.tasks if task.record for length in task.record.lengths]
    return [
        setting.label,
        speed,
        memory,
        _minutes(run),
        length_text(max(lengths)) if lengths else _NOT_RECORDED,
        model.kernels or _NOT_RECORDED,
        model.dtype or _NOT_RECORDED,
        model.gpu or ("CPU" if run.described else _NOT_RECORDED),
    ]


def _minutes(run: Run) -> str:
    try:
        return f"{float(run.raw['total_evaluation_time_seconds']) / 60:.1f}"
    except (KeyError, TypeError, ValueError):
        return _NOT_RECORDED
