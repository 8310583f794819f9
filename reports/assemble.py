"""Turns the tidy table into the report's sections, findings and caveats, before any page exists."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from sbeval.reports.analyse.caveats import caveats
from sbeval.reports.analyse.claims import LengthClaims, length_claims
from sbeval.reports.analyse.findings import Finding, find
from sbeval.reports.analyse.overview import Overview, side_by_side
from sbeval.reports.analyse.panels import Panel, perplexity_panels
from sbeval.reports.analyse.ruler import missing_tasks, ruler_scores
from sbeval.reports.analyse.selection import choose_baseline
from sbeval.reports.analyse.suite import suite_rows
from sbeval.reports.figures.theme import Look, within
from sbeval.reports.figures.theme import looks as choose_looks
from sbeval.reports.read.results import Results
from sbeval.reports.sections.curves import curves_section
from sbeval.reports.sections.inputs import inputs_section
from sbeval.reports.sections.needles import needles_section
from sbeval.reports.sections.positions import positions_section
from sbeval.reports.sections.provenance import notes_section, provenance_section
from sbeval.reports.sections.recall import recall_section
from sbeval.reports.sections.ruler import effective_lengths, effective_sentences, ruler_section
from sbeval.reports.sections.section import Publish, Section
from sbeval.reports.sections.spans import spans_section
from sbeval.reports.sections.speed import speed_section
from sbeval.reports.sections.tables import tables_section

ClaimKey = tuple[str, str, str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a page and a Markdown file are written from.

    Attributes:
        overview: what all models show side by side.
        findings: what is said about each model.
        caveats: what a reader must know about all of it.
        sections: the sections in order.
        looks: how each model is drawn.
        counts: how many models and runs.
        claims: (model label, corpus, protocol) to what its lengths show.
        panels: the panels of the curves.
    """

    overview: Overview
    findings: tuple[Finding, ...]
    caveats: tuple[str, ...]
    sections: tuple[Section, ...]
    looks: Mapping[str, Look]
    counts: str
    claims: Mapping[ClaimKey, LengthClaims]
    panels: tuple[Panel, ...]


def assemble(results: Results, *, baseline: str | None, publish: Publish, folder: Path) -> Report:
    """Builds every section that the results allow.

    Args:
        results: the tidy table.
        baseline: model that differences are taken against, None to choose.
        publish: writes a figure's image files.
        folder: where the page will stand, for links to the result files.
    """
    looks = choose_looks(results.models)
    base = choose_baseline(results.models, baseline)
    training_lengths = {
        model.label: model.record.training_length_tokens
        for model in results.models
        if model.record.training_length_tokens
    }
    claims = all_claims(results)
    panels = perplexity_panels(results.measurements, results.models)
    scores = ruler_scores(results.measurements)
    ruler_words = effective_sentences(effective_lengths(scores, training_lengths), scores)
    parents = {model.label: model.parent for model in results.models if model.parent}
    measured = within(looks, list(dict.fromkeys(scores["setting"])), parents)
    positioned = within(looks, list(dict.fromkeys(results.positions["setting"])), parents)
    recall_rows = results.measurements[results.measurements["family"] == "recall"]
    recalling = within(looks, list(dict.fromkeys(recall_rows["setting"])), parents)
    spanning = within(looks, list(dict.fromkeys(results.spans["setting"])), parents)
    ordinary = suite_rows(results)
    answering = within(looks, list(dict.fromkeys(label for row in ordinary for label in row.cells)), parents)
    sections = [
        curves_section(
            panels, looks=looks, parents=parents, training_lengths=training_lengths, claims=claims, publish=publish
        ),
        positions_section(
            results.positions,
            results.position_sums,
            looks=positioned,
            training_lengths=training_lengths,
            rope_scalings={model.label: model.record.rope_scaling for model in results.models},
            baseline=base,
            publish=publish,
        ),
        needles_section(results.needles, results.models, publish),
        ruler_section(
            scores,
            results.samples,
            looks=measured,
            training_lengths=training_lengths,
            baseline=base,
            publish=publish,
        ),
        recall_section(results.measurements, looks=recalling, training_lengths=training_lengths, publish=publish),
        spans_section(results.spans, looks=spanning, training_lengths=training_lengths, publish=publish),
        inputs_section(ordinary, looks=answering, training_lengths=training_lengths, publish=publish),
        tables_section(results, ordinary, base),
        speed_section(results.models),
        provenance_section(results.models, folder),
        notes_section(results.notes, folder),
    ]
    runs = sum(len(model.runs) for model in results.models)
    return Report(
        overview=side_by_side(results.models, claims),
        findings=tuple(find(results.models, claims, ruler_words)),
        caveats=tuple(caveats(claims, {label: missing_tasks(scores, label) for label in measured})),
        sections=tuple(section for section in sections if section is not None),
        looks=looks,
        counts=f"{_count(len(results.models), 'model')}, {_count(runs, 'run')}",
        claims=claims,
        panels=tuple(panels),
    )


def all_claims(results: Results) -> dict[ClaimKey, LengthClaims]:
    """Returns what the lengths show for every (model label, corpus, protocol)."""
    claims: dict[ClaimKey, LengthClaims] = {}
    rows = results.measurements[results.measurements["family"] == "perplexity"]
    for label, task, corpus, protocol in dict.fromkeys(
        rows[["setting", "task", "corpus", "protocol"]].itertuples(index=False, name=None)
    ):
        if protocol == "position":
            continue
        sums = results.documents.get((label, task))
        trained = results.model(label).record.training_length_tokens
        claims[label, corpus, protocol] = length_claims(sums, trained)
    return claims


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
