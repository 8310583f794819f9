"""The section on perplexity against context length: panels, and the numbers behind them as tables."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sbeval.reports.analyse.claims import ClaimKey, LengthClaims
from sbeval.reports.analyse.findings import DOUBTFUL_WORDS
from sbeval.reports.analyse.names import in_words
from sbeval.reports.analyse.overview import DOUBTFUL
from sbeval.reports.analyse.panels import PROTOCOL_WORDS, Panel, perplexity_panels
from sbeval.reports.figures.curves import METRIC_WORDS, METRICS, curve_figure
from sbeval.reports.figures.theme import Look
from sbeval.reports.kinds.differences import difference_row, difference_table, differences_figure
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.results import by_model
from sbeval.reports.section import Figure, Kind, Material, Section, listed
from sbeval.reports.table import NOT_MEASURED, Cell, Table, row, texts
from sbeval.results.intervals import MINIMUM_CLUSTERS

_SIDE_BY_SIDE_LINES = 6


def curves_section(material: Material) -> Section | None:
    """Builds the section, None where no perplexity was measured against context length."""
    panels = perplexity_panels(material.results.measurements, material.results.models)
    if not panels:
        return None
    looks = [material.looks_of(panel.labels) for panel in panels]
    metrics = [metric for metric in METRIC_WORDS if any(metric in panel.tables for panel in panels)]
    return Section(
        identifier="curves",
        title="Perplexity against context length",
        lead=_lead(panels),
        figures=tuple(
            figure
            for place, (panel, own) in enumerate(zip(panels, looks, strict=True))
            for figure in _figures(material, panel, own, first=place == 0)
        ),
        metrics={metric: METRIC_WORDS[metric] for metric in metrics},
        legend=_legend(material.looks, looks),
        tables=tuple(table for panel in panels for table in _tables(panel, material.claims)),
    )


def _figures(material: Material, panel: Panel, looks: Mapping[str, Look], *, first: bool) -> list[Figure]:
    """Returns the curves and, where lengths were compared in pairs, the differences beside them."""
    wide = len(panel.labels) > _SIDE_BY_SIDE_LINES
    curves = _curve_figure(material, panel, looks, wide=wide)
    own = {label: panel_claim(material.claims, panel, label) for label in panel.labels}
    claims = {label: claim for label, claim in own.items() if claim.differences}
    if not claims:
        return [curves]
    return [curves, differences_figure(material, panel, claims, looks, wide=wide, folded=wide and not first)]


def _curve_figure(material: Material, panel: Panel, looks: Mapping[str, Look], *, wide: bool) -> Figure:
    findings = {metric: panel_finding(panel, material.training_lengths, metric) for metric in panel.tables}
    words = PROTOCOL_WORDS.get(panel.protocol, "")
    variants = {
        metric: curve_figure(
            rows,
            metric=metric,
            looks=looks,
            training_lengths=material.training_lengths,
            title=panel.title,
            subtitle=words,
            description=f"{panel.title}. {findings[metric]}",
        )
        for metric, rows in panel.tables.items()
    }
    first = next(iter(variants))
    figure = material.figure(
        variants,
        f"{panel.stem}-{first}",
        title=panel.title,
        finding=findings[first],
        findings=findings,
        explanation=" ".join([words, *panel.remarks]).strip(),
        wide=wide,
    )
    if first == "nll" and "token_perplexity" in variants:
        material.publish(variants["token_perplexity"], f"{panel.stem}-token_perplexity")
    return figure


def _legend(looks: Mapping[str, Look], drawn: Sequence[Mapping[str, Look]]) -> dict[str, Look]:
    """Shows a model dashed where every figure does."""
    legend = {}
    for label, look in looks.items():
        own = [figure[label].dashed for figure in drawn if label in figure]
        if own:
            legend[label] = dataclasses.replace(look, dashed=all(own))
    return legend


def _lead(panels: Sequence[Panel]) -> str:
    tables = [rows for panel in panels for rows in panel.tables.values()]
    bands = (
        "Bands: 95% intervals over source documents."
        if any(rows["ci95_low"].notna().any() for rows in tables)
        else f"No bands: intervals need {MINIMUM_CLUSTERS} documents."
    )
    words = f"Lower is better. {bands} Dotted line: training length."
    several = any("seed_low" in rows and rows["seed_low"].notna().any() for rows in tables)
    bars = " A line over several training seeds is their mean; bars reach from the lowest seed to the highest."
    return words + bars if several else words


def panel_finding(panel: Panel, training_lengths: Mapping[str, int], metric: str) -> str:
    """States in one sentence what a metric's lines do beyond the training length."""
    rows, parts = panel.tables[metric], []
    digits = ",.1f" if metric == "token_perplexity" else ".2f"
    for label in panel.labels:
        own = rows[rows["setting"] == label].sort_values("context_length_tokens")
        if own.empty:
            continue
        name, trained = in_words(label), training_lengths.get(label)
        within = own[own["context_length_tokens"] <= trained] if trained else own.iloc[:1]
        start, end = (within if len(within) else own).iloc[-1], own.iloc[-1]
        if int(start["context_length_tokens"]) == int(end["context_length_tokens"]):
            parts.append(f"{name} {start['value']:{digits}} at {length_text(int(start['context_length_tokens']))}")
            continue
        parts.append(
            f"{name} goes from {start['value']:{digits}} at {length_text(int(start['context_length_tokens']))} "
            f"to {end['value']:{digits}} at {length_text(int(end['context_length_tokens']))}"
        )
    return f"{METRIC_WORDS[metric]}: {listed(parts)}"


def _tables(panel: Panel, claims: Mapping[ClaimKey, LengthClaims]) -> list[Table]:
    """Returns the panel's numbers, one row a model, and the paired differences to the training length.

    On the page a model's differences stand below its numbers; in the files they are a table of their own.
    """
    metric, measured = next(iter(panel.tables.items()))
    digits = METRICS[metric][2]
    lengths = sorted(int(length) for length in measured["context_length_tokens"].unique())
    compared = {
        label: claim
        for label in panel.labels
        if (claim := claims.get((label, panel.corpus, panel.protocol))) is not None and claim.differences
    }
    rows = []
    by_label = by_model(measured)
    for label in panel.labels:
        own = {int(found["context_length_tokens"]): found for found in by_label.get(label, [])}
        mark = f" {DOUBTFUL}" if panel_claim(claims, panel, label).doubtful else ""
        rows.append(row(Cell(name=label), [_cell(own.get(length), digits, mark) for length in lengths]))
        if label in compared and metric == "nll":
            rows.append(difference_row(compared[label], lengths))
    explanation = "Small print: 95% interval."
    if any(panel_claim(claims, panel, label).doubtful for label in panel.labels):
        explanation += f" {DOUBTFUL}: {DOUBTFUL_WORDS}."
    if any(found.page_only for found in rows):
        explanation += (
            " A second line is the paired difference to the training length on the same targets, with its simultaneous "
            "95% band."
        )
    caption = f"{panel.title}: {METRIC_WORDS[metric]}"
    numbers = Table(
        stem=panel.stem,
        caption=caption,
        header=texts("model", *map(length_text, lengths)),
        rows=tuple(rows),
        explanation=explanation,
        interval="95% interval",
        folded=f"Numbers: {caption}",
    )
    return [numbers, difference_table(panel, compared)] if compared and "nll" in panel.tables else [numbers]


def panel_claim(claims: Mapping[ClaimKey, LengthClaims], panel: Panel, label: str) -> LengthClaims:
    """Returns what a panel's lengths show for one model; nothing where they were not compared."""
    return claims.get((label, panel.corpus, panel.protocol), LengthClaims())


def _cell(found: Mapping[str, Any] | None, digits: str, mark: str) -> Cell:
    if found is None:
        return NOT_MEASURED
    value, low, high = (f"{found[column]:{digits}}" for column in ("value", "ci95_low", "ci95_high"))
    interval = None if math.isnan(found["ci95_low"]) else (low, high)
    value += mark if interval else ""
    if not found.get("seeds", 0) > 1:
        return Cell(value, interval=interval)
    seeds = f"seeds {found['seed_low']:{digits}} to {found['seed_high']:{digits}}"
    return Cell(value, interval=interval, small=(seeds,), in_files=Cell(value, interval=interval).plain)


KIND = Kind(section=curves_section)
