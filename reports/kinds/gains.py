"""The same targets under two conditions: what a context is worth, and what it costs to find it among others."""

from collections.abc import Iterable

import pandas as pd

from sbeval.reports.analyse.findings import signed
from sbeval.reports.analyse.panels import CORPUS_WORDS, safe_stem
from sbeval.reports.analyse.ruler import by_length
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.lines import COUNTED, SCORE_TOOLTIP, length_figure
from sbeval.reports.read.fields import first_listed, in_words, length_text
from sbeval.reports.read.results import column_values
from sbeval.reports.section import Cell, Figure, Kind, Material, Section, Table, interval

_METRIC = "gain_over_"
_CONDITIONS = {
    "without": ("what the context is worth", "NLL of the same targets without any context, minus NLL with it."),
    "blocks": (
        "cost of riffled documents",
        "NLL behind each document in one block, minus NLL behind the same tokens riffled: below zero, riffling costs.",
    ),
    "replaced": (
        "finding the own document again",
        "NLL with another document in place of the target's own, minus NLL with it, both riffled: above zero, found.",
    ),
}
"""Condition to a title and what is subtracted from what."""


def _section(material: Material) -> Section | None:
    """Returns None where no targets were scored under two conditions."""
    measured = material.results.measurements
    rows = measured[measured["metric"].isin([_METRIC + condition for condition in _CONDITIONS])]
    if rows.empty:
        return None
    figures: list[Figure] = []
    tables: list[Table] = []
    for (task, metric), of_task in rows.groupby(["task", "metric"], sort=False):
        words, explanation = _CONDITIONS[str(metric).removeprefix(_METRIC)]
        looks = material.looks_of(of_task["setting"])
        corpus = str(of_task["corpus"].iloc[0])
        caption = Caption(
            title=f"{CORPUS_WORDS.get(corpus, corpus)}, {of_task['protocol'].iloc[0]}: {words}",
            finding=_finding(of_task, looks),
            explanation=explanation,
        )
        spec = length_figure(
            of_task,
            caption,
            looks=looks,
            number_format="+.3f",
            tooltip=SCORE_TOOLTIP | COUNTED | {"value_text": "difference (nats per token)"},
            y_title="difference (nats per token)",
        )
        stem = safe_stem(f"{metric}-{task}")
        figures.append(material.figure({str(metric): spec}, stem, caption))
        tables.append(_table(of_task, looks, stem, caption))
    return Section(
        identifier="gains",
        title="The same targets under other conditions",
        lead="Paired differences of NLL in nats per token. Bands: 95% intervals over source documents.",
        figures=tuple(figures),
        legend=material.looks_of(rows["setting"]),
        tables=tuple(tables),
    )


GAINS = Kind(section=_section)


def _finding(rows: pd.DataFrame, labels: Iterable[str]) -> str:
    sentences = []
    for label in labels:
        values = by_length(rows, label)
        ends = dict.fromkeys(
            f"{signed(values[length])} at {length_text(length)}" for length in (min(values), max(values))
        )
        sentences.append(f"{in_words(label)}: {' and '.join(ends)}")
    return first_listed(sentences)


def _table(rows: pd.DataFrame, labels: Iterable[str], stem: str, caption: Caption) -> Table:
    lines = []
    for label in labels:
        values, lows, highs = (by_length(rows, label, numbers=end) for end in ("value", "ci95_low", "ci95_high"))
        cells: dict[int, Cell | str] = {
            length: Cell(f"{value:+.3f}", interval=interval(lows[length], highs[length], "+.3f"))
            for length, value in values.items()
        }
        lines.append((Cell(name=label), cells))
    return Table.by_length(
        lines,
        lengths=column_values(rows),
        stem=stem,
        caption=caption.title,
        explanation=caption.explanation,
        interval="95% interval",
        folded=f"Numbers: {caption.title}",
    )
