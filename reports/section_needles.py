"""The section of needle heatmaps: one small picture a task and model."""

from collections.abc import Sequence

import pandas as pd

from sbeval.reports.figures.heatmaps import heatmap_figure
from sbeval.reports.panels import safe_stem
from sbeval.reports.ruler import TASKS, short_name
from sbeval.reports.sections import Drawing, Publish, Section
from sbeval.reports.settings import Setting, length_text


def needles_section(cells: pd.DataFrame, settings: Sequence[Setting], publish: Publish) -> Section | None:
    """Builds the section, None where no samples record depths."""
    if cells.empty:
        return None
    drawings = []
    for task in sorted(dict.fromkeys(cells["task"]), key=_task_order):
        of_task = cells[cells["task"] == task]
        lengths = sorted(int(length) for length in of_task["context_length_tokens"].unique())
        for setting in settings:
            own = of_task[of_task["setting"] == setting.label]
            if own.empty:
                continue
            title = f"{short_name(task)}: {setting.label}"
            finding = _finding(own)
            spec = heatmap_figure(
                own, lengths=lengths, title=title, subtitle="score in percent", description=f"{title}. {finding}"
            )
            svg, links = publish(spec, f"needles-{safe_stem(short_name(task))}-{safe_stem(setting.label)}")
            drawings.append(
                Drawing(
                    title=title, finding=finding, explanation="", variants={"score": spec}, svg=svg, downloads=links
                )
            )
    return Section(
        identifier="needles",
        title="Needles by depth and length",
        lead="Score of every cell in percent, on one scale from 0 to 1; the line on top is the mean over depths.",
        drawings=tuple(drawings),
    )


def _task_order(task: str) -> tuple[int, str]:
    name = short_name(task)
    return (TASKS.index(name) if name in TASKS else len(TASKS), name)


def _finding(cells: pd.DataFrame) -> str:
    weighted = (cells["score"] * cells["samples"]).groupby(cells["context_length_tokens"]).sum()
    means = weighted / cells.groupby("context_length_tokens")["samples"].sum()
    first, last = int(means.index[0]), int(means.index[-1])
    words = f"Mean score {means.iloc[0]:.0%} at {length_text(first)}"
    if last != first:
        words += f" and {means.iloc[-1]:.0%} at {length_text(last)}"
    return f"{words}; {int(cells['samples'].min())} to {int(cells['samples'].max())} samples a cell."
