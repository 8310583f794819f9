"""The section on effective attention spans: their mean against length, and every head of every model."""

from collections.abc import Mapping, Sequence

import pandas as pd

from sbeval.reports.analyse.names import in_words
from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.figures.attention import MEASURES, attention_figure
from sbeval.reports.figures.curves import length_domain, length_rows, training_marks
from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.spans import span_figure
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.results import records
from sbeval.reports.read.spans import SPANS
from sbeval.reports.section import Figure, Kind, Material, Section
from sbeval.reports.table import NOT_MEASURED, Cell, Table, row, texts

_MOST_CELLS = 6000
_SHOWN = 2
_MEANS = {
    "span50": ("half of the weight", ",.1f"),
    "span90": ("90% of the weight", ",.1f"),
    "first_token": ("weight on the first token", ".1%"),
    "entropy": ("entropy in nats", ".2f"),
    "remainder": ("remaining stick", ".1%"),
}


def spans_section(material: Material) -> Section | None:
    """Builds the section, None where no run looked at spans."""
    spans = material.results[SPANS]
    if spans.empty:
        return None
    # a softmax head gives all its weight to keys: it has no stick of which nothing remains
    sticks = spans.groupby("setting")["remainder"].transform("max") > 0
    spans = spans.assign(remainder=spans["remainder"].where(sticks))
    looks = material.looks_of(spans["setting"])
    figures = [_why_figure(material, spans, looks), _means_figure(material, spans, looks)]
    for label in looks:
        own = spans[spans["setting"] == label]
        figures.append(_heads_figure(material, label, own, folded=len(figures) > _SHOWN))
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
        tables=(_table(spans, list(looks)),),
    )


def _why_figure(material: Material, spans: pd.DataFrame, looks: Mapping[str, Look]) -> Figure:
    means = spans.groupby(["setting", "context_length_tokens"], sort=False)[list(MEASURES)].mean().reset_index()
    title = "Where the weight goes"
    parts = []
    for label in looks:
        own = means[(means["setting"] == label) & means["entropy"].notna()].sort_values("context_length_tokens")
        if len(own):
            first, last = own.iloc[0], own.iloc[-1]
            ends = [length_text(int(row["context_length_tokens"])) for row in (first, last)]
            sink = f"first token's weight {first['first_token']:.1%} to {last['first_token']:.1%}"
            change = f"entropy {first['entropy']:.2f} to {last['entropy']:.2f} nats, {sink}"
            parts.append(f"{in_words(label)} from {ends[0]} to {ends[1]}: {change}")
    finding = "; ".join(parts[:4]) + "." if parts else "Entropies were not measured: spans and sticks alone."
    spec = attention_figure(
        means, looks=looks, training_lengths=material.training_lengths, title=title, description=f"{title}. {finding}"
    )
    explanation = (
        "The same queries at every length, each at the end of its window. A line that bends where windows pass the "
        "training length shows what breaks."
    )
    return material.figure(
        {"attention": spec}, "attention", title=title, finding=finding, explanation=explanation, wide=True
    )


def _means_figure(material: Material, spans: pd.DataFrame, looks: Mapping[str, Look]) -> Figure:
    means = spans.groupby(["setting", "context_length_tokens"], sort=False)["span90"].mean().rename("value")
    rows = means.reset_index().assign(ci95_low=float("nan"), ci95_high=float("nan")).dropna(subset=["value"])
    order = [label for label in looks if (rows["setting"] == label).any()]
    parts = []
    for label in order:
        last = rows[rows["setting"] == label].sort_values("context_length_tokens").iloc[-1]
        parts.append(
            f"{in_words(label)} {last['value']:,.0f} keys at {length_text(int(last['context_length_tokens']))}"
        )
    title, finding = "Span at 90%, mean over heads", "; ".join(parts[:4]) + "."
    marks = training_marks(material.training_lengths, order)
    spec = line_figure(
        length_rows(rows, order, ",.1f"),
        axes=Axes(
            x_title="context length (tokens, log scale)",
            x_domain=length_domain(rows, marks),
            y_title="keys (log scale)",
            y_scale="log",
            y_format="~s",
        ),
        looks={label: looks[label] for label in order},
        marks=marks,
        tooltip={"setting": "model", "length_text": "context", "value_text": "keys"},
        title=title,
        subtitle="keys until 90% of a query's weight",
        description=f"{title}. {finding}",
    )
    explanation = "A line that rises with the context belongs to heads that look everywhere."
    return material.figure({"span90": spec}, "span-means", title=title, finding=finding, explanation=explanation)


def _heads_figure(material: Material, label: str, heads: pd.DataFrame, *, folded: bool) -> Figure:
    lengths = sorted(int(length) for length in heads["context_length_tokens"].unique())
    shown = _shown_lengths(lengths, len(heads) // len(lengths))
    title, finding = (
        f"{label}: span of every head",
        _finding(label, heads[heads["context_length_tokens"] == lengths[-1]]),
    )
    left_out = [length_text(length) for length in lengths if length not in shown]
    explanation = "One row a context length, one column a share of the weight; an empty cell gave weight to no key."
    if left_out:
        explanation += f" Not drawn: {', '.join(left_out)}."
    spec = span_figure(
        heads,
        lengths=shown,
        title=title,
        subtitle="keys, counted back from the newest",
        description=f"{title}. {finding}",
    )
    return material.figure(
        {"span": spec},
        f"span-{safe_stem(label)}",
        title=title,
        finding=finding,
        explanation=explanation,
        wide=True,
        folded=folded,
    )


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


def _table(spans: pd.DataFrame, labels: Sequence[str]) -> Table:
    lengths = sorted(int(length) for length in spans["context_length_tokens"].unique())
    rows = []
    for label in labels:
        own = spans[spans["setting"] == label]
        for field, (words, number_format) in _MEANS.items():
            if own[field].isna().all():
                continue
            means = {
                int(mean["context_length_tokens"]): mean[field]
                for mean in records(own.groupby("context_length_tokens")[field].mean().reset_index())
            }
            cells = [
                NOT_MEASURED
                if length not in means or means[length] != means[length]
                else format(means[length], number_format)
                for length in lengths
            ]
            rows.append(row(Cell(f", {words}", name=label), cells))
    caption = "Attention: keys, weights, entropy and remaining stick, mean over heads"
    return Table(
        stem="spans",
        caption=caption,
        header=texts("model", *map(length_text, lengths)),
        rows=tuple(rows),
        folded=f"Numbers: {caption}",
    )


KIND = Kind(section=spans_section, readers=(SPANS,))
