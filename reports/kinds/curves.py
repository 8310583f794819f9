"""Two sections: perplexity against context length, and NLL against training step for checkpoints of one training run.

The first section has a panel for each text and perplexity protocol: figures of curves, and tables with the numbers that
they show. The figures of the second section have one line for each context length.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.reports.analyse.claims import LengthClaims
from sbeval.reports.analyse.findings import DOUBTFUL_TEXT
from sbeval.reports.analyse.panels import Panel, perplexity_panels, safe_stem
from sbeval.reports.analyse.protocols import curve_text, on_identical_targets
from sbeval.reports.analyse.verdicts import DOUBTFUL
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.lines import (
    COUNTED,
    METRIC_NAMES,
    SCORE_TOOLTIP,
    Axes,
    length_figure,
    length_rows,
    line_figure,
)
from sbeval.reports.figures.theme import Look, series_looks
from sbeval.reports.kinds.differences import difference_row, difference_table, differences_figure
from sbeval.reports.kinds.maps import BEGINS, training_map
from sbeval.reports.read.fields import display_name, length_text, listed, quote_name
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.results import LENGTH, by_model, column_values, records
from sbeval.reports.read.runs import argument
from sbeval.reports.section import NOT_MEASURED, Cell, Figure, Kind, Material, Row, Section, Table, interval
from sbeval.results.intervals import MINIMUM_CLUSTERS
from sbeval.results.records import IDENTICAL_TARGETS

_METRICS = {
    "nll": ("NLL (nats per token)", "linear", ".3f"),
    "token_perplexity": ("perplexity per token (log scale)", "log", ",.2f"),
    "bits_per_byte": ("bits per byte", "linear", ".3f"),
}
"""Metric to (title of the y axis, scale of the y axis, number format)."""
_TOOLTIP = SCORE_TOOLTIP | COUNTED
_SIDE_BY_SIDE_LINES = 6
_CHECKPOINT = re.compile(r"(?P<training>.+)/checkpoint-(?P<step>[0-9]{1,12})/?")
_NAMED_STEPS = 8


def _section(material: Material) -> Section | None:
    """Builds the section "Perplexity against context length"; None if no perplexity task was run."""
    panels = perplexity_panels(material.results.measurements, material.results.models)
    if not panels:
        return None
    looks = [material.looks_of(panel.labels) for panel in panels]
    metrics = [metric for metric in METRIC_NAMES if any(metric in panel.tables for panel in panels)]
    figures: list[Figure] = []
    tables: list[Table] = []
    for panel, drawn in zip(panels, looks, strict=True):
        keys = {label: (label, panel.corpus, panel.protocol) for label in panel.labels}
        claims = {label: material.claims.get(key, LengthClaims()) for label, key in keys.items()}
        compared = {label: claim for label, claim in claims.items() if claim.differences}
        wide = len(panel.labels) > _SIDE_BY_SIDE_LINES
        first = not figures
        figures.append(_curve_figure(material, panel, drawn, wide=wide))
        if compared:
            folded = wide and not first
            figures.append(differences_figure(material, panel, compared, wide=wide, folded=folded))
        tables.append(_table(panel, claims))
        if compared and "nll" in panel.tables:
            tables.append(difference_table(panel, compared))
    return Section(
        identifier="curves",
        title="Perplexity against context length",
        lead=_lead(panels),
        figures=tuple(figures),
        metrics={metric: METRIC_NAMES[metric] for metric in metrics},
        legend=_legend(material.looks, looks),
        tables=tuple(tables),
    )


CURVES = Kind(section=_section)


def _curve_figure(material: Material, panel: Panel, looks: Mapping[str, Look], *, wide: bool) -> Figure:
    how_to_read = curve_text(panel.protocol)
    explanation = " ".join([how_to_read, *panel.remarks]).strip()
    lengths = material.training_lengths
    findings = {metric: panel_finding(panel, lengths, metric) for metric in panel.tables}
    of_panel = Caption(title=panel.title, finding="", explanation=explanation, subtitle=how_to_read)
    captions = {metric: dataclasses.replace(of_panel, finding=finding) for metric, finding in findings.items()}
    variants = {metric: curve_figure(panel, metric, caption, looks) for metric, caption in captions.items()}
    first = next(iter(variants))
    figure = material.figure(variants, f"{panel.stem}-{first}", captions[first], findings=findings, wide=wide)
    if first == "nll" and "token_perplexity" in variants:
        material.publish(variants["token_perplexity"], f"{panel.stem}-token_perplexity")
    return figure


def curve_figure(panel: Panel, metric: str, caption: Caption, looks: Mapping[str, Look]) -> dict[str, Any]:
    """Returns the Vega-Lite specification of a panel's curves in one metric, a key of `_METRICS`."""
    axis_title, scale, number_format = _METRICS[metric]
    return length_figure(
        panel.tables[metric],
        caption,
        looks=looks,
        number_format=number_format,
        tooltip=_TOOLTIP | {"value_text": axis_title.removesuffix(" (log scale)")},
        y_title=axis_title,
        y_scale=scale,
        y_format="~g" if scale == "log" else None,
    )


def _legend(looks: Mapping[str, Look], drawn: Sequence[Mapping[str, Look]]) -> dict[str, Look]:
    """Returns the legend of the section: its line for a model is dashed if every figure with the model draws it dashed.

    Models that no figure shows are left out.
    """
    dashed = {label: [figure[label].dashed for figure in drawn if label in figure] for label in looks}
    return {label: dataclasses.replace(looks[label], dashed=all(each)) for label, each in dashed.items() if each}


def _lead(panels: Sequence[Panel]) -> str:
    tables = [rows for panel in panels for rows in panel.tables.values()]
    bands = (
        "Bands: 95% intervals over source documents."
        if any(rows["ci95_low"].notna().any() for rows in tables)
        else f"No bands: intervals need {MINIMUM_CLUSTERS} documents."
    )
    lead = f"Lower is better. {bands} Dotted line: training length."
    several = any("seed_low" in rows and rows["seed_low"].notna().any() for rows in tables)
    bars = " A line over several training seeds is their mean; bars reach from the lowest seed to the highest."
    return lead + bars if several else lead


def panel_finding(panel: Panel, training_lengths: Mapping[str, int], metric: str) -> str:
    """Returns one sentence with each model's value at its training length and at the longest context."""
    sentences = []
    digits = ",.1f" if metric == "token_perplexity" else ".2f"
    for label in panel.labels:
        rows = panel.tables[metric]
        curve = rows[rows["setting"] == label].sort_values(LENGTH)
        if curve.empty:
            continue
        trained = training_lengths.get(label)
        within = curve[curve[LENGTH] <= trained] if trained else curve.iloc[:1]
        start, end = (within if len(within) else curve).iloc[-1], curve.iloc[-1]
        places = [f"{point['value']:{digits}} at {length_text(int(point[LENGTH]))}" for point in (start, end)]
        range_text = f"is {places[0]}" if places[0] == places[1] else f"goes from {places[0]} to {places[1]}"
        sentences.append(f"{quote_name(label)} {range_text}")
    return f"{METRIC_NAMES[metric]}: {listed(sentences)}"


def _table(panel: Panel, claims: Mapping[str, LengthClaims]) -> Table:
    """Returns the table of a panel's numbers, one row for each model.

    On the page, a second row below each model shows the paired differences of NLL between lengths. Exported files have
    a separate table of these differences (`difference_table`).
    """
    metric, measured = next(iter(panel.tables.items()))
    digits = _METRICS[metric][2]
    lengths = column_values(measured)
    rows = []
    by_label = by_model(measured)
    for label, claim in claims.items():
        mark = f" {DOUBTFUL}" if claim.doubtful else ""
        known = {int(number[LENGTH]): _cell(number, digits, mark) for number in by_label.get(label, [])}
        rows.append(Row((Cell(name=label), *(known.get(length, NOT_MEASURED) for length in lengths))))
        if claim.differences and metric == "nll":
            rows.append(difference_row(claim, lengths))
    has_intervals = any(cell.interval for line in rows for cell in line.cells)
    explanation = "Small print: 95% interval." if has_intervals else ""
    if any(claim.doubtful for claim in claims.values()):
        explanation += f" {DOUBTFUL}: {DOUBTFUL_TEXT}."
    if any(line.page_only for line in rows):
        second = "the paired difference to the named length, on the same targets"
        explanation += f" The second line of a model is {second}, with its simultaneous 95% band."
    caption = f"{panel.title}: {METRIC_NAMES[metric]}"
    return Table.of(
        ("model", *map(length_text, lengths)),
        rows,
        stem=panel.stem,
        caption=caption,
        explanation=explanation,
        interval="95% interval",
        folded=f"Numbers: {caption}",
    )


def _cell(number: Mapping[str, Any], digits: str, mark: str) -> Cell:
    ends = interval(number["ci95_low"], number["ci95_high"], digits)
    cell = Cell(f"{number['value']:{digits}}{mark if ends else ''}", interval=ends)
    if not number.get("seeds", 0) > 1:
        return cell
    seeds = f"seeds {number['seed_low']:{digits}} to {number['seed_high']:{digits}}"
    return dataclasses.replace(cell, small=(seeds,), in_files=cell.plain)


def _steps_section(material: Material) -> Section | None:
    """Builds the section "Over training steps"; None if no task was run on two checkpoints of one training run."""
    figures: list[Figure] = []
    tables: list[Table] = []
    measured = material.results.measurements
    nll = measured[measured["metric"] == "nll"].dropna(subset=["value", LENGTH])
    for training, steps in _trainings(material.results.models).items():
        of_training = nll[nll["setting"].isin(steps)]
        for task, of_task in of_training.groupby("task", sort=False):
            rows = of_task.assign(step=of_task["setting"].map(steps))
            rows = rows.drop_duplicates(["step", LENGTH]).sort_values("step")
            if rows["step"].nunique() > 1:
                folder = training.rpartition("/")[2]
                name = f"{display_name(folder)}: {task}"
                stem = f"steps-{safe_stem(folder)}-{safe_stem(str(task))}"
                caption = Caption(title=name, finding=_steps_finding(rows), subtitle="NLL at each context length")
                figures.append(material.figure({"nll": _steps_figure(rows, caption)}, stem, caption))
                if rows["protocol"].isin(IDENTICAL_TARGETS).all():
                    figures.append(_begins_figure(material, rows, caption, stem))
                tables.append(_steps_table(rows, stem, name))
    if not figures:
        return None
    return Section(
        identifier="steps",
        title="Over training steps",
        lead="Checkpoints of one training (folders checkpoint-STEP) on the same text; each line is a context length.",
        figures=tuple(figures),
        tables=tuple(tables),
    )


STEPS = Kind(section=_steps_section)


def _begins_figure(material: Material, rows: pd.DataFrame, caption: Caption, stem: str) -> Figure:
    """Returns the heat map of NLL by checkpoint and context length, for a protocol with identical targets.

    It marks, for each context length, the first checkpoint at which NLL is measurably lower there than at the next
    shorter length.
    """
    gains = _first_gains(material, rows)
    begins = [f"{length_text(length)} at step {step:,}" for length, step in sorted(gains.items())]
    is_lower = "NLL there is measurably lower than at the next shorter length"
    finding = "First step at which NLL at a length is measurably lower than at the next shorter length: {}."
    of_map = dataclasses.replace(
        caption,
        title=f"{caption.title}: when each length begins to help",
        finding=on_identical_targets(str(rows["protocol"].iloc[0]), finding.format(", ".join(begins) or "none")),
        explanation=f"{BEGINS}: the first checkpoint of a length at which {is_lower}.",
        subtitle=f"NLL in nats per token; {BEGINS} first checkpoint at which {is_lower}",
    )
    return material.figure({"nll": training_map(rows, gains, of_map)}, f"{stem}-map", of_map)


def _trainings(models: Sequence[EvaluatedModel]) -> dict[str, dict[str, int]]:
    """Returns the checkpoints of each training run: models whose path ends in checkpoint-STEP.

    Returns:
        Folder of the training run to (model label to training step, at least 1).
    """
    trainings: dict[str, dict[str, int]] = defaultdict(dict)
    for model in models:
        match = _CHECKPOINT.fullmatch(argument(model.runs[0].model_args, "pretrained") or "")
        if match is not None and int(match["step"]) > 0:
            trainings[match["training"]][model.label] = int(match["step"])
    return trainings


def _first_gains(material: Material, rows: pd.DataFrame) -> dict[int, int]:
    """Returns context length to the first training step at which it measurably lowers NLL.

    That is, NLL is measurably lower than at the next shorter length. Lengths that never lower NLL are absent.
    """
    gains: dict[int, int] = {}
    for row in records(rows.drop_duplicates("step")):
        claim = material.claims.get((row["setting"], row["corpus"], row["protocol"]), LengthClaims())
        for change in claim.steps:
            if change.high < 0:
                gains.setdefault(change.context_length_tokens, int(row["step"]))
    return gains


def _steps_finding(rows: pd.DataFrame) -> str:
    first, last = int(rows["step"].min()), int(rows["step"].max())
    changes = []
    for length, of_length in rows.groupby(LENGTH):
        ends = of_length.set_index("step")["value"]
        if first in ends and last in ends:
            changes.append(f"{length_text(int(str(length)))} {ends[first]:.3f} to {ends[last]:.3f}")
    return f"From step {first:,} to {last:,}, NLL in nats: {', '.join(changes) or 'no length at both'}."


def _steps_figure(rows: pd.DataFrame, caption: Caption) -> dict[str, Any]:
    order = list(map(length_text, column_values(rows)))
    steps = column_values(rows, "step")
    named = steps if len(steps) <= _NAMED_STEPS else steps[:: -(-len(steps) // _NAMED_STEPS)]
    labelled = rows.assign(setting=rows[LENGTH].map(lambda length: length_text(int(length))))
    drawn = length_rows(labelled, order, ".4f", column="step")
    for point in drawn:
        point["length_text"] = f"step {point['x']:,}"
    ends = (steps[0], steps[-1])
    axes = Axes(x_title="training step (log scale)", x_domain=ends, x_values=tuple(named), y_title=_METRICS["nll"][0])
    tooltip = {"setting": "context", "length_text": "step", "value_text": "NLL"}
    return line_figure(drawn, caption, axes=axes, looks=series_looks(order), tooltip=tooltip)


def _steps_table(rows: pd.DataFrame, stem: str, name: str) -> Table:
    nll: dict[int, dict[int, Cell | str]] = defaultdict(dict)
    for number in records(rows):
        nll[int(number["step"])][int(number[LENGTH])] = f"{number['value']:.4f}"
    caption = f"NLL in nats over training steps, {name}"
    return Table.by_length(
        [(Cell(f"{step:,}"), cells) for step, cells in nll.items()],
        lengths=column_values(rows),
        heading="step",
        stem=stem,
        caption=caption,
        folded=f"Numbers: {caption}",
    )
