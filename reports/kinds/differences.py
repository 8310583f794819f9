"""Figures and tables of paired differences of NLL on the same target tokens.

Differences between each context length and the training length are shown in the section of `curves` as a figure and
table rows, and in exported files as a table. Differences between two conditions, such as with and without context, have
a separate section, "The same targets under other conditions".

If one model's differences are much larger than another's, the y axis is symlog. On a linear axis, NLL that falls by 0.1
nats would look like a flat line beside NLL that rises by 3.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.reports.analyse.claims import LengthClaims
from sbeval.reports.analyse.findings import DOUBTFUL_TEXT, signed
from sbeval.reports.analyse.panels import CORPUS_NAMES, Panel, safe_stem
from sbeval.reports.analyse.protocols import difference_text
from sbeval.reports.analyse.ruler import by_length
from sbeval.reports.analyse.verdicts import DOUBTFUL
from sbeval.reports.figures.labels import SYMLOG_CONSTANT, Caption
from sbeval.reports.figures.lines import COUNTED, SCORE_TOOLTIP, Axes, length_figure, line_figure
from sbeval.reports.read.fields import first_listed, length_text, listed, quote_name
from sbeval.reports.read.results import column_values
from sbeval.reports.section import Cell, Figure, Kind, Material, Row, Section, Table, interval, verdict
from sbeval.results.intervals import MINIMUM_CLUSTERS, change_text
from sbeval.results.records import IDENTICAL_TARGETS

_TOOLTIP = {
    "setting": "model",
    "length_text": "context",
    "value_text": "difference (nats per token)",
    "interval_text": "simultaneous 95% band",
    "clusters_text": "documents",
}
_UNEQUAL = 8.0
"""The y axis is symlog if one model's largest difference is at least this many times that of another model."""
_NO_LENGTH = Cell(missing=True)
_SYMLOG_TICKS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_GAIN = "gain_over_"
_CONDITIONS = {
    "without": ("what the context is worth", "NLL of the same targets without any context, minus NLL with it."),
    "blocks": (
        "cost of riffled documents",
        "NLL after each document in one block, minus NLL after the same tokens riffled: below zero, riffling costs.",
    ),
    "replaced": (
        "finding its own document again",
        "NLL with another document in place of the target's own, minus NLL with the own one, both riffled: above zero, "
        "the model finds its document.",
    ),
}
"""Name of a condition, as in the name of a metric, to (title of the figure, which NLL is subtracted from which)."""


def differences_figure(
    material: Material, panel: Panel, claims: Mapping[str, LengthClaims], *, wide: bool, folded: bool
) -> Figure:
    """Returns the figure of NLL differences to the training length.

    Args:
        material: the report's data.
        panel: the panel of curves that the differences belong to.
        claims: model label to the `LengthClaims` that hold the differences; models without differences are absent.
        wide: whether the figure takes the whole width of the page.
        folded: whether the page shows the figure only after a click.
    """
    reference, lacking = _references(material, claims)
    how_to_read = _reading(panel.protocol, claims)
    caption = Caption(
        title=f"{panel.title}: difference",
        finding=listed([_finding(label, claim) for label, claim in claims.items()]),
        explanation=(
            f"NLL at a length minus NLL at {reference}, on the same targets.{lacking} {how_to_read} {_bands(claims)}"
        ),
        subtitle=f"NLL minus NLL at {reference} on the same targets. {difference_text(panel.protocol).brief}",
    )
    looks = material.looks_of(panel.labels)
    rows = [point for label in looks if label in claims for point in _points(label, claims[label])]
    lengths = [point["x"] for point in rows]
    scale = _y_scale(rows)
    axes = Axes(
        x_title="context length (tokens, log scale)",
        x_domain=(min(lengths), max(lengths)),
        y_title=f"difference in NLL (nats per token{', stretched near 0' if scale else ''})",
        levels={0.0: ""},
        **scale,
    )
    spec = line_figure(rows, caption, axes=axes, looks=looks, tooltip=_TOOLTIP)
    return material.figure({"nll": spec}, f"{panel.stem}-differences", caption, wide=wide, folded=folded)


def _references(material: Material, claims: Mapping[str, LengthClaims]) -> tuple[str, str]:
    """Returns, in words, the length whose NLL is subtracted, and a sentence on models for which it is another one.

    Normally it is the training length. For a model that was not run at its training length, NLL at the longest shorter
    length is subtracted. The difference is then zero at that length and not at the training length, so the sentence
    names the length. The sentence is empty if it is not needed.
    """
    origins = {label: material.results.model(label).origin_length_tokens for label in claims}
    at_other_length = [label for label, claim in claims.items() if claim.reference_tokens != origins[label]]
    if not at_other_length:
        return "the model's own training length", ""
    if len(lengths := {claim.reference_tokens or 0 for claim in claims.values()}) == 1:
        return length_text(lengths.pop()), ""
    places = [
        f"at {length_text(claims[label].reference_tokens or 0)} for {quote_name(label)}" for label in at_other_length
    ]
    reason = "the longest length compared that is within the training length"
    return (
        "the training length, or a shorter one",
        f" The difference is zero {first_listed(places).rstrip('.')}: {reason}.",
    )


def _reading(protocol: str, claims: Mapping[str, LengthClaims]) -> str:
    """Returns what differences show at lengths longer, and at lengths shorter, than the length that is subtracted.

    Only the sentences for lengths that are in the figure are returned.
    """
    by_side = difference_text(protocol)
    sides = {
        item.context_length_tokens > (claim.reference_tokens or 0)
        for claim in claims.values()
        for item in claim.differences
    }
    sentences = [
        by_side.longer if True in sides else "",
        by_side.shorter if False in sides else "",
    ]
    return " ".join(filter(None, sentences))


def _bands(claims: Mapping[str, LengthClaims]) -> str:
    without = [claim for claim in claims.values() if math.isnan(claim.differences[0].low)]
    if without:
        fewest = min(claim.clusters for claim in without)
        documents = "1 document was" if fewest == 1 else f"{fewest} documents were"
        which = "Not every line has a band" if len(without) < len(claims) else "No bands"
        return f"{which}: they need {MINIMUM_CLUSTERS} documents, and {documents} scored at every length."
    doubt = f". {DOUBTFUL}: {DOUBTFUL_TEXT}" if any(claim.doubtful for claim in claims.values()) else ""
    return f"Bands: 95%, simultaneous over a line{doubt}."


def _finding(label: str, claim: LengthClaims) -> str:
    last = claim.differences[-1]
    number = signed(last.estimate) if math.isnan(last.low) else last.text
    if claim.doubtful and not math.isnan(last.low):
        number += f" {DOUBTFUL}"
    return f"{quote_name(label)} {number} nats at {length_text(last.context_length_tokens)}"


def _points(label: str, claim: LengthClaims) -> list[dict[str, Any]]:
    reference = claim.reference_tokens or 0
    shared = {"setting": label, "clusters_text": f"{claim.clusters:,}"}
    zero = {"x": reference, "y": 0.0, "value_text": "0, the length compared with", "interval_text": "none"}
    banded = not all(math.isnan(item.low) for item in claim.differences)
    rows: list[dict[str, Any]] = [zero | dict.fromkeys(("low", "high"), 0.0 if banded else None)]
    for item in claim.differences:
        text, low, high = change_text(item.estimate, item.low, item.high)
        band = {"low": item.low, "high": item.high, "value_text": text, "interval_text": f"{low} to {high}"}
        if math.isnan(item.low):
            band |= {"low": None, "high": None, "interval_text": "none: too few documents"}
        rows.append({"x": item.context_length_tokens, "y": item.estimate, **band})
    against = length_text(reference)
    every = [shared | point | {"length_text": f"{point['x']:,} tokens, against {against}"} for point in rows]
    return sorted(every, key=lambda point: point["x"])


def _y_scale(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns fields of `Axes` for a symlog y axis if one model's differences are much larger than another's.

    Otherwise the dictionary is empty.
    """
    labels = {row["setting"] for row in rows}
    largest = [max(abs(row["y"]) for row in rows if row["setting"] == label) for label in labels]
    if max(largest) < _UNEQUAL * max(min(largest), SYMLOG_CONSTANT):
        return {}
    values = [row[key] for row in rows for key in ("y", "low", "high") if row[key] is not None]
    low, high = 1.15 * min(values), 1.15 * max(values)
    every = sorted((0.0, *_SYMLOG_TICKS, *(-tick for tick in _SYMLOG_TICKS)))
    ticks = tuple(tick for tick in every if low <= tick <= high)
    return {"y_scale": "symlog", "y_domain": (low, high), "y_values": ticks, "y_format": "~g"}


def difference_row(claim: LengthClaims, lengths: Sequence[int]) -> Row:
    """Returns the table row that the page shows below a model's numbers: its differences of NLL by context length."""
    heading = Cell(f"difference to {length_text(claim.reference_tokens or 0)}", quiet=True)
    cells = _cells(claim)
    return Row((heading, *(cells.get(length, _NO_LENGTH) for length in lengths)), page_only=True)


def difference_table(panel: Panel, claims: Mapping[str, LengthClaims]) -> Table:
    """Returns the differences of NLL of all models as a table for the exported files; the page does not show it."""
    references = {label: length_text(claim.reference_tokens or 0) for label, claim in claims.items()}
    return Table.by_length(
        [(Cell(f" (to {references[label]})", name=label), _cells(claim)) for label, claim in claims.items()],
        lengths=sorted({length for claim in claims.values() for length in claim.lengths}),
        lacking=_NO_LENGTH,
        stem=f"{panel.stem}-differences",
        caption=f"{panel.title}: paired NLL difference to the length in parentheses",
        interval="simultaneous 95% band",
        on_page=False,
    )


def _cells(claim: LengthClaims) -> dict[int, Cell]:
    cells = {}
    for item in claim.differences:
        text, low, high = change_text(item.estimate, item.low, item.high)
        cells[item.context_length_tokens] = Cell(text)
        if not math.isnan(item.low):
            text = text + (f" {DOUBTFUL}" if claim.doubtful else "")
            side = verdict(item.low, item.high)
            cells[item.context_length_tokens] = Cell(text, interval=(low, high), verdict=side)
    return cells


def _section(material: Material) -> Section | None:
    """Builds the section "The same targets under other conditions"; None if no task scored a second condition."""
    measured = material.results.measurements
    rows = measured[measured["metric"].isin([_GAIN + condition for condition in _CONDITIONS])]
    rows = rows[rows["protocol"].isin(IDENTICAL_TARGETS)]
    if rows.empty:
        return None
    figures: list[Figure] = []
    tables: list[Table] = []
    for (task, metric), of_task in rows.groupby(["task", "metric"], sort=False):
        condition_title, explanation = _CONDITIONS[str(metric).removeprefix(_GAIN)]
        looks = material.looks_of(of_task["setting"])
        corpus = str(of_task["corpus"].iloc[0])
        caption = Caption(
            title=f"{CORPUS_NAMES.get(corpus, corpus)}, {of_task['protocol'].iloc[0]}: {condition_title}",
            finding=_gain_finding(of_task, looks),
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
        tables.append(_gain_table(of_task, looks, stem, caption))
    return Section(
        identifier="gains",
        title="The same targets under other conditions",
        lead="Paired differences of NLL in nats per token. Bands: 95% intervals over source documents.",
        figures=tuple(figures),
        legend=material.looks_of(rows["setting"]),
        tables=tuple(tables),
    )


GAINS = Kind(section=_section)


def _gain_finding(rows: pd.DataFrame, labels: Iterable[str]) -> str:
    sentences = []
    for label in labels:
        values = by_length(rows, label)
        ends = dict.fromkeys(
            f"{signed(values[length])} at {length_text(length)}" for length in (min(values), max(values))
        )
        sentences.append(f"{quote_name(label)}: {' and '.join(ends)}")
    return first_listed(sentences)


def _gain_table(rows: pd.DataFrame, labels: Iterable[str], stem: str, caption: Caption) -> Table:
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
