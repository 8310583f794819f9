"""Effective attention spans: of every layer and head as results hold them, and their means against context length."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.foreign_files import usable_number
from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.ruler import by_length
from sbeval.reports.figures.curves import SHARES, length_domain, length_figure, length_rows
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.lines import Axes, small_multiples
from sbeval.reports.figures.theme import Look
from sbeval.reports.kinds.span_grids import span_grids
from sbeval.reports.read.fields import context_metric, in_words, length_text, shown_name
from sbeval.reports.read.files import Notes
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.results import Reader, column_values
from sbeval.reports.section import Cell, Figure, Kind, Material, Section, Table, length_table

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
"""Column to its words, the format of its numbers and its axis."""
_MEANS = {
    "span50": ("half of the weight", ",.1f"),
    "span90": ("90% of the weight", ",.1f"),
    "first_token": ("weight on the first token", ".1%"),
    "entropy": ("entropy in nats", ".2f"),
    "remainder": ("remaining stick", ".1%"),
}


def _tabulate(models: Sequence[EvaluatedModel], notes: Notes) -> pd.DataFrame:
    """Returns one row a layer, head and context length; spans in keys, NaN where there is none.

    Of several runs of one model the first of `EvaluatedModel.task_runs` counts, length by length.
    """
    rows: list[list[Any]] = []
    for model in models:
        seen: dict[str, set[int]] = defaultdict(set)
        for _, task in model.task_runs():
            name = shown_name(task.name)
            for key, heads in task.metrics.items():
                metric, length = context_metric(key) or ("", 0)
                if metric == "attention_span" and isinstance(heads, list) and length not in seen[name]:
                    seen[name].add(length)
                    rows += [[model.label, name, length, *head] for head in map(_head, heads) if head]
    return pd.DataFrame(rows, columns=_PLACE + _NUMBERS)


def _head(written: object) -> list[float]:
    # results of earlier versions end with the remaining stick
    if (
        not isinstance(written, list)
        or len(written) not in (6, 8)
        or any(type(place) is not int for place in written[:2])
    ):
        return []
    numbers = [math.nan if (number := usable_number(value)) is None else number for value in written[2:]]
    return [*written[:2], *numbers, *[math.nan] * (8 - len(written))]


def _one_seed(rows: pd.DataFrame, pooled_label: Mapping[str, str], notes: Notes) -> pd.DataFrame:
    """Keeps one seed of each group: heads of different seeds have nothing to do with each other."""
    labels = rows["setting"].map(lambda label: pooled_label.get(label, label))
    kept = rows["setting"] == rows["setting"].groupby(labels).transform("first")
    for label in dict.fromkeys(labels[~kept]):
        notes.add(None, f"{label}: attention spans are shown for one of its seeds, since heads cannot be averaged.")
    return rows.assign(setting=labels)[kept].reset_index(drop=True)


HEADS = Reader(read=_tabulate, pool=_one_seed)


def _section(material: Material) -> Section | None:
    """Returns None where no run looked at spans."""
    spans = material.results[HEADS]
    if spans.empty:
        return None
    # a softmax head gives all its weight to keys: it has no stick of which nothing remains
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
            "How many keys, counted back from the newest, it takes to reach 50, 90 and 99% of a query's weight; mean "
            "over the last queries of a window. A softmax head often puts weight it has no use for on the first token, "
            "its sink; what a stick-breaking head gives to no key is its remaining stick. Entropy is that of the "
            "weights divided by their sum."
        ),
        figures=tuple(figures),
        legend=looks,
        tables=(_table(means, list(looks)),),
    )


SPANS = Kind(section=_section, readers=(HEADS,))


def _value_of(means: pd.DataFrame, column: str) -> pd.DataFrame:
    """Returns the means of one column, where it is known, as the numbers of lines without a band."""
    known = means.dropna(subset=[column])
    return known.assign(value=known[column], ci95_low=math.nan, ci95_high=math.nan)


def _why_figure(material: Material, means: pd.DataFrame, looks: Mapping[str, Look]) -> Figure:
    sentences = []
    for label in looks:
        known = means[(means["setting"] == label) & means["entropy"].notna()].sort_values("context_length_tokens")
        if len(known):
            first, last = known.iloc[0], known.iloc[-1]
            start, end = (length_text(int(mean["context_length_tokens"])) for mean in (first, last))
            sink = f"first token's weight {first['first_token']:.1%} to {last['first_token']:.1%}"
            change = f"entropy {first['entropy']:.2f} to {last['entropy']:.2f} nats, {sink}"
            sentences.append(f"{in_words(label)} from {start} to {end}: {change}")
    nothing = "Entropies were not measured: spans and sticks alone."
    caption = Caption(
        title="Where the weight goes",
        finding="; ".join(sentences[:4]) + "." if sentences else nothing,
        explanation="The same queries at every length, each at the end of its window. A line that bends where windows "
        "pass the training length shows what breaks.",
        subtitle="mean over heads, by context length",
    )
    domain = length_domain(means, looks)
    panels = {}
    for column, (words, number_format, axis) in _MEASURES.items():
        known = _value_of(means, column)
        if len(known):
            axes = Axes(x_title=None, x_octaves=2, x_domain=domain, y_title=None, **axis)
            panels[words] = (length_rows(known, looks, number_format), axes)
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
            sentences.append(f"{in_words(label)} {last['value']:,.0f} keys at {length}")
    caption = Caption(
        title="Span at 90%, mean over heads",
        finding="; ".join(sentences[:4]) + ".",
        explanation="A line that rises with the context belongs to heads that look everywhere.",
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
        explanation="One row a context length, one column a share of the weight; an empty cell gave weight to no key."
        + (f" Not drawn: {left_out}." if left_out else ""),
        subtitle="keys, counted back from the newest",
    )
    spec = span_grids(heads, shown, caption)
    return material.figure({"span": spec}, f"span-{safe_stem(label)}", caption, wide=True, folded=folded)


def _shown_lengths(lengths: Sequence[int], heads: int) -> list[int]:
    """Returns as many lengths as stay readable, both ends first."""
    count = max(1, min(len(lengths), _MOST_CELLS // (4 * max(1, heads))))
    if count == 1:
        return [lengths[-1]]
    return sorted({lengths[round(place * (len(lengths) - 1) / (count - 1))] for place in range(count)})


def _finding(label: str, heads: pd.DataFrame) -> str:
    length = length_text(int(heads["context_length_tokens"].iloc[0]))
    known = heads.dropna(subset=["span90"])
    if known.empty:
        return f"At {length}, none of {in_words(label)}'s {len(heads)} heads gives weight to a key."
    widest = known.sort_values("span90").iloc[-1]
    return (
        f"At {length}, half of {in_words(label)}'s {len(heads)} heads reach 90% of their weight within "
        f"{known['span90'].median():,.0f} keys; the widest, head {int(widest['head'])} of layer "
        f"{int(widest['layer'])}, needs {widest['span90']:,.0f}."
    )


def _table(means: pd.DataFrame, labels: Sequence[str]) -> Table:
    rows = []
    for label in labels:
        for column, (words, number_format) in _MEANS.items():
            known = by_length(means.dropna(subset=[column]), label, numbers=column)
            cells = {length: format(mean, number_format) for length, mean in known.items()}
            rows += [(Cell(f", {words}", name=label), cells)] if cells else []
    caption = "Attention: keys, weights, entropy and remaining stick, mean over heads"
    return length_table(rows, lengths=column_values(means), stem="spans", caption=caption, folded=f"Numbers: {caption}")
