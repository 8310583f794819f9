"""Figures and tables of tasks with several metrics: a small plot for each metric, a row for each metric and model."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from sbeval.reports.analyse.left_out import unfit_cell
from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.statistics import share_interval
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.lines import (
    SCORE_TOOLTIP,
    SHARES,
    Axes,
    length_domain,
    length_rows,
    small_multiples,
    with_seeds,
)
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.results import LENGTH, column_values, records
from sbeval.reports.section import Cell, Figure, Material, Table, interval

_Z = 1.959963984540054
_HEIGHT_PIXELS, _WIDTH_PIXELS = 190, 270
_COLUMNS = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """How a metric is shown.

    Attributes:
        title: its name on the page.
        is_share: whether it lies between 0 and 1 and is shown in percent; otherwise it is a number with two decimals.
        levels: values with a horizontal line, such as that of a random guess, to the label of the line.
    """

    title: str
    is_share: bool = True
    levels: Mapping[float, str] = dataclasses.field(default_factory=dict)

    @property
    def number_format(self) -> str:
        """The Python format of the metric's values."""
        return ".1%" if self.is_share else ".2f"


def with_intervals(rows: pd.DataFrame, metrics: Mapping[str, Shown]) -> pd.DataFrame:
    """Returns the rows of these metrics at context lengths, with 95% intervals over samples where they have none.

    Intervals of shares are `score_interval`; others are the value plus and minus 1.96 standard errors.
    """
    shown = rows[rows["metric"].isin(list(metrics)) & rows[LENGTH].notna()].copy()
    is_share = shown["metric"].map(lambda metric: metrics[metric].is_share).astype(bool)
    lows, highs = share_interval(shown)
    half = _Z * shown["stderr"].astype(float)
    values = shown["value"].astype(float)
    shown["ci95_low"] = shown["ci95_low"].fillna(pd.Series(np.where(is_share, lows, values - half), shown.index))
    shown["ci95_high"] = shown["ci95_high"].fillna(pd.Series(np.where(is_share, highs, values + half), shown.index))
    return shown


def metrics_figure(
    material: Material,
    rows: pd.DataFrame,
    caption: Caption,
    metrics: Mapping[str, Shown],
    looks: Mapping[str, Look],
    stem: str,
) -> Figure:
    """Returns a figure with one plot for each metric that some model has, against context length.

    `rows` are those of one task, from `with_intervals`.
    """
    drawn = {label: look for label, look in looks.items() if (rows["setting"] == label).any()}
    domain = length_domain(rows, drawn)
    panels = {}
    tooltip = dict(SCORE_TOOLTIP)
    for metric, shown in metrics.items():
        of_metric = rows[rows["metric"] == metric]
        if of_metric.empty:
            continue
        axis = SHARES if shown.is_share else {}
        axes = Axes(x_title=None, x_octaves=2, x_domain=domain, y_title=None, levels=shown.levels, **axis)
        panels[shown.title] = (length_rows(of_metric, drawn, shown.number_format), axes)
        tooltip = with_seeds(tooltip, panels[shown.title][0])
    shared = {"height": _HEIGHT_PIXELS, "width": _WIDTH_PIXELS, "tooltip": tooltip, "looks": drawn}
    spec = small_multiples(panels, caption, columns=min(_COLUMNS, len(panels)), **shared)
    return material.figure({"score": spec}, safe_stem(stem), caption, wide=True)


def metrics_table(
    rows: pd.DataFrame, metrics: Mapping[str, Shown], labels: Sequence[str], *, stem: str, title: str, explanation: str
) -> Table:
    """Returns a table with one row for each model and metric, and one column for each context length.

    `rows` are those of one task, from `with_intervals`.
    """
    lines = []
    for label in labels:
        for metric, shown in metrics.items():
            of_metric = rows[(rows["setting"] == label) & (rows["metric"] == metric)]
            cells = {
                int(row[LENGTH]): Cell(
                    format(row["value"], shown.number_format),
                    interval=interval(row["ci95_low"], row["ci95_high"], shown.number_format),
                    small=unfit_cell(row),
                )
                for row in records(of_metric)
            }
            if cells:
                lines.append((Cell(f", {shown.title}", name=label), cells))
    return Table.by_length(
        lines,
        lengths=column_values(rows),
        heading="model and metric",
        stem=safe_stem(stem),
        caption=title,
        explanation=explanation,
        interval="95% interval",
        folded=f"Numbers: {title}",
    )


def ends_text(rows: pd.DataFrame, metric: str, number_format: str) -> str:
    """Returns one model's value of a metric at its shortest and its longest length, such as "90% at 4K, 30% at 32K"."""
    curve = rows[rows["metric"] == metric].sort_values(LENGTH)
    ends = [curve.iloc[0], curve.iloc[-1]]
    return ", ".join(
        dict.fromkeys(f"{end['value']:{number_format}} at {length_text(int(end[LENGTH]))}" for end in ends)
    )
