"""The section on attention spans: means over heads against context length, and a grid of all layers and heads.

The span of a head is the number of most recent keys that get a given share of its attention weight.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.foreign_files import usable_number
from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.ruler import by_length
from sbeval.reports.figures.labels import Caption, tooltip_fields
from sbeval.reports.figures.lines import SHARES, Axes, length_domain, length_figure, length_rows, small_multiples
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import context_metric, display_name, length_text, quote_name
from sbeval.reports.read.files import Notes
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.results import Reader, column_values, records
from sbeval.reports.section import Cell, Figure, Kind, Material, Section, Table

_PLACE = ["setting", "task", "context_length_tokens", "layer", "head"]
_NUMBERS = ["span50", "span90", "span99", "remainder", "first_token", "entropy"]
_MOST_CELLS = 6000
_SHOWN = 2
_MEASURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "span50": ("keys that hold half the weight", ",.1f", {"y_scale": "log", "y_format": "~s"}),
    "first_token": ("weight on the first token", ".3f", SHARES),
    "entropy": ("entropy of the weights (nats)", ".2f", {}),
    "remainder": ("remaining stick", ".3f", SHARES),
}
"""Column of a table of spans to (title of the plot, number format, fields of `Axes` for the y axis)."""
_MEANS = {
    "span50": ("half of the weight", ",.1f"),
    "span90": ("90% of the weight", ",.1f"),
    "first_token": ("weight on the first token", ".1%"),
    "entropy": ("entropy in nats", ".2f"),
    "remainder": ("remaining stick", ".1%"),
}
_SHARES = {"span50": "50% of the weight", "span90": "90%", "span99": "99%"}
_REMAINDER = "remaining stick"
_TOOLTIP = {
    "layer": "layer",
    "head": "head",
    "length_text": "context",
    **{f"{share}_text": words for share, words in _SHARES.items()},
    "remainder_text": _REMAINDER,
}
_SHORTEST_SIDE_PIXELS = 96
_LONGEST_SIDE_PIXELS = 190
_CELL_PIXELS = 16


def _tabulate(models: Sequence[EvaluatedModel], notes: Notes) -> pd.DataFrame:
    """Returns one row for each layer, head and context length; spans are numbers of keys, NaN if they are missing.

    If several runs have the same context length, the first in `EvaluatedModel.task_runs` is used.
    """
    rows: list[list[Any]] = []
    for model in models:
        seen: dict[str, set[int]] = defaultdict(set)
        for _, task in model.task_runs():
            name = display_name(task.name)
            for key, heads in task.metrics.items():
                metric, length = context_metric(key) or ("", 0)
                if metric == "attention_span" and isinstance(heads, list) and length not in seen[name]:
                    seen[name].add(length)
                    rows += [[model.label, name, length, *head] for head in map(_head, heads) if head]
    return pd.DataFrame(rows, columns=_PLACE + _NUMBERS)


def _head(written: object) -> list[float]:
    # [layer, head, three spans, remainder, first token's weight, entropy]; older versions wrote only the first six
    if not isinstance(written, list) or len(written) not in (6, 8):
        return []
    if any(type(place) is not int for place in written[:2]):
        return []
    numbers = [math.nan if (number := usable_number(value)) is None else number for value in written[2:]]
    return [*written[:2], *numbers, *[math.nan] * (8 - len(written))]


def _one_seed(rows: pd.DataFrame, pooled_label: Mapping[str, str], notes: Notes) -> pd.DataFrame:
    """Keeps one training seed of each group of seeds.

    Seeds are not averaged, since heads with the same index in two trainings have nothing in common.
    """
    labels = rows["setting"].map(lambda label: pooled_label.get(label, label))
    is_first_seed = rows["setting"] == rows["setting"].groupby(labels).transform("first")
    for label in dict.fromkeys(labels[~is_first_seed]):
        notes.add(None, f"{label}: attention spans are shown for one of its seeds, since heads cannot be averaged.")
    return rows.assign(setting=labels)[is_first_seed].reset_index(drop=True)


HEADS = Reader(read=_tabulate, pool=_one_seed)


def _section(material: Material) -> Section:
    spans = material.results[HEADS]
    # softmax gives all weight to keys; stick-breaking attention may leave some, the remainder, which is then shown
    sticks = spans.groupby("setting")["remainder"].transform("max") > 0
    spans = spans.assign(remainder=spans["remainder"].where(sticks))
    looks = material.looks_of(spans["setting"])
    means = spans.groupby(["setting", "context_length_tokens"], sort=False)[_NUMBERS].mean().reset_index()
    figures = [_why_figure(material, means, looks), _means_figure(material, means, looks)]
    for label in looks:
        figures.append(_heads_figure(material, label, spans[spans["setting"] == label], folded=len(figures) > _SHOWN))
    return Section(
        identifier="spans",
        title="Effective attention span",
        lead=(
            "The number of newest keys that hold 50, 90 and 99% of a query's attention weight, as a mean over the last "
            "queries of a window. Softmax heads often put unused weight on the first token, the attention sink; weight "
            "that a stick-breaking head gives to no key is its remaining stick. Entropy is of the normalised weights."
        ),
        figures=tuple(figures),
        legend=looks,
        tables=(_table(means, list(looks)),),
    )


SPANS = Kind(section=_section, readers=(HEADS,), needs=HEADS)


def _value_of(means: pd.DataFrame, column: str) -> pd.DataFrame:
    """Returns rows for a line plot of one column: it is renamed `value`, rows without it are dropped, no intervals."""
    known = means.dropna(subset=[column])
    return known.assign(value=known[column], ci95_low=math.nan, ci95_high=math.nan)


def _why_figure(material: Material, means: pd.DataFrame, looks: Mapping[str, Look]) -> Figure:
    sentences = []
    for label in looks:
        known = means[(means["setting"] == label) & means["entropy"].notna()].sort_values("context_length_tokens")
        if len(known):
            first, last = known.iloc[0], known.iloc[-1]
            start, end = (length_text(int(mean["context_length_tokens"])) for mean in (first, last))
            places = f"at {start}" if start == end else f"from {start} to {end}"
            means_at_ends = [first] if start == end else [first, last]
            entropy = " to ".join(f"{mean['entropy']:.2f}" for mean in means_at_ends)
            sink = " to ".join(f"{mean['first_token']:.1%}" for mean in means_at_ends)
            sentences.append(f"{quote_name(label)} {places}: entropy {entropy} nats, first token's weight {sink}")
    nothing = "Entropies were not measured, only spans and remaining sticks."
    caption = Caption(
        title="Where the weight goes",
        finding="; ".join(sentences[:4]) + "." if sentences else nothing,
        explanation="The same queries at every length, each at the end of its window. A line that bends where windows "
        "pass the training length shows what changes there.",
        subtitle="mean over heads, by context length",
    )
    domain = length_domain(means, looks)
    panels = {}
    for column, (title, number_format, axis) in _MEASURES.items():
        known = _value_of(means, column)
        if len(known):
            axes = Axes(x_title=None, x_octaves=2, x_domain=domain, y_title=None, **axis)
            panels[title] = (length_rows(known, looks, number_format), axes)
    tooltip = {"setting": "model", "length_text": "context", "value_text": "mean over heads"}
    spec = small_multiples(panels, caption, columns=2, height=180, width=300, tooltip=tooltip, looks=looks)
    return material.figure({"attention": spec}, "attention", caption, wide=True)


def _means_figure(material: Material, means: pd.DataFrame, looks: Mapping[str, Look]) -> Figure:
    known = _value_of(means, "span90")
    sentences = []
    for label in looks:
        if (known["setting"] == label).any():
            last = known[known["setting"] == label].sort_values("context_length_tokens").iloc[-1]
            length = length_text(int(last["context_length_tokens"]))
            sentences.append(f"{quote_name(label)} {last['value']:,.0f} keys at {length}")
    caption = Caption(
        title="Span at 90%, mean over heads",
        finding="; ".join(sentences[:4]) + ".",
        explanation="Where a line rises with the context, some heads look further back in longer contexts.",
        subtitle="keys until 90% of a query's weight",
    )
    spec = length_figure(
        known,
        caption,
        looks=looks,
        number_format=",.1f",
        tooltip={"setting": "model", "length_text": "context", "value_text": "keys"},
        y_title="keys (log scale)",
        y_scale="log",
        y_format="~s",
    )
    return material.figure({"span90": spec}, "span-means", caption)


def _heads_figure(material: Material, label: str, heads: pd.DataFrame, *, folded: bool) -> Figure:
    lengths = column_values(heads)
    shown = _shown_lengths(lengths, len(heads) // len(lengths))
    left_out = ", ".join(length_text(length) for length in lengths if length not in shown)
    caption = Caption(
        title=f"{label}: span of every head",
        finding=_finding(label, heads[heads["context_length_tokens"] == lengths[-1]]),
        explanation="Rows: context lengths. Columns: shares of the weight. In an empty cell no key got weight."
        + (f" Not drawn: {left_out}." if left_out else ""),
        subtitle="keys, counted back from the newest",
    )
    spec = span_grids(heads, shown, caption)
    return material.figure({"span": spec}, f"span-{safe_stem(label)}", caption, wide=True, folded=folded)


def _shown_lengths(lengths: Sequence[int], heads: int) -> list[int]:
    """Returns evenly spaced context lengths, first and last included, as many as can be drawn readably.

    The longest length is always returned.
    """
    count = max(1, min(len(lengths), _MOST_CELLS // (4 * max(1, heads))))
    if count == 1:
        return [lengths[-1]]
    return sorted({lengths[round(place * (len(lengths) - 1) / (count - 1))] for place in range(count)})


def _finding(label: str, heads: pd.DataFrame) -> str:
    length = length_text(int(heads["context_length_tokens"].iloc[0]))
    known = heads.dropna(subset=["span90"])
    if known.empty:
        return f"At {length}, none of {quote_name(label)}'s {len(heads)} heads gives weight to a key."
    widest = known.sort_values("span90").iloc[-1]
    return (
        f"At {length}, half of {quote_name(label)}'s {len(heads)} heads reach 90% of their weight within "
        f"{known['span90'].median():,.0f} keys; the widest, head {int(widest['head'])} of layer "
        f"{int(widest['layer'])}, needs {widest['span90']:,.0f}."
    )


def _table(means: pd.DataFrame, labels: Sequence[str]) -> Table:
    rows = []
    for label in labels:
        for column, (name, number_format) in _MEANS.items():
            known = by_length(means.dropna(subset=[column]), label, numbers=column)
            cells = {length: format(mean, number_format) for length, mean in known.items()}
            if cells:
                rows.append((Cell(f", {name}", name=label), cells))
    caption = "Attention: keys, weights, entropy and remaining stick, mean over heads"
    named: dict[str, Any] = {"caption": caption, "folded": f"Numbers: {caption}"}
    return Table.by_length(rows, lengths=column_values(means), stem="spans", **named)


def span_grids(heads: pd.DataFrame, lengths: Sequence[int], caption: Caption) -> dict[str, Any]:
    """Returns the Vega-Lite specification of one model's spans.

    For each context length and each share of attention weight it has a grid of layers and heads. The cell of a head
    that gives no key any weight is empty.

    Args:
        heads: table rows of one model, with columns for layer, head, spans in keys and remainder.
        lengths: context lengths in tokens; there is one row of grids for each.
        caption: title, description and other texts of the figure.
    """
    sticks = bool((heads["remainder"].fillna(0) > 0).any())
    fields = {**_SHARES, "remainder": _REMAINDER} if sticks else _SHARES
    width, height = (_side(int(heads[name].nunique())) for name in ("head", "layer"))
    grids = []
    for length in lengths:
        rows = [_row(row) for row in records(heads[heads["context_length_tokens"] == length])]
        last = length == lengths[-1]
        for place, (field, share_name) in enumerate(fields.items()):
            ends = {"domain": [0, 1]} if field == "remainder" else {"type": "log", "domain": [1, max(lengths)]}
            scale = {"scheme": "cividis", **ends}
            legend = _legend(field) if last and field in ("span50", "remainder") else None
            encoding = {
                "x": _axis("head", named=last),
                # a row has two or four grids: labels of layers on every second grid are then at the start of each row
                "y": _axis("layer", named=place % 2 == 0),
                "color": {"field": field, "type": "quantitative", "scale": scale, "legend": legend},
                "tooltip": tooltip_fields(_TOOLTIP),
            }
            grids.append(_grid(rows, f"{length_text(length)}: {share_name}", (width, height), field, encoding))
    return {
        **caption.vega,
        "usermeta": {"partPixels": width + 62},
        "padding": 6,
        "columns": len(fields),
        "spacing": {"row": 14, "column": 18},
        "concat": grids,
        "resolve": {"scale": {"color": "independent"}},
    }


def _side(count: int) -> int:
    return min(_LONGEST_SIDE_PIXELS, max(_SHORTEST_SIDE_PIXELS, _CELL_PIXELS * count))


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    spans = {field: None if math.isnan(row[field]) else float(row[field]) for field in _SHARES}
    remainder = None if math.isnan(row["remainder"]) else float(row["remainder"])
    texts = {f"{field}_text": "no weight" if value is None else f"{value:,.1f} keys" for field, value in spans.items()}
    return {
        "layer": int(row["layer"]),
        "head": int(row["head"]),
        **spans,
        **texts,
        "remainder": remainder,
        "remainder_text": "not recorded" if remainder is None else f"{remainder:.1%}",
        "length_text": f"{int(row['context_length_tokens']):,} tokens",
    }


def _legend(field: str) -> dict[str, Any]:
    title, number_format = ("stick", ".0%") if field == "remainder" else ("keys (log scale)", "~s")
    named = {"title": title, "format": number_format}
    return {**named, "orient": "bottom", "direction": "horizontal", "gradientLength": 96, "gradientThickness": 8}


def _axis(field: str, *, named: bool) -> dict[str, Any]:
    axis = {"domain": False, "ticks": False, "labelOverlap": True, "labelAngle": 0}
    layout = axis if named else {**axis, "labels": False}
    return {"field": field, "type": "ordinal", "title": field if named else None, "axis": layout}


def _grid(
    rows: Sequence[Mapping[str, Any]], title: str, size: tuple[int, int], field: str, encoding: dict[str, Any]
) -> dict[str, Any]:
    cells = {"transform": [{"filter": f"isValid(datum.{field})"}], "mark": {"type": "rect", "style": "heat-cell"}}
    return {
        "title": {"text": title, "fontSize": 12, "fontWeight": 500, "offset": 5, "anchor": "start", "frame": "group"},
        "width": size[0],
        "height": size[1],
        "data": {"values": list(rows)},
        "layer": [{**cells, "encoding": encoding}],
    }
