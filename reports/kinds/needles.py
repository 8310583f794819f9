"""The section of needle heatmaps: one figure a task, one small image a model."""

import pandas as pd

from sbeval.reports.analyse.names import in_words
from sbeval.reports.analyse.needles import needle_cells
from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.ruler import TASKS, short_name
from sbeval.reports.figures.heatmaps import heatmap_figure
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.samples import SAMPLE_SCORES
from sbeval.reports.section import Figure, Kind, Material, Section

_SHOWN = 3


def needles_section(material: Material) -> Section | None:
    """Builds the section, None where no samples record depths."""
    cells = needle_cells(material.results[SAMPLE_SCORES])
    if cells.empty:
        return None
    figures: list[Figure] = []
    for task in sorted(dict.fromkeys(cells["task"]), key=_task_order):
        of_task = cells[cells["task"] == task]
        labels = [label for label in material.looks if (of_task["setting"] == label).any()]
        title = short_name(task)
        finding = "; ".join(_finding(label, of_task[of_task["setting"] == label]) for label in labels[:4]) + "."
        low, high = int(of_task["samples"].min()), int(of_task["samples"].max())
        counts = str(low) if low == high else f"{low} to {high}"
        explanation = f"{counts} {'sample' if high == 1 else 'samples'} a cell."
        spec = heatmap_figure(
            of_task,
            models=labels,
            title=title,
            subtitle=f"score in percent; {explanation}",
            description=f"{title}. {finding}",
        )
        figures.append(
            material.figure(
                {"score": spec},
                f"needles-{safe_stem(title)}",
                title=title,
                finding=finding,
                explanation=explanation,
                wide=True,
                folded=len(figures) >= _SHOWN,
            )
        )
    return Section(
        identifier="needles",
        title="Needles by depth and length",
        lead="Score of every cell in percent, on one scale from 0 to 1; the line on top is the mean over depths.",
        figures=tuple(figures),
    )


def _task_order(task: str) -> tuple[int, str]:
    name = short_name(task)
    return (TASKS.index(name) if name in TASKS else len(TASKS), name)


def _finding(label: str, cells: pd.DataFrame) -> str:
    weighted = (cells["score"] * cells["samples"]).groupby(cells["context_length_tokens"]).sum()
    means = weighted / cells.groupby("context_length_tokens")["samples"].sum()
    first, last = int(means.index[0]), int(means.index[-1])
    words = f"{in_words(label)} finds {means.iloc[0]:.0%} at {length_text(first)}"
    return words if last == first else f"{words} and {means.iloc[-1]:.0%} at {length_text(last)}"


KIND = Kind(section=needles_section)
