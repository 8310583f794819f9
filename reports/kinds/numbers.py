"""One number a curve: mean change of NLL beyond the training length, mean scores, effective lengths."""

import math

from sbeval.reports.analyse.one_number import NLL_CHANGE, CurveNumber
from sbeval.reports.analyse.overview import DOUBTFUL
from sbeval.reports.analyse.panels import CORPUS_WORDS
from sbeval.reports.read.fields import length_text
from sbeval.reports.section import Cell, Kind, Material, Row, Section, Table, row, texts


def _section(material: Material) -> Section | None:
    """Returns None where no curve has two lengths to take an area between."""
    nll = [number for number in material.numbers if number.metric == NLL_CHANGE]
    scores = [number for number in material.numbers if number.metric != NLL_CHANGE]
    if not material.numbers:
        return None
    tables = (
        Table(
            stem="numbers-nll",
            caption="Mean change of NLL beyond the training length, and how far more context lowers NLL",
            header=texts("model", "text", "lengths", "mean change (nats per token)", "effective length"),
            rows=tuple(map(_nll_row, nll)),
            interval="95% intervals",
        ),
        Table(
            stem="numbers-scores",
            caption="Mean score over octaves",
            header=texts("model", "task", "lengths", "mean score"),
            rows=tuple(map(_score_row, scores)),
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
            "not measurable as a loss, its upper end as a gain."
        ),
        tables=tuple(table for table in tables if table.rows),
    )


NUMBERS = Kind(section=_section)


def _nll_row(number: CurveNumber) -> Row:
    area = number.area
    text = area.text + (f" {DOUBTFUL}" if area.doubtful else "")
    change = Cell(text, verdict="better" if area.high < 0 else "worse" if area.low > 0 else None)
    effective = "" if number.effective is None else number.effective.text
    return row(
        Cell(name=number.setting), [CORPUS_WORDS.get(number.corpus, number.corpus), _lengths(number), change, effective]
    )


def _score_row(number: CurveNumber) -> Row:
    area = number.area
    ends = None if math.isnan(area.low) else (f"{area.low:.1%}", f"{area.high:.1%}")
    return row(Cell(name=number.setting), [number.task, _lengths(number), Cell(f"{area.estimate:.1%}", interval=ends)])


def _lengths(number: CurveNumber) -> str:
    return f"{length_text(number.area.from_tokens)} to {length_text(number.area.to_tokens)}"
