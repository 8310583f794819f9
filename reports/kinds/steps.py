"""Checkpoints of one training: NLL at each context length against the training step."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pandas as pd

from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.figures.curves import length_rows
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.theme import series_looks
from sbeval.reports.read.fields import length_text, shown_name
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.runs import argument
from sbeval.reports.section import NOT_MEASURED, Cell, Figure, Kind, Material, Section, Table, row, texts

_CHECKPOINT = re.compile(r"(?P<training>.+)/checkpoint-(?P<step>[0-9]{1,12})/?")
_NAMED_STEPS = 8


def _section(material: Material) -> Section | None:
    """Returns None where no two checkpoints are of one training and measured alike."""
    figures: list[Figure] = []
    tables: list[Table] = []
    measured = material.results.measurements
    nll = measured[measured["metric"] == "nll"].dropna(subset=["value", "context_length_tokens"])
    for training, steps in _trainings(material.results.models).items():
        of_training = nll[nll["setting"].isin(steps)]
        for task, of_task in of_training.groupby("task", sort=False):
            rows = of_task.assign(step=of_task["setting"].map(steps))
            rows = rows.drop_duplicates(["step", "context_length_tokens"]).sort_values("step")
            if rows["step"].nunique() > 1:
                folder = training.rpartition("/")[2]
                name, stem = f"{shown_name(folder)}: {task}", f"steps-{safe_stem(folder)}-{safe_stem(str(task))}"
                caption = Caption(title=name, finding=_finding(rows), subtitle="NLL at each context length")
                figures.append(material.figure({"nll": _figure(rows, caption)}, stem, caption))
                tables.append(_table(rows, stem, name))
    if not figures:
        return None
    return Section(
        identifier="steps",
        title="Over training steps",
        lead="Checkpoints of one training (folders checkpoint-STEP) on the same text, one line a context length.",
        figures=tuple(figures),
        tables=tuple(tables),
    )


STEPS = Kind(section=_section)


def _trainings(models: Sequence[EvaluatedModel]) -> dict[str, dict[str, int]]:
    """Returns folder of a training to its checkpoints: label to step, which counts from 1."""
    trainings: dict[str, dict[str, int]] = defaultdict(dict)
    for model in models:
        match = _CHECKPOINT.fullmatch(argument(model.runs[0].model_args, "pretrained") or "")
        if match is not None and int(match["step"]) > 0:
            trainings[match["training"]][model.label] = int(match["step"])
    return trainings


def _finding(rows: pd.DataFrame) -> str:
    first, last = int(rows["step"].min()), int(rows["step"].max())
    changes = []
    for length, of_length in rows.groupby("context_length_tokens"):
        ends = of_length.set_index("step")["value"]
        if first in ends and last in ends:
            changes.append(f"{length_text(int(str(length)))} {ends[first]:.3f} to {ends[last]:.3f}")
    return f"From step {first:,} to {last:,}, NLL in nats: {', '.join(changes) or 'no length at both'}."


def _figure(rows: pd.DataFrame, caption: Caption) -> dict[str, Any]:
    order = [length_text(length) for length in sorted(int(length) for length in rows["context_length_tokens"].unique())]
    steps = sorted(int(step) for step in rows["step"].unique())
    named = steps if len(steps) <= _NAMED_STEPS else steps[:: -(-len(steps) // _NAMED_STEPS)]
    labelled = rows.assign(setting=rows["context_length_tokens"].map(lambda length: length_text(int(length))))
    drawn = length_rows(labelled, order, ".4f", column="step")
    for point in drawn:
        point["length_text"] = f"step {point['x']:,}"
    return line_figure(
        drawn,
        caption,
        axes=Axes(
            x_title="training step (log scale)",
            x_domain=(steps[0], steps[-1]),
            x_values=tuple(named),
            y_title="NLL (nats per token)",
        ),
        looks=series_looks(order),
        marks={},
        tooltip={"setting": "context", "length_text": "step", "value_text": "NLL"},
    )


def _table(rows: pd.DataFrame, stem: str, name: str) -> Table:
    lengths = sorted(int(length) for length in rows["context_length_tokens"].unique())
    columns = (rows[column] for column in ("step", "context_length_tokens", "value"))
    values = {(int(step), int(length)): f"{value:.4f}" for step, length, value in zip(*columns, strict=True)}
    caption = f"NLL in nats over training steps, {name}"
    return Table(
        stem=stem,
        caption=caption,
        header=texts("step", *map(length_text, lengths)),
        rows=tuple(
            row(Cell(f"{step:,}"), [values.get((step, length), NOT_MEASURED) for length in lengths])
            for step in sorted({step for step, _ in values})
        ),
        folded=f"Numbers: {caption}",
    )
