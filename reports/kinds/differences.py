"""Differences in pairs between a context length and the training length: their figure, a table and a table's rows."""

import math
from collections.abc import Mapping, Sequence

from sbeval.reports.analyse.claims import LengthClaims, LengthDifference
from sbeval.reports.analyse.findings import DOUBTFUL_WORDS, difference_text, signed
from sbeval.reports.analyse.names import in_words
from sbeval.reports.analyse.overview import DOUBTFUL
from sbeval.reports.analyse.panels import Panel
from sbeval.reports.figures.differences import difference_figure
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import length_text
from sbeval.reports.section import Figure, Material, listed
from sbeval.reports.table import Cell, Row, Table, row, texts
from sbeval.results.digits import change_text
from sbeval.results.intervals import MINIMUM_CLUSTERS


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
    title = f"{panel.title}: difference"
    finding = listed([_finding(label, claim) for label, claim in claims.items()])
    words = "Below zero, the longer context helps."
    reference = _reference(claims, material.training_lengths)
    spec = difference_figure(
        claims,
        looks=looks,
        training_lengths=material.training_lengths,
        title=title,
        subtitle=f"NLL minus NLL at {reference} on the same targets. {words}",
        description=f"{title}. {finding}",
    )
    explanation = f"NLL at a length minus NLL at {reference}, on the same targets. {words}"
    return material.figure(
        {"nll": spec},
        f"{panel.stem}-differences",
        title=title,
        finding=finding,
        explanation=f"{explanation} {_bands(list(claims.values()))}",
        wide=wide,
        folded=folded,
    )


def _reference(claims: Mapping[str, LengthClaims], training_lengths: Mapping[str, int]) -> str:
    """Returns what the differences are taken to, which is another length where the training length is not measured."""
    lengths = {claim.reference_tokens for claim in claims.values()}
    if all(claim.reference_tokens == training_lengths.get(label) for label, claim in claims.items()):
        return "the model's own training length"
    (length, *others) = lengths
    return "the length in each model's table row" if others or not length else length_text(length)


def _bands(claims: Sequence[LengthClaims]) -> str:
    without = [claim for claim in claims if math.isnan(claim.differences[0].low)]
    if without:
        fewest = min(claim.clusters for claim in without)
        documents = "1 document was" if fewest == 1 else f"{fewest} documents were"
        return f"{'Not every line has a band' if len(without) < len(claims) else 'No bands'}: they take " + (
            f"{MINIMUM_CLUSTERS} documents, and {documents} scored at every length."
        )
    doubt = f". {DOUBTFUL}: {DOUBTFUL_WORDS}" if any(claim.doubtful for claim in claims) else ""
    return f"Bands: 95%, simultaneous over a line{doubt}."


def _finding(label: str, claim: LengthClaims) -> str:
    last = claim.differences[-1]
    found = signed(last.estimate) if math.isnan(last.low) else difference_text(last)
    found += f" {DOUBTFUL}" if claim.doubtful and not math.isnan(last.low) else ""
    return f"{in_words(label)} {found} nats at {length_text(last.context_length_tokens)}"


def difference_row(claim: LengthClaims, lengths: Sequence[int]) -> Row:
    """Returns one model's differences as a second line below its numbers."""
    words = f"difference to {length_text(claim.reference_tokens)}" if claim.reference_tokens else "difference"
    return row(Cell(words, quiet=True), _difference_cells(claim, lengths), page_only=True)


def _difference_cells(claim: LengthClaims, lengths: Sequence[int]) -> list[Cell]:
    found = {item.context_length_tokens: _difference_cell(item, doubtful=claim.doubtful) for item in claim.differences}
    return [found.get(length, Cell(missing=True)) for length in lengths]


def _difference_cell(found: LengthDifference, *, doubtful: bool) -> Cell:
    shown = not math.isnan(found.low)
    text, low, high = change_text(found.estimate, found.low, found.high)
    return Cell(
        text + (f" {DOUBTFUL}" if doubtful and shown else ""),
        interval=(low, high) if shown else None,
        verdict="better" if found.high < 0 else "worse" if found.low > 0 else None,
    )


def difference_table(panel: Panel, compared: Mapping[str, LengthClaims]) -> Table:
    """Returns the differences of all models as a table of the files."""
    lengths = sorted({length for claim in compared.values() for length in claim.lengths})
    rows = [
        row(
            Cell(f" (to {length_text(claim.reference_tokens) if claim.reference_tokens else ''})", name=label),
            _difference_cells(claim, lengths),
        )
        for label, claim in compared.items()
    ]
    return Table(
        stem=f"{panel.stem}-differences",
        caption=f"{panel.title}: paired NLL difference to the length in parentheses",
        header=texts("model", *map(length_text, lengths)),
        rows=tuple(rows),
        interval="simultaneous 95% band",
        on_page=False,
    )
