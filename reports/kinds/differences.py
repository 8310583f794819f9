"""Differences in pairs between a context length and the training length: their figure, a table and a table's rows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sbeval.reports.analyse.claims import LengthClaims, LengthDifference
from sbeval.reports.analyse.findings import DOUBTFUL_WORDS, difference_text, signed
from sbeval.reports.analyse.overview import DOUBTFUL
from sbeval.reports.analyse.panels import Panel
from sbeval.reports.figures.curves import training_marks
from sbeval.reports.figures.labels import SYMLOG_CONSTANT, Caption
from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import in_words, length_text, listed
from sbeval.reports.section import Cell, Figure, Material, Row, Table, row, texts
from sbeval.results.digits import change_text
from sbeval.results.intervals import MINIMUM_CLUSTERS

_TOOLTIP = {
    "setting": "model",
    "length_text": "context",
    "value_text": "difference (nats per token)",
    "interval_text": "simultaneous 95% band",
    "clusters_text": "documents",
}
_UNEQUAL = 8.0
"""Largest differences of two models whose ratio is above this share no linear axis: the smaller would be flat."""
_SYMLOG_TICKS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def differences_figure(
    material: Material,
    panel: Panel,
    claims: Mapping[str, LengthClaims],
    looks: Mapping[str, Look],
    *,
    wide: bool,
    folded: bool,
) -> Figure:
    """Returns the figure of a panel's differences; `claims` holds the models that have some."""
    reference = _reference(claims, material.training_lengths)
    words = "Below zero, the longer context helps."
    caption = Caption(
        title=f"{panel.title}: difference",
        finding=listed([_finding(label, claim) for label, claim in claims.items()]),
        explanation=f"NLL at a length minus NLL at {reference}, on the same targets. {words} {_bands(claims)}",
        subtitle=f"NLL minus NLL at {reference} on the same targets. {words}",
    )
    spec = _figure(claims, looks, material.training_lengths, caption)
    return material.figure({"nll": spec}, f"{panel.stem}-differences", caption, wide=wide, folded=folded)


def _reference(claims: Mapping[str, LengthClaims], training_lengths: Mapping[str, int]) -> str:
    """Returns what the differences are taken to, which is another length where the training length is not measured."""
    lengths = {claim.reference_tokens for claim in claims.values()}
    if all(claim.reference_tokens == training_lengths.get(label) for label, claim in claims.items()):
        return "the model's own training length"
    (length, *others) = lengths
    return "the length in each model's table row" if others or not length else length_text(length)


def _bands(claims: Mapping[str, LengthClaims]) -> str:
    without = [claim for claim in claims.values() if math.isnan(claim.differences[0].low)]
    if without:
        fewest = min(claim.clusters for claim in without)
        documents = "1 document was" if fewest == 1 else f"{fewest} documents were"
        return f"{'Not every line has a band' if len(without) < len(claims) else 'No bands'}: they take " + (
            f"{MINIMUM_CLUSTERS} documents, and {documents} scored at every length."
        )
    doubt = f". {DOUBTFUL}: {DOUBTFUL_WORDS}" if any(claim.doubtful for claim in claims.values()) else ""
    return f"Bands: 95%, simultaneous over a line{doubt}."


def _finding(label: str, claim: LengthClaims) -> str:
    last = claim.differences[-1]
    number = signed(last.estimate) if math.isnan(last.low) else difference_text(last)
    number += f" {DOUBTFUL}" if claim.doubtful and not math.isnan(last.low) else ""
    return f"{in_words(label)} {number} nats at {length_text(last.context_length_tokens)}"


def _figure(
    claims: Mapping[str, LengthClaims], looks: Mapping[str, Look], training_lengths: Mapping[str, int], caption: Caption
) -> dict[str, Any]:
    """Draws each model's differences with a point of zero at its reference."""
    order = [label for label in looks if label in claims]
    rows = [point for label in order for point in _points(label, claims[label])]
    lengths = [point["x"] for point in rows]
    scale = _y_scale(rows, order)
    return line_figure(
        rows,
        caption,
        axes=Axes(
            x_title="context length (tokens, log scale)",
            x_domain=(min(lengths), max(lengths)),
            y_title=f"difference in NLL (nats per token{', stretched near 0' if scale else ''})",
            levels={0.0: ""},
            **scale,
        ),
        looks={label: looks[label] for label in order},
        marks=training_marks(training_lengths, order),
        tooltip=_TOOLTIP,
    )


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


def _y_scale(rows: Sequence[Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """Returns the axis of a scale that is logarithmic away from zero, where one model's differences dwarf another's."""
    largest = [max(abs(row["y"]) for row in rows if row["setting"] == label) for label in order]
    if max(largest) < _UNEQUAL * max(min(largest), SYMLOG_CONSTANT):
        return {}
    values = [row[key] for row in rows for key in ("y", "low", "high") if row[key] is not None]
    low, high = 1.15 * min(values), 1.15 * max(values)
    every = sorted((0.0, *_SYMLOG_TICKS, *(-tick for tick in _SYMLOG_TICKS)))
    ticks = tuple(tick for tick in every if low <= tick <= high)
    return {"y_scale": "symlog", "y_domain": (low, high), "y_values": ticks, "y_format": "~g"}


def difference_row(claim: LengthClaims, lengths: Sequence[int]) -> Row:
    """Returns one model's differences as a second line below its numbers."""
    words = f"difference to {length_text(claim.reference_tokens)}" if claim.reference_tokens else "difference"
    return row(Cell(words, quiet=True), _cells(claim, lengths), page_only=True)


def difference_table(panel: Panel, claims: Mapping[str, LengthClaims]) -> Table:
    """Returns the differences of all models as a table of the files."""
    lengths = sorted({length for claim in claims.values() for length in claim.lengths})
    rows = []
    for label, claim in claims.items():
        reference = length_text(claim.reference_tokens) if claim.reference_tokens else ""
        rows.append(row(Cell(f" (to {reference})", name=label), _cells(claim, lengths)))
    return Table(
        stem=f"{panel.stem}-differences",
        caption=f"{panel.title}: paired NLL difference to the length in parentheses",
        header=texts("model", *map(length_text, lengths)),
        rows=tuple(rows),
        interval="simultaneous 95% band",
        on_page=False,
    )


def _cells(claim: LengthClaims, lengths: Sequence[int]) -> list[Cell]:
    known = {item.context_length_tokens: _cell(item, doubtful=claim.doubtful) for item in claim.differences}
    return [known.get(length, Cell(missing=True)) for length in lengths]


def _cell(difference: LengthDifference, *, doubtful: bool) -> Cell:
    shown = not math.isnan(difference.low)
    text, low, high = change_text(difference.estimate, difference.low, difference.high)
    return Cell(
        text + (f" {DOUBTFUL}" if doubtful and shown else ""),
        interval=(low, high) if shown else None,
        verdict="better" if difference.high < 0 else "worse" if difference.low > 0 else None,
    )
