"""Differences in pairs between a context length and the training length: their figure, a table and a table's rows.

One number a curve: mean change of NLL beyond the training length, mean scores, effective lengths.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sbeval.reports.analyse.claims import LengthClaims
from sbeval.reports.analyse.findings import DOUBTFUL_WORDS, signed
from sbeval.reports.analyse.one_number import NLL_CHANGE, CurveNumber
from sbeval.reports.analyse.overview import DOUBTFUL
from sbeval.reports.analyse.panels import Panel, text_name
from sbeval.reports.figures.labels import SYMLOG_CONSTANT, Caption
from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.read.fields import in_words, length_text, listed
from sbeval.reports.section import Cell, Figure, Kind, Material, Row, Section, Table, interval, verdict
from sbeval.results.intervals import MINIMUM_CLUSTERS, change_text

_TOOLTIP = {
    "setting": "model",
    "length_text": "context",
    "value_text": "difference (nats per token)",
    "interval_text": "simultaneous 95% band",
    "clusters_text": "documents",
}
_UNEQUAL = 8.0
"""Largest differences of two models whose ratio is above this share no linear axis: the smaller would be flat."""
_NO_LENGTH = Cell(missing=True)
_SYMLOG_TICKS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def differences_figure(
    material: Material, panel: Panel, claims: Mapping[str, LengthClaims], *, wide: bool, folded: bool
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
        which = "Not every line has a band" if len(without) < len(claims) else "No bands"
        return f"{which}: they take {MINIMUM_CLUSTERS} documents, and {documents} scored at every length."
    doubt = f". {DOUBTFUL}: {DOUBTFUL_WORDS}" if any(claim.doubtful for claim in claims.values()) else ""
    return f"Bands: 95%, simultaneous over a line{doubt}."


def _finding(label: str, claim: LengthClaims) -> str:
    last = claim.differences[-1]
    number = signed(last.estimate) if math.isnan(last.low) else last.text
    number += f" {DOUBTFUL}" if claim.doubtful and not math.isnan(last.low) else ""
    return f"{in_words(label)} {number} nats at {length_text(last.context_length_tokens)}"


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
    """Returns the axis of a scale that is logarithmic away from zero, where one model's differences dwarf another's."""
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
    """Returns one model's differences as a second line below its numbers."""
    heading = Cell(f"difference to {length_text(claim.reference_tokens or 0)}", quiet=True)
    cells = _cells(claim)
    return Row((heading, *(cells.get(length, _NO_LENGTH) for length in lengths)), page_only=True)


def difference_table(panel: Panel, claims: Mapping[str, LengthClaims]) -> Table:
    """Returns the differences of all models as a table of the files."""
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
            text, side = text + (f" {DOUBTFUL}" if claim.doubtful else ""), verdict(item.low, item.high)
            cells[item.context_length_tokens] = Cell(text, interval=(low, high), verdict=side)
    return cells


def _section(material: Material) -> Section | None:
    """Returns None where no curve has two lengths to take an area between."""
    nll = [number for number in material.numbers if number.metric == NLL_CHANGE]
    scores = [number for number in material.numbers if number.metric != NLL_CHANGE]
    if not material.numbers:
        return None
    tables = (
        Table.of(
            ("model", "text", "lengths", "mean change (nats per token)", "effective length"),
            [_nll_row(number, material.results.model(number.setting).origin_length_tokens) for number in nll],
            stem="numbers-nll",
            caption="Mean change of NLL beyond the training length, and how far more context lowers NLL",
            interval="95% intervals",
        ),
        Table.of(
            ("model", "task", "lengths", "mean score"),
            [_score_row(number, material.results.model(number.setting).origin_length_tokens) for number in scores],
            stem="numbers-scores",
            caption="Mean score over octaves",
            interval="95% intervals",
        ),
    )
    return Section(
        identifier="numbers",
        title="One number a curve",
        lead=(
            "The area under each curve over log length, divided by its width, so that every octave weighs the same. "
            "For NLL: on identical targets, minus NLL at the training length; below zero is better. The effective "
            "length is the longest one whose own step lowers NLL measurably; its lower end counts every step that is "
            "not measurable as a loss, its upper end as a gain. Small print: in multiples of the training length."
        ),
        tables=tuple(table for table in tables if table.rows),
    )


NUMBERS = Kind(section=_section)


def _nll_row(number: CurveNumber, trained_at: int | None) -> tuple[Cell | str, ...]:
    area = number.area
    text = area.text + (f" {DOUBTFUL}" if area.doubtful else "")
    change = Cell(text, verdict=verdict(area.low, area.high))
    effective = "" if number.effective is None else number.effective.text
    reached = _times((number.effective.tokens,) if number.effective else (), trained_at)
    lengths = _lengths(number, trained_at)
    return Cell(name=number.setting), text_name(*number.text), lengths, change, Cell(effective, small=reached)


def _score_row(number: CurveNumber, trained_at: int | None) -> tuple[Cell | str, ...]:
    area = number.area
    mean = Cell(f"{area.estimate:.1%}", interval=interval(area.low, area.high, ".1%"))
    return Cell(name=number.setting), number.task, _lengths(number, trained_at), mean


def _lengths(number: CurveNumber, trained_at: int | None) -> Cell:
    ends = (number.area.from_tokens, number.area.to_tokens)
    return Cell(" to ".join(map(length_text, ends)), small=_times(ends, trained_at))


def _times(lengths: Sequence[int | None], trained_at: int | None) -> tuple[str, ...]:
    """Returns lengths in multiples of the training length as small print, nothing where one is unknown."""
    known = [f"{length / trained_at:g}\N{MULTIPLICATION SIGN}" for length in lengths if length and trained_at]
    return (" to ".join(known),) if known else ()
