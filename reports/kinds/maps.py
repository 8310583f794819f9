"""Heat maps of NLL against context length: by position in the window, by document, and by training checkpoint.

Maps by position and by document are drawn a second time as differences to the baseline, the model whose NLL is
subtracted from that of the others. Every cell compares the same target tokens.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from sbeval.reports.analyse.panels import safe_stem, text_name
from sbeval.reports.analyse.selection import comparable
from sbeval.reports.figures import heatmaps
from sbeval.reports.figures.labels import Caption
from sbeval.reports.kinds.position_sums import BINS
from sbeval.reports.read.fields import first_listed, length_text, quote_name
from sbeval.reports.read.results import LENGTH, column_values, records
from sbeval.reports.read.samples import DOCUMENT_SUMS
from sbeval.reports.section import Figure, Kind, Material, Section
from sbeval.results.records import IDENTICAL_TARGETS

_COLUMNS = ["setting", "task", "corpus", "corpus_sha256", LENGTH, "row", "value", "tokens"]
_TEXT = ["task", "corpus", "corpus_sha256"]
_MOST_DOCUMENTS = 40
_SHOWN = 2
BEGINS = "\N{LOZENGE}"
"""A lozenge: marks the first checkpoint at which a context length measurably lowers NLL."""


def _section(material: Material) -> Section | None:
    """Builds the section "Maps of NLL"; None if no NLL by position or by document is known at two context lengths."""
    figures: list[Figure] = []
    for kind, rows_are, cells, explanation in (
        ("position", "position in the window (octaves, from)", _by_position(material), "One pass at each length."),
        ("document", "document", _by_document(material), "The same targets at every length."),
    ):
        for (task, corpus, _), of_text in cells.groupby(_TEXT, dropna=False, sort=False):
            if of_text[LENGTH].nunique() > 1:
                title = f"{text_name(str(corpus))}: NLL by {kind} and context length"
                caption = Caption(title=title, finding="", explanation=explanation, subtitle="NLL in nats per token")
                figures += _figures(material, of_text, caption, f"map-{kind}-{safe_stem(str(task))}", rows_are)
    if not figures:
        return None
    return Section(
        identifier="maps",
        title="Maps of NLL",
        lead="One grid for each model, one column for each context length, one colour scale. Lighter is lower NLL; in "
        "differences to the baseline, blue is better than the baseline.",
        figures=tuple(dataclasses.replace(figure, folded=place >= _SHOWN) for place, figure in enumerate(figures)),
    )


MAPS = Kind(section=_section)


def _by_position(material: Material) -> pd.DataFrame:
    """Returns a table of NLL with one row for each octave of positions in the window and each context length.

    An octave is left out if less than half of it lies within the window.
    """
    bins = comparable(material.results[BINS].dropna(subset=[LENGTH]), material.baseline)
    octaves = np.floor(np.log2(bins["first"].clip(lower=1)))
    bins = bins.assign(row=octaves, sums=bins["nll"] * bins["tokens"], width=bins["last"] - bins["first"] + 1)
    numbers = ["sums", "tokens", "width"]
    cells = bins.groupby(["setting", *_TEXT, LENGTH, "row"], dropna=False, sort=False)[numbers].sum().reset_index()
    cells = cells[2 * cells["width"] >= 2 ** cells["row"]].sort_values("row", kind="stable")
    names = [length_text(int(2**octave)) for octave in cells["row"]]
    return cells.assign(row=names, value=cells["sums"] / cells["tokens"])[_COLUMNS]


def _by_document(material: Material) -> pd.DataFrame:
    """Returns a table of NLL by document and context length on identical targets, for documents with most targets."""
    measured = material.results.measurements
    measured = comparable(measured[measured["protocol"].isin(IDENTICAL_TARGETS)], material.baseline)
    rows = []
    for row in records(measured.drop_duplicates(["setting", *_TEXT])):
        if (sums := material.results.behind(DOCUMENT_SUMS, row)) is not None:
            text = row["corpus"], row["protocol"]
            largest = np.argsort(-sums.tokens.max(axis=1), kind="stable")[:_MOST_DOCUMENTS]
            for place, (column, length) in itertools.product(largest, enumerate(sums.lengths)):
                if tokens := sums.tokens[place, column]:
                    cell = (length, sums.clusters[place], sums.nll_nats[place, column] / tokens, tokens)
                    rows.append((row["setting"], row["task"], text_name(*text), row["corpus_sha256"], *cell))
    cells = pd.DataFrame(rows, columns=_COLUMNS)
    return cells.sort_values([LENGTH, "value"], ascending=[False, True], kind="stable")


def _figures(material: Material, cells: pd.DataFrame, caption: Caption, stem: str, rows_are: str) -> list[Figure]:
    """Returns the heat map of NLL and, if another model was scored on the baseline's targets, that of differences."""
    levels = dataclasses.replace(caption, finding=_finding(cells, ".2f"))
    spec = _maps(material, cells, levels, heatmaps.nll_shades(cells["value"].tolist()), rows_are)
    figures = [material.figure({"nll": spec}, stem, levels, wide=True)]
    base = cells[cells["setting"] == material.baseline].set_index([LENGTH, "row", "tokens"])["value"]
    compared = cells[cells["setting"] != material.baseline]
    base_nll = base.reindex(pd.MultiIndex.from_frame(compared[[LENGTH, "row", "tokens"]])).to_numpy()
    compared = compared.assign(value=compared["value"].to_numpy() - base_nll).dropna(subset=["value"])
    if len(compared):
        difference = dataclasses.replace(
            caption,
            title=f"{caption.title}, difference to {material.baseline}",
            finding=_finding(compared, "+.2f"),
            explanation=f"{caption.explanation} Below zero, blue, is better than the baseline.",
            subtitle="difference in NLL (nats per token)",
        )
        shades = heatmaps.difference_shades(compared["value"].tolist(), "difference in NLL")
        spec = _maps(material, compared, difference, shades, rows_are)
        figures.append(material.figure({"nll": spec}, f"{stem}-difference", difference, wide=True))
    return figures


def _finding(cells: pd.DataFrame, digits: str) -> str:
    sentences = []
    for label, of_model in cells.groupby("setting", sort=False):
        ascending = records(of_model.sort_values("value"))
        cells_at_ends = (ascending[0], ascending[-1])
        values = [f"{end['value']:{digits}}".replace("-", "\N{MINUS SIGN}") for end in cells_at_ends]
        places = [f"({end['row']} at {length_text(int(end[LENGTH]))})" for end in cells_at_ends]
        ends = [f"{value} {place}" for value, place in zip(values, places, strict=True)]
        sentences.append(
            f"{quote_name(str(label))} {f'from {ends[0]} to {ends[1]}' if ends[0] != ends[1] else ends[0]}"
        )
    return first_listed(sentences)


def _maps(
    material: Material, cells: pd.DataFrame, caption: Caption, shades: heatmaps.Shades, rows_are: str
) -> dict[str, Any]:
    x = heatmaps.length_bands(column_values(cells))
    order = list(dict.fromkeys(cells["row"]))
    labels = [label for label in material.looks if (cells["setting"] == label).any()]
    tooltip = {"length": "context", "row": rows_are, "value_text": shades.title, "tokens_text": "targets"}
    numbers = len(labels) <= heatmaps.NUMBERED_AT_MOST
    panels = {}
    for label in labels:
        drawn = [_cell(cell, shades) for cell in records(cells[cells["setting"] == label])]
        panels[label] = heatmaps.grid(
            drawn, x, rows=order, y_title=rows_are, shades=shades, tooltip=tooltip, numbers=numbers
        )
    return heatmaps.heatmaps(panels, caption)


def _cell(cell: Mapping[str, Any], shades: heatmaps.Shades) -> dict[str, Any]:
    return {
        "length": length_text(int(cell[LENGTH])),
        "row": cell["row"],
        "value": float(cell["value"]),
        "text": f"{cell['value']:{shades.digits}}",
        "value_text": f"{cell['value']:{shades.digits}}",
        "tokens_text": f"{int(cell['tokens']):,}",
    }


def training_map(rows: pd.DataFrame, gains: Mapping[int, int], caption: Caption) -> dict[str, Any]:
    """Returns the Vega-Lite specification of a training run's heat map: NLL by checkpoint (row) and length (column).

    Args:
        rows: a table with columns `step`, `context_length_tokens`, `value` (NLL) and `tokens`.
        gains: context length to the first training step at which it measurably lowers NLL; that cell is marked.
        caption: title, description and other texts of the figure.
    """
    shades = heatmaps.nll_shades(rows["value"].tolist())
    cells = []
    for number in records(rows.assign(row=rows["step"].map("{:,}".format), tokens=rows["tokens"].fillna(0))):
        begins = gains.get(int(number[LENGTH])) == number["step"]
        cell = _cell(number, shades)
        cells.append(cell | {"text": f"{cell['text']} {BEGINS}" if begins else cell["text"]})
    x = heatmaps.length_bands(column_values(rows))
    order = list(dict.fromkeys(cell["row"] for cell in cells))
    tooltip = {"length": "context", "row": "step", "value_text": shades.title}
    panel = heatmaps.grid(cells, x, rows=order, y_title="training step", shades=shades, tooltip=tooltip, numbers=True)
    return {**heatmaps.heatmaps({"": panel}, caption), "columns": 1}
