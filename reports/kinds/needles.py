"""The section of needle tasks: a heat map of scores by depth and context length for each model.

A needle task hides sentences in a long text and asks for them. Depth is the position of such a sentence in the text, in
percent. Above each heat map is a plot of the mean over depths.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sbeval.reports.analyse.left_out import unfit_sentence
from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.ruler import TASKS, short_name
from sbeval.reports.analyse.statistics import score_interval
from sbeval.reports.figures.heatmaps import NUMBERED_AT_MOST, SCORES, above, grid, heatmaps, length_bands
from sbeval.reports.figures.labels import Caption, tooltip_fields
from sbeval.reports.read.fields import context_metric, length_text, quote_name, ranked
from sbeval.reports.read.results import LENGTH, TaskKey, column_values, records
from sbeval.reports.read.samples import SAMPLE_SCORES, SampleScores
from sbeval.reports.section import Figure, Kind, Material, Section
from sbeval.results.records import FOUND

_CELL_COLUMNS = ["setting", "task", "context_length_tokens", "depth_percent", "score", "low", "high", "samples"]
_PLACED = ("score", FOUND)
"""Metrics that are shown by depth: a task has one of them, `FOUND` if it also asks for needles that are not there."""
_FINEST_GRID = 21
_BIN_PERCENT = 10.0
_UNEVEN_PERCENT = 1.5
_SHOWN = 3
_MEAN_HEIGHT_PIXELS = 70
_TOOLTIP = {
    "length": "context",
    "depth_text": "depth",
    "score_text": "score",
    "interval_text": "95% interval",
    "samples_text": "samples",
}


def _section(material: Material) -> Section | None:
    """Builds the section "Needles by depth and length", one figure for each task; None if no samples record depths."""
    cells = needle_cells(material.results[SAMPLE_SCORES])
    if cells.empty:
        return None
    figures: list[Figure] = []
    for task in sorted(dict.fromkeys(cells["task"]), key=lambda task: ranked(short_name(task), TASKS)):
        of_task = cells[cells["task"] == task]
        labels = [label for label in material.looks if (of_task["setting"] == label).any()]
        low, high = int(of_task["samples"].min()), int(of_task["samples"].max())
        counts = str(low) if low == high else f"{low} to {high}"
        explanation = f"{counts} {'sample' if high == 1 else 'samples'} per cell."
        measured = material.results.measurements
        of_figure = measured[(measured["task"] == task) & measured["setting"].isin(labels)].dropna(subset=[LENGTH])
        explanation = f"{explanation} {unfit_sentence(of_figure)}".strip()
        caption = Caption(
            title=short_name(task),
            finding="; ".join(_finding(label, of_task[of_task["setting"] == label]) for label in labels[:4]) + ".",
            explanation=explanation,
            subtitle=f"score in percent; {explanation}",
        )
        left = {(row["setting"], int(row[LENGTH])): row["samples_sha256"] for row in records(of_figure)}
        spec = _heatmaps(of_task, labels, caption, left)
        stem = f"needles-{safe_stem(caption.title)}"
        folded = len(figures) >= _SHOWN
        figures.append(material.figure({"score": spec}, stem, caption, wide=True, folded=folded))
    return Section(
        identifier="needles",
        title="Needles by depth and length",
        lead="Score of every cell in percent, on one scale from 0 to 1; the line on top is the mean over depths.",
        figures=tuple(figures),
    )


NEEDLES = Kind(section=_section, needs=SAMPLE_SCORES)


def needle_cells(samples: Mapping[TaskKey, SampleScores]) -> pd.DataFrame:
    """Returns one row for each heat map cell: mean score and its interval by model, task, context length and depth.

    The mean is over the samples of all training seeds. The depth of a sample with several needles is their mean depth.
    """
    rows = []
    for (label, task), scores in samples.items():
        cells: dict[tuple[int, float], list[float]] = defaultdict(list)
        for length, depth, cell in (cell for seed in scores.seeds or (scores,) for cell in _cells(seed)):
            cells[length, depth] += cell
        for (length, depth), cell in sorted(cells.items()):
            mean = float(np.mean(cell))
            count = len(cell)
            stderr = float(np.std(cell, ddof=1)) / count**0.5 if count > 1 else 0.0
            low, high = score_interval(mean, stderr, count)
            rows.append((label, task, length, depth, mean, float(low), float(high), count))
    return pd.DataFrame(rows, columns=_CELL_COLUMNS)


def _cells(scores: SampleScores) -> Iterable[tuple[int, float, list[float]]]:
    """Yields each cell of one task's heat map: (context length in tokens, depth in percent, scores of its samples).

    Depths that form an even grid are kept as they are; others are rounded to the nearest 10 percent.
    """
    for (metric, _), values in scores.scores.items():
        parsed = context_metric(metric)
        if parsed is None or parsed[0] not in _PLACED or parsed[1] not in scores.depths_percent:
            continue
        depths = scores.depths_percent[parsed[1]]
        placed = [(depths[key], value) for key, value in values.items() if key in depths and 0 <= value <= 1]
        exact = sorted({depth for depth, _ in placed})
        steps = [later - earlier for earlier, later in itertools.pairwise(exact)]
        grid = len(exact) <= _FINEST_GRID and (not steps or max(steps) - min(steps) <= _UNEVEN_PERCENT)
        groups: dict[float, list[float]] = defaultdict(list)
        for depth, score in placed:
            groups[depth if grid else round(depth / _BIN_PERCENT) * _BIN_PERCENT].append(score)
        for depth, cell in sorted(groups.items()):
            yield parsed[1], depth, cell


def _finding(label: str, cells: pd.DataFrame) -> str:
    ends = list(_means_over_depths(cells).items())
    shares = dict.fromkeys(f"{mean:.0%} at {length_text(length)}" for length, (mean, _) in (ends[0], ends[-1]))
    return f"{quote_name(label)} finds {' and '.join(shares)}"


def _means_over_depths(cells: pd.DataFrame) -> dict[int, tuple[float, float]]:
    """Returns context length to (mean score of its samples, number of samples), in ascending order of length."""
    sums = cells.assign(score=cells["score"] * cells["samples"]).groupby(LENGTH)[["score", "samples"]].sum()
    return {int(str(length)): (score / count, count) for length, score, count in sums.itertuples(name=None)}


def _heatmaps(
    cells: pd.DataFrame, models: Sequence[str], caption: Caption, left: Mapping[tuple[str, int], object]
) -> dict[str, Any]:
    """Returns the Vega-Lite specification of one task: for each model a heat map, and above it the mean over depths.

    `left` maps a model and a context length to the hash of the samples there; it is no text if no sample was left out.
    """
    x = length_bands(column_values(cells))
    panels = {}
    for label in models:
        of_model = cells[cells["setting"] == label]
        drawn = [_cell(cell) for cell in records(of_model)]
        depths = sorted({cell["row"] for cell in drawn})
        numbers = len(models) <= NUMBERED_AT_MOST
        y_title = "needle depth (% from the start)"
        panel = grid(drawn, x, rows=depths, y_title=y_title, shades=SCORES, tooltip=_TOOLTIP, numbers=numbers)
        digests = {length: digest for (model, length), digest in left.items() if model == label}
        panels[label] = above(panel, _means(of_model, x, digests))
    return heatmaps(panels, caption)


def _cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "length": length_text(int(cell["context_length_tokens"])),
        "row": float(cell["depth_percent"]),
        "value": float(cell["score"]),
        "text": f"{100 * cell['score']:.0f}",
        "score_text": f"{cell['score']:.1%}",
        "interval_text": f"{cell['low']:.1%} to {cell['high']:.1%}",
        "depth_text": f"{cell['depth_percent']:.0f} % from the start",
        "samples_text": f"{int(cell['samples']):,}",
    }


def _means(cells: pd.DataFrame, x: Mapping[str, Any], digests: Mapping[int, object]) -> dict[str, Any]:
    means: list[dict[str, Any]] = []
    stretch, last = 0, ""
    for length, (mean, count) in _means_over_depths(cells).items():
        digest = digest if isinstance(digest := digests.get(length), str) else ""
        stretch += bool(means) and digest != last  # lengths with other samples are another line
        last = digest
        shown = {"score_text": f"{mean:.1%}", "samples_text": f"{count:,.0f}"}
        means.append({"length": length_text(length), "score": mean, "stretch": stretch, **shown})
    axis = {"values": [0, 0.5, 1], "format": ".0%"}
    y = {"field": "score", "type": "quantitative", "title": "mean", "scale": {"domain": [0, 1]}, "axis": axis}
    tooltip = tooltip_fields({"length": "context", "score_text": "mean score", "samples_text": "samples"})
    points = {"type": "point", "filled": True, "size": 60, "style": "ink-point"}
    return {
        "height": _MEAN_HEIGHT_PIXELS,
        "data": {"values": means},
        "encoding": {"x": {**x, "axis": None}, "y": y},
        "layer": [
            {"mark": {"type": "line", "style": "ink-line"}, "encoding": {"detail": {"field": "stretch"}}},
            {"mark": points, "encoding": {"tooltip": tooltip}},
        ],
    }
