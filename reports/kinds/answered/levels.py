"""The section "Levels of graded tasks": scores at each level, and whether the order of the levels is measured."""

from collections.abc import Mapping

import pandas as pd

from sbeval.reports.analyse.left_out import unfit_sentence
from sbeval.reports.analyse.levels import LEVELS as LEVEL_NAMES
from sbeval.reports.analyse.levels import ORDERS, LevelDifference, level_differences, order_words
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.theme import Look
from sbeval.reports.kinds.answered.panels import Shown, metrics_figure, with_intervals
from sbeval.reports.read.fields import first_listed, length_text, quote_name
from sbeval.reports.read.results import LENGTH, column_values
from sbeval.reports.read.samples import NO_SAMPLES, SAMPLE_SCORES, SampleScores
from sbeval.reports.section import Cell, Figure, Kind, Material, Section, Table, interval

_METRICS = {"exact_match": "exact match", "soft_match": "soft match", "first_step": "soft match of the first step"}
_FORMS = {"steps": "in two steps", "choice": "by choice"}
_PREFIX = "graded_"
_CHANCE = 0.25
_FORMAT = "+.1%"


def _section(material: Material) -> Section | None:
    """Builds the section; None if no graded task was run."""
    rows = material.results.measurements
    rows = rows[(rows["family"] == "graded") & rows["level"].isin(LEVEL_NAMES) & rows["metric"].isin(_METRICS)]
    rows = rows[rows[LENGTH].notna()]
    if rows.empty:
        return None
    looks = material.looks_of(rows["setting"])
    figures: list[Figure] = []
    tables: list[Table] = []
    for protocol, of_protocol in rows.groupby("protocol", sort=False):
        for metric in [name for name in _METRICS if (of_protocol["metric"] == name).any()]:
            of_metric = of_protocol[of_protocol["metric"] == metric]
            compared = {label: _compared(material, of_metric, label, metric) for label in looks}
            figures.append(_figure(material, of_metric, str(protocol), metric, compared, looks))
            if any(compared.values()):
                tables.append(_table(str(protocol), metric, compared, column_values(of_metric)))
    return Section(
        identifier="levels",
        title="Levels of graded tasks",
        lead=(
            "The levels of a task have the same samples, so the difference of two levels is computed sample by sample. "
            "Their order is measured if its interval leaves zero out; the intervals of one model and length "
            "cover all pairs of levels at once (95%). Bands in figures: 95% intervals over samples."
        ),
        figures=tuple(figures),
        legend=looks,
        tables=tuple(tables),
    )


LEVELS = Kind(section=_section)


def _title(protocol: str, metric: str) -> str:
    kind, _, form = protocol.removeprefix(_PREFIX).partition("_")
    return f"Graded {kind}{f', {_FORMS.get(form, form)}' if form else ''}: {_METRICS[metric]}"


def _compared(material: Material, rows: pd.DataFrame, label: str, metric: str) -> list[LevelDifference]:
    """Returns the differences between the levels of one task that a model ran."""
    by_level: dict[str, SampleScores] = {}
    of_model = rows[rows["setting"] == label].drop_duplicates(["task", "level"])
    # a level is ambiguous if tasks with other options have its name too
    if of_model["level"].duplicated().any() or of_model["seed"].nunique() > 1:
        return []
    for task, level in zip(of_model["task"], of_model["level"], strict=True):
        scores = material.results[SAMPLE_SCORES].get((label, task))
        if scores is not None:
            by_level[level] = scores
    return level_differences(by_level, metric)


def _figure(
    material: Material,
    rows: pd.DataFrame,
    protocol: str,
    metric: str,
    compared: Mapping[str, list[LevelDifference]],
    looks: Mapping[str, Look],
) -> Figure:
    """Returns a figure with one plot for each level."""
    by_choice = protocol.endswith("_choice")
    shown = {
        level: Shown(title=level, levels={_CHANCE: "guess"} if by_choice else {})
        for level in LEVEL_NAMES
        if (rows["level"] == level).any()
    }
    # each level is drawn as `metrics_figure` draws a metric
    by_level = with_intervals(rows.assign(metric=rows["level"]), shown)
    samples = rows["samples"].dropna()
    counts = f"{int(samples.min()):,}" + (f" to {int(samples.max()):,}" if samples.nunique() > 1 else "")
    caption = Caption(
        title=_title(protocol, metric),
        finding=_finding(compared),
        explanation=f"{counts} samples at each level and length. {unfit_sentence(rows)}".strip(),
        subtitle="against context length (tokens, log scale)",
    )
    return metrics_figure(material, by_level, caption, shown, looks, f"levels-{protocol}-{metric}")


def _finding(compared: Mapping[str, list[LevelDifference]]) -> str:
    """Returns a sentence for each model: which levels have a measured order at its longest length."""
    sentences = []
    for label, differences in compared.items():
        if differences:
            longest = max(each.length for each in differences)
            words = order_words([each for each in differences if each.length == longest])
            sentences.append(f"{quote_name(label)} at {length_text(longest)}: {words}")
    return first_listed(sentences) if sentences else f"No order of levels: fewer than two levels, or {NO_SAMPLES}."


def _table(protocol: str, metric: str, compared: Mapping[str, list[LevelDifference]], lengths: list[int]) -> Table:
    """Returns the table of differences, with one row for each model and pair of levels."""
    lines = []
    for label, differences in compared.items():
        for easier, harder in dict.fromkeys((each.easier, each.harder) for each in differences):
            cells = {
                each.length: Cell(
                    format(each.difference.estimate, _FORMAT),
                    interval=interval(each.difference.low, each.difference.high, _FORMAT),
                    small=(f"order {ORDERS[each.order]}",),
                    verdict="worse" if each.order == "reversed" else None,
                )
                for each in differences
                if (each.easier, each.harder) == (easier, harder)
            }
            lines.append((Cell(f", {easier} minus {harder}", name=label), cells))
    return Table.by_length(
        lines,
        lengths=lengths,
        heading="model and levels",
        stem=f"levels-{protocol}-{metric}",
        caption=f"{_title(protocol, metric)}, differences of neighbouring levels",
        explanation="On the samples that all levels have. An order is measured if the interval leaves zero out.",
        interval="simultaneous 95% interval",
    )
