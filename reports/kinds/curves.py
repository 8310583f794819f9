"""Perplexity against context length: panels, and the numbers behind them as tables."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sbeval.reports.analyse.claims import LengthClaims
from sbeval.reports.analyse.findings import DOUBTFUL_WORDS
from sbeval.reports.analyse.overview import DOUBTFUL
from sbeval.reports.analyse.panels import PROTOCOL_WORDS, Panel, perplexity_panels
from sbeval.reports.figures.curves import METRIC_WORDS, length_figure
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.theme import Look
from sbeval.reports.kinds.differences import difference_row, difference_table, differences_figure
from sbeval.reports.read.fields import in_words, length_text, listed
from sbeval.reports.read.results import by_model
from sbeval.reports.section import NOT_MEASURED, Cell, Figure, Kind, Material, Section, Table, row, texts
from sbeval.results.intervals import MINIMUM_CLUSTERS

_METRICS = {
    "nll": ("NLL (nats per token)", "linear", ".3f"),
    "token_perplexity": ("perplexity per token (log scale)", "log", ",.2f"),
    "bits_per_byte": ("bits per byte", "linear", ".3f"),
}
"""A metric's axis, its scale and the digits of its numbers."""
_TOOLTIP = {
    "setting": "model",
    "length_text": "context",
    "value_text": "value",
    "interval_text": "95% interval",
    "tokens_text": "scored tokens",
    "clusters_text": "documents",
}
_SIDE_BY_SIDE_LINES = 6


def _section(material: Material) -> Section | None:
    """Returns None where no perplexity was measured against context length."""
    panels = perplexity_panels(material.results.measurements, material.results.models)
    if not panels:
        return None
    looks = [material.looks_of(panel.labels) for panel in panels]
    metrics = [metric for metric in METRIC_WORDS if any(metric in panel.tables for panel in panels)]
    figures: list[Figure] = []
    tables: list[Table] = []
    for panel, drawn in zip(panels, looks, strict=True):
        claims = {
            label: material.claims.get((label, panel.corpus, panel.protocol), LengthClaims()) for label in panel.labels
        }
        compared = {label: claim for label, claim in claims.items() if claim.differences}
        wide = len(panel.labels) > _SIDE_BY_SIDE_LINES
        first = not figures
        figures.append(_curve_figure(material, panel, drawn, wide=wide))
        if compared:
            folded = wide and not first
            figures.append(differences_figure(material, panel, compared, drawn, wide=wide, folded=folded))
        tables.append(_table(panel, claims))
        if compared and "nll" in panel.tables:
            tables.append(difference_table(panel, compared))
    return Section(
        identifier="curves",
        title="Perplexity against context length",
        lead=_lead(panels),
        figures=tuple(figures),
        metrics={metric: METRIC_WORDS[metric] for metric in metrics},
        legend=_legend(material.looks, looks),
        tables=tuple(tables),
    )


CURVES = Kind(section=_section)


def _curve_figure(material: Material, panel: Panel, looks: Mapping[str, Look], *, wide: bool) -> Figure:
    words = PROTOCOL_WORDS.get(panel.protocol, "")
    captions = {
        metric: Caption(
            title=panel.title,
            finding=panel_finding(panel, material.training_lengths, metric),
            explanation=" ".join([words, *panel.remarks]).strip(),
            subtitle=words,
        )
        for metric in panel.tables
    }
    variants = {
        metric: curve_figure(panel, metric, captions[metric], looks, material.training_lengths) for metric in captions
    }
    first = next(iter(variants))
    findings = {metric: caption.finding for metric, caption in captions.items()}
    figure = material.figure(variants, f"{panel.stem}-{first}", captions[first], findings=findings, wide=wide)
    if first == "nll" and "token_perplexity" in variants:
        material.publish(variants["token_perplexity"], f"{panel.stem}-token_perplexity")
    return figure


def curve_figure(
    panel: Panel, metric: str, caption: Caption, looks: Mapping[str, Look], training_lengths: Mapping[str, int]
) -> dict[str, Any]:
    """Returns the Vega-Lite specification of one of a panel's metrics."""
    axis_title, scale, number_format = _METRICS[metric]
    return length_figure(
        panel.tables[metric],
        caption,
        looks=looks,
        training_lengths=training_lengths,
        number_format=number_format,
        tooltip=_TOOLTIP | {"value_text": axis_title.removesuffix(" (log scale)")},
        y_title=axis_title,
        y_scale=scale,
        y_format="~g" if scale == "log" else None,
    )


def _legend(looks: Mapping[str, Look], drawn: Sequence[Mapping[str, Look]]) -> dict[str, Look]:
    """Shows a model dashed where every figure does."""
    dashed = {label: [figure[label].dashed for figure in drawn if label in figure] for label in looks}
    return {
        label: dataclasses.replace(look, dashed=all(dashed[label])) for label, look in looks.items() if dashed[label]
    }


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
    sentences = []
    digits = ",.1f" if metric == "token_perplexity" else ".2f"
    for label in panel.labels:
        rows = panel.tables[metric]
        curve = rows[rows["setting"] == label].sort_values("context_length_tokens")
        if curve.empty:
            continue
        trained = training_lengths.get(label)
        within = curve[curve["context_length_tokens"] <= trained] if trained else curve.iloc[:1]
        start, end = (within if len(within) else curve).iloc[-1], curve.iloc[-1]
        places = [
            f"{point['value']:{digits}} at {length_text(int(point['context_length_tokens']))}" for point in (start, end)
        ]
        words = places[0] if places[0] == places[1] else f"goes from {places[0]} to {places[1]}"
        sentences.append(f"{in_words(label)} {words}")
    return f"{METRIC_WORDS[metric]}: {listed(sentences)}"


def _table(panel: Panel, claims: Mapping[str, LengthClaims]) -> Table:
    """Returns the panel's numbers, one row a model.

    On the page a model's differences stand below its numbers; in the files they are a table of their own.
    """
    metric, measured = next(iter(panel.tables.items()))
    digits = _METRICS[metric][2]
    lengths = sorted(int(length) for length in measured["context_length_tokens"].unique())
    rows = []
    by_label = by_model(measured)
    for label, claim in claims.items():
        known = {int(number["context_length_tokens"]): number for number in by_label.get(label, [])}
        mark = f" {DOUBTFUL}" if claim.doubtful else ""
        rows.append(row(Cell(name=label), [_cell(known.get(length), digits, mark) for length in lengths]))
        if claim.differences and metric == "nll":
            rows.append(difference_row(claim, lengths))
    explanation = "Small print: 95% interval."
    if any(claim.doubtful for claim in claims.values()):
        explanation += f" {DOUBTFUL}: {DOUBTFUL_WORDS}."
    if any(line.page_only for line in rows):
        explanation += (
            " A second line is the paired difference to the training length on the same targets, with its simultaneous "
            "95% band."
        )
    caption = f"{panel.title}: {METRIC_WORDS[metric]}"
    return Table(
        stem=panel.stem,
        caption=caption,
        header=texts("model", *map(length_text, lengths)),
        rows=tuple(rows),
        explanation=explanation,
        interval="95% interval",
        folded=f"Numbers: {caption}",
    )


def _cell(number: Mapping[str, Any] | None, digits: str, mark: str) -> Cell:
    if number is None:
        return NOT_MEASURED
    value, low, high = (f"{number[column]:{digits}}" for column in ("value", "ci95_low", "ci95_high"))
    interval = None if math.isnan(number["ci95_low"]) else (low, high)
    value += mark if interval else ""
    if not number.get("seeds", 0) > 1:
        return Cell(value, interval=interval)
    seeds = f"seeds {number['seed_low']:{digits}} to {number['seed_high']:{digits}}"
    return Cell(value, interval=interval, small=(seeds,), in_files=Cell(value, interval=interval).plain)
