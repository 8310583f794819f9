"""The section on perplexity against context length: panels, and the numbers behind them as tables."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sbeval.reports.analyse.claims import LengthClaims
from sbeval.reports.analyse.panels import PROTOCOL_WORDS, Panel
from sbeval.reports.figures.curves import METRICS, curve_figure
from sbeval.reports.figures.theme import Look, within
from sbeval.reports.read.models import length_text
from sbeval.reports.read.results import by_setting
from sbeval.reports.sections.section import Figure, Publish, Section
from sbeval.reports.write.html import Markup, element, name, table
from sbeval.results.intervals import MINIMUM_CLUSTERS

_SIDE_BY_SIDE_LINES = 6
METRIC_WORDS = {"nll": "NLL", "token_perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}


def curves_section(
    panels: Sequence[Panel],
    *,
    looks: Mapping[str, Look],
    parents: Mapping[str, str],
    training_lengths: Mapping[str, int],
    claims: Mapping[tuple[str, str, str], LengthClaims],
    publish: Publish,
) -> Section | None:
    """Builds the section; `publish` writes a figure's image files and returns its name and their links."""
    if not panels:
        return None
    figures = []
    for panel in panels:
        finding = panel_finding(panel, training_lengths)
        explanation = " ".join([PROTOCOL_WORDS.get(panel.protocol, ""), *panel.remarks]).strip()
        variants = {
            metric: curve_figure(
                rows,
                metric=metric,
                looks=within(looks, panel.labels, parents),
                training_lengths=training_lengths,
                title=panel.title,
                subtitle=PROTOCOL_WORDS.get(panel.protocol, ""),
                description=f"{panel.title}. {finding}",
            )
            for metric, rows in panel.tables.items()
        }
        still = [metric for metric in variants if metric in ("nll", "token_perplexity")] or list(variants)
        published = {metric: publish(variants[metric], f"{panel.stem}-{metric}") for metric in still}
        image, links = next(iter(published.values()))
        figures.append(
            Figure(
                title=panel.title,
                finding=finding,
                explanation=explanation,
                variants=variants,
                image=image,
                downloads=links,
                wide=len(panel.labels) > _SIDE_BY_SIDE_LINES,
            )
        )
    metrics = [metric for metric in METRIC_WORDS if any(metric in panel.tables for panel in panels)]
    return Section(
        identifier="curves",
        title="Perplexity against context length",
        lead=_lead(panels),
        figures=tuple(figures),
        metrics={metric: METRIC_WORDS[metric] for metric in metrics},
        legend=_legend(panels, looks, parents),
        content=tuple(panel_table(panel, claims) for panel in panels),
    )


def _legend(panels: Sequence[Panel], looks: Mapping[str, Look], parents: Mapping[str, str]) -> dict[str, Look]:
    """Shows a model dashed where every panel does."""
    drawn = [within(looks, panel.labels, parents) for panel in panels]
    legend = {}
    for label, look in looks.items():
        own = [panel[label].dashed for panel in drawn if label in panel]
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


def panel_finding(panel: Panel, training_lengths: Mapping[str, int]) -> str:
    """States in one sentence what the lines do beyond the training length."""
    metric, rows = next(iter(panel.tables.items()))
    parts = []
    for label in panel.labels:
        own = rows[rows["setting"] == label].sort_values("context_length_tokens")
        if own.empty:
            continue
        trained = training_lengths.get(label)
        within = own[own["context_length_tokens"] <= trained] if trained else own.iloc[:1]
        start, end = (within if len(within) else own).iloc[-1], own.iloc[-1]
        if int(start["context_length_tokens"]) == int(end["context_length_tokens"]):
            parts.append(f"{label} {start['value']:.2f} at {length_text(int(start['context_length_tokens']))}")
            continue
        parts.append(
            f"{label} goes from {start['value']:.2f} at {length_text(int(start['context_length_tokens']))} "
            f"to {end['value']:.2f} at {length_text(int(end['context_length_tokens']))}"
        )
    shown = parts if len(parts) <= 4 else [*parts[:3], f"{len(parts) - 3} more lines"]
    return f"{METRIC_WORDS[metric]}: {'; '.join(shown)}."


def panel_table(panel: Panel, claims: Mapping[tuple[str, str, str], LengthClaims]) -> Markup:
    """Returns the panel's numbers, one row a model, with the paired differences to the training length."""
    metric, rows = next(iter(panel.tables.items()))
    digits = METRICS[metric][2]
    lengths = sorted(int(length) for length in rows["context_length_tokens"].unique())
    body = []
    measured = by_setting(rows)
    for label in panel.labels:
        own = {int(row["context_length_tokens"]): row for row in measured.get(label, [])}
        body.append([name(label), *[_cell(own, length, digits) for length in lengths]])
        claim = claims.get((label, panel.corpus, panel.protocol))
        if claim is not None and claim.differences and metric == "nll":
            body.append([_difference_title(claim), *[_difference_cell(claim, length) for length in lengths]])
    explanation = (
        "Small print: 95% interval. A second line is the paired difference to the training length on the same "
        "targets, with its simultaneous 95% band."
        if any(len(row) and "difference" in row[0] for row in body)
        else "Small print: 95% interval."
    )
    caption = f"{panel.title}: {METRIC_WORDS[metric]}"
    content = table(["model", *map(length_text, lengths)], body, caption=caption, explanation=explanation)
    return element("details", element("summary", f"Numbers: {caption}"), content)


def _cell(own: Mapping[int, Mapping[str, Any]], length: int, digits: str) -> Markup:
    if length not in own:
        return element("td", "not measured", attributes={"class": "missing"})
    row = own[length]
    low, high = float(row["ci95_low"]), float(row["ci95_high"])
    interval = "" if math.isnan(low) else element("small", f"{low:{digits}} to {high:{digits}}")
    return element("td", f"{row['value']:{digits}}", interval, _seed_range(row, digits))


def _seed_range(row: Mapping[str, Any], digits: str) -> Markup | str:
    if not row.get("seeds", 0) > 1:
        return ""
    return element("small", f"seeds {row['seed_low']:{digits}} to {row['seed_high']:{digits}}")


def _difference_title(claim: LengthClaims) -> Markup:
    words = f"difference to {length_text(claim.reference_tokens)}" if claim.reference_tokens else "difference"
    return element("span", words, attributes={"class": "quiet"})


def _difference_cell(claim: LengthClaims, length: int) -> Markup:
    found = next((item for item in claim.differences if item.context_length_tokens == length), None)
    if found is None:
        return element("td", "", attributes={"class": "missing"})
    kind = "better" if found.high < 0 else "worse" if found.low > 0 else None
    small = "" if math.isnan(found.low) else element("small", f"{found.low:+.4f} to {found.high:+.4f}")
    return element("td", f"{found.estimate:+.4f}", small, attributes={"class": kind})
