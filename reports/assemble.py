"""From results to the report's summary and sections, before any page exists; a new kind is a line of `KINDS`."""

from pathlib import Path

from sbeval.reports.analyse.claims import all_claims
from sbeval.reports.analyse.findings import find
from sbeval.reports.analyse.one_number import curve_numbers, tabulate_numbers
from sbeval.reports.analyse.overview import HEADER, Overview, caveats, side_by_side
from sbeval.reports.analyse.ruler import apart, effective_sentences, filled_by, missing_tasks, rate_ruler
from sbeval.reports.analyse.selection import choose_baseline
from sbeval.reports.figures.theme import choose_looks
from sbeval.reports.kinds.answers import SAMPLES
from sbeval.reports.kinds.curves import CURVES
from sbeval.reports.kinds.needles import NEEDLES
from sbeval.reports.kinds.numbers import NUMBERS
from sbeval.reports.kinds.positions import POSITIONS
from sbeval.reports.kinds.recall import RECALL
from sbeval.reports.kinds.ruler import RULER
from sbeval.reports.kinds.runs import LEFT_OUT, PROVENANCE, SPEED
from sbeval.reports.kinds.spans import SPANS
from sbeval.reports.kinds.steps import STEPS
from sbeval.reports.kinds.suite import INPUTS, TABLES
from sbeval.reports.read.results import Results
from sbeval.reports.section import Cell, Material, Publish, Report, Table, row, texts

KINDS = (
    CURVES,
    POSITIONS,
    NEEDLES,
    RULER,
    RECALL,
    SPANS,
    STEPS,
    NUMBERS,
    INPUTS,
    SAMPLES,
    TABLES,
    SPEED,
    PROVENANCE,
    LEFT_OUT,
)
"""Every kind of measurement, in the order of the page."""
_CARDS_AT_MOST = 6


def assemble(results: Results, *, baseline: str | None, publish: Publish, folder: Path) -> Report:
    """Builds the summary and every section that the results allow.

    `baseline` is chosen where it is None; `folder` is where the page will stand, for links to the result files.
    """
    models = results.models
    claims = all_claims(results)
    training_lengths = {
        model.label: model.record.training_length_tokens for model in models if model.record.training_length_tokens
    }
    ruler = rate_ruler(results.measurements, training_lengths)
    numbers = curve_numbers(results, claims, ruler)
    material = Material(
        results=results,
        looks=choose_looks(models),
        training_lengths=training_lengths,
        baseline=choose_baseline(models, baseline),
        claims=claims,
        ruler=ruler,
        numbers=numbers,
        folder=folder,
        publish=publish,
    )
    sections = [kind.section(material) for kind in KINDS]
    overview = side_by_side(models, claims, numbers)
    missing = {label: missing_tasks(ruler.scores, label) for label in material.looks_of(ruler.scores["setting"])}
    many = len(models) > _CARDS_AT_MOST
    return Report(
        overview=overview.sentences,
        findings=tuple(find(models, claims, effective_sentences(ruler))),
        caveats=tuple(caveats(claims, missing, apart(ruler.scores), filled_by(models))),
        overview_table=_overview_table(overview, on_page=many),
        sections=tuple(section for section in sections if section is not None),
        looks=material.looks,
        counts=f"{_count(len(models), 'model')}, {_count(sum(len(model.runs) for model in models), 'run')}",
        cards_folded=many,
        numbers=tabulate_numbers(numbers),
        notes=results.notes,
    )


def _overview_table(overview: Overview, *, on_page: bool) -> Table | None:
    if not overview.rows:
        return None
    return Table(
        stem="overview",
        caption="On identical targets, side by side",
        header=texts(*HEADER),
        rows=tuple(row(Cell(name=label), cells) for label, *cells in overview.rows),
        interval="simultaneous 95% band",
        compact=True,
        on_page=on_page,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
