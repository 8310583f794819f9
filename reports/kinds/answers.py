"""The section of single samples: what documents lost or gained, and what was asked, expected and answered."""

from collections.abc import Mapping, Sequence

import numpy as np

from sbeval.reports.analyse.panels import CORPUS_WORDS, safe_stem
from sbeval.reports.read.answers import ANSWERS, Answer
from sbeval.reports.read.fields import length_text, shown_name
from sbeval.reports.read.samples import DOCUMENT_SUMS
from sbeval.reports.section import Kind, Material, Section
from sbeval.reports.table import NOT_MEASURED, Cell, Row, Table, row, texts
from sbeval.results.digits import change_text, decimals

_MODELS_AT_MOST = 6
_DOCUMENTS_AT_EITHER_END = 4


def samples_section(material: Material) -> Section | None:
    """Builds the section, None where no samples were logged that can be shown."""
    tables = [*_document_tables(material), *_answer_tables(material)]
    if not tables:
        return None
    return Section(
        identifier="samples",
        title="Samples",
        lead="Single documents and answers, from the logged samples: examples to look at, no measurements.",
        tables=tuple(tables),
    )


def _document_tables(material: Material) -> list[Table]:
    """Returns, for every text with identical targets, the documents whose NLL falls and rises most."""
    tables = []
    for corpus in dict.fromkeys(key[1] for key in material.claims if key[2] == "fixed_target"):
        changes = {label: own for label in material.looks if (own := _changes(material, label, corpus))}
        if not changes:
            continue
        labels = list(changes)[:_MODELS_AT_MOST]
        shared = set.intersection(*(set(changes[label]) for label in labels))
        order = sorted(shared, key=lambda name: (float(np.mean([changes[label][name][0] for label in labels])), name))
        ends = (
            order
            if len(order) <= 2 * _DOCUMENTS_AT_EITHER_END
            else [
                *order[:_DOCUMENTS_AT_EITHER_END],
                *order[-_DOCUMENTS_AT_EITHER_END:],
            ]
        )
        words = f"{CORPUS_WORDS.get(corpus, corpus)}, single documents"
        tables.append(
            Table(
                stem=f"documents-{safe_stem(corpus)}",
                caption=f"{words}: NLL at the longest context minus NLL at the training length",
                header=texts("document", *(Cell(name=label) for label in labels)),
                rows=tuple(_document_row(name, [changes[label][name] for label in labels]) for name in ends),
                explanation=(
                    "Nats per token on the same targets; below zero, the longer context helps. Small print: NLL at "
                    f"both lengths. {len(ends)} of {len(order)} documents, from the largest fall to the largest rise."
                ),
                folded=words,
            )
        )
    return tables


def _changes(material: Material, label: str, corpus: str) -> dict[str, tuple[float, str]]:
    """Returns a model's documents with the difference, and both NLLs as text; nothing without a training length."""
    claim = material.claims.get((label, corpus, "fixed_target"))
    if claim is None or claim.reference_tokens is None or max(claim.lengths) == claim.reference_tokens:
        return {}
    rows = material.results.measurements
    own = rows[(rows["setting"] == label) & (rows["corpus"] == corpus) & (rows["protocol"] == "fixed_target")]
    sums = material.results[DOCUMENT_SUMS].get((label, str(own["task"].iloc[0])))
    if sums is None:
        return {}
    columns = [sums.lengths.index(claim.reference_tokens), sums.lengths.index(max(claim.lengths))]
    found = {}
    for place, name in enumerate(sums.clusters):
        tokens = sums.tokens[place, columns]
        if tokens[0] == tokens[1] > 0:
            before, after = sums.nll_nats[place, columns] / tokens
            lengths = [length_text(sums.lengths[column]) for column in columns]
            digits = decimals(after - before, least=2)
            found[shown_name(name)] = (
                float(after - before),
                f"{before:.{digits}f} at {lengths[0]}, {after:.{digits}f} at {lengths[1]}",
            )
    return found


def _document_row(name: str, changes: Sequence[tuple[float, str]]) -> Row:
    return row(Cell(name=name), [Cell(change_text(change)[0], small=(words,)) for change, words in changes])


def _answer_tables(material: Material) -> list[Table]:
    found = material.results[ANSWERS]
    tables = []
    for task in dict.fromkeys(task for _, task in found):
        own = {label: found[label, task] for label in material.looks if (label, task) in found}
        labels = list(own)[:_MODELS_AT_MOST]
        tables.append(
            Table(
                stem=f"answers-{safe_stem(task)}",
                caption=f"{task}: the first samples",
                header=texts("end of the prompt", "context", "expected", *(Cell(name=label) for label in labels)),
                rows=tuple(_answer_rows({label: own[label] for label in labels})),
                explanation="Answers by their beginning, on one line; coloured by the sample's score.",
                folded=f"{task}: what was asked and answered",
                prose=True,
            )
        )
    return tables


def _answer_rows(answers: Mapping[str, Sequence[Answer]]) -> list[Row]:
    """Returns a row for each sample at its shortest and its longest context."""
    by_place = {
        label: {(one.sample, one.context_length_tokens or 0): one for one in own} for label, own in answers.items()
    }
    rows = []
    for sample in sorted({place[0] for own in by_place.values() for place in own}):
        lengths = sorted({length for own in by_place.values() for number, length in own if number == sample})
        for length in dict.fromkeys((lengths[0], lengths[-1])):
            shown = [own.get((sample, length)) for own in by_place.values()]
            first = next(one for one in shown if one is not None)
            cells = [Cell(length_text(length) if length else "whole"), Cell(first.expected), *map(_answer_cell, shown)]
            heading = first.question if length == lengths[0] else "the same, in a longer text"
            rows.append(row(Cell(heading, quiet=True), cells))
    return rows


def _answer_cell(answer: Answer | None) -> Cell:
    if answer is None:
        return NOT_MEASURED
    text, score = answer.text or "(nothing)", answer.score
    right, wrong = score is not None and score >= 1, score is not None and score <= 0
    return Cell(text, verdict="better" if right else "worse" if wrong else None, quiet=not answer.text)


KIND = Kind(section=samples_section, readers=(ANSWERS,))
