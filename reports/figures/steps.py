"""NLL over training steps: one line a context length."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from sbeval.reports.figures.curves import length_rows
from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.theme import series_looks
from sbeval.reports.read.fields import length_text

_NAMED_STEPS = 8


def step_figure(rows: pd.DataFrame, *, title: str, subtitle: str, description: str) -> Mapping[str, Any]:
    """Returns the figure of one training.

    Args:
        rows: columns step, context_length_tokens, value, ci95_low and ci95_high; each step and length once.
        title: heading of the image files.
        subtitle: second line of the image files.
        description: the finding in words, for readers who cannot see the figure.
    """
    lengths = sorted(int(length) for length in rows["context_length_tokens"].unique())
    order = [length_text(length) for length in lengths]
    steps = sorted(int(step) for step in rows["step"].unique())
    named = steps if len(steps) <= _NAMED_STEPS else steps[:: -(-len(steps) // _NAMED_STEPS)]
    labelled = rows.assign(setting=rows["context_length_tokens"].map(lambda length: length_text(int(length))))
    drawn = length_rows(labelled, order, ".4f", column="step")
    for row in drawn:
        row["length_text"] = f"step {row['x']:,}"
    return line_figure(
        drawn,
        axes=Axes(
            x_title="training step (log scale)",
            x_domain=(steps[0], steps[-1]),
            x_values=tuple(named),
            y_title="NLL (nats per token)",
        ),
        looks=series_looks(order),
        marks={},
        tooltip={"setting": "context", "length_text": "step", "value_text": "NLL"},
        title=title,
        subtitle=subtitle,
        description=description,
    )
