"""The section on NLL by position in one long window, and the difference to a baseline."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.reports.figures.positions import difference_to_baseline, position_figure
from sbeval.reports.figures.theme import Look
from sbeval.reports.panels import CORPUS_WORDS, safe_stem
from sbeval.reports.sections import Drawing, Publish, Section
from sbeval.reports.settings import length_text
from sbeval.reports.table import records

# kinds of RoPE scaling whose frequencies depend on the length of the request
_FOLLOWS_REQUEST = ("dynamic", "longrope")


def positions_section(
    positions: pd.DataFrame,
    *,
    looks: Mapping[str, Look],
    training_lengths: Mapping[str, int],
    rope_scalings: Mapping[str, Mapping[str, Any] | None],
    baseline: str,
    publish: Publish,
) -> Section | None:
    """Builds the section, None where no run recorded positions.

    Models with different tokenizers are not drawn on one axis: only those that share the baseline's stay.
    `rope_scalings` holds each setting's scaling in force, in transformers' form.
    """
    if positions.empty:
        return None
    drawings: list[Drawing] = []
    for corpus in dict.fromkeys(positions["corpus"]):
        table = _whole_bins(_comparable(positions[positions["corpus"] == corpus], baseline))
        bases = _bases(table, rope_scalings)
        name = CORPUS_WORDS.get(str(corpus), str(corpus))
        stem = f"{safe_stem(str(corpus))}-position"
        drawings.append(_levels(table, f"{name}: NLL by position", stem, looks, training_lengths, bases, publish))
        others = difference_to_baseline(table, baseline)
        if not others.empty:
            title = f"{name}: difference to {baseline}"
            drawings.append(
                _differences(others, title, f"{stem}-difference", baseline, looks, training_lengths, bases, publish)
            )
    bands = (
        "Bands: 95% intervals over source documents, point by point."
        if positions["ci95_low"].notna().any()
        else "No bands: the results hold no intervals by position."
    )
    return Section(
        identifier="positions",
        title="NLL by position",
        lead=f"One pass at the longest context; every point is the mean over targets that far into the window. {bands} "
        "A last bin cut short by the window's end is not drawn.",
        drawings=tuple(drawings),
        legend=looks,
    )


def _comparable(table: pd.DataFrame, baseline: str) -> pd.DataFrame:
    tokenizers = table.groupby("setting", sort=False)["tokenizer_sha256"].first()
    wanted = tokenizers.get(baseline, tokenizers.iloc[0])
    same = [label for label, tokenizer in tokenizers.items() if tokenizer == wanted or pd.isna(tokenizer)]
    return table[table["setting"].isin(same)]


def _whole_bins(table: pd.DataFrame) -> pd.DataFrame:
    """Leaves out a last bin of fewer positions than the one before: the window's end cut it short."""
    kept = []
    for _, own in table.groupby(["setting", "task"], sort=False):
        widths = (own["last"] - own["first"]).tolist()
        kept.append(own.iloc[:-1] if len(own) > 1 and widths[-1] < widths[-2] else own)
    return pd.concat(kept, ignore_index=True)


def _passes(table: pd.DataFrame) -> str:
    """Names the context lengths of the passes shown."""
    lengths = sorted({int(length) for length in table["context_length_tokens"].dropna()})
    return ", ".join(map(length_text, lengths)) if lengths else "the longest context"


def _bases(table: pd.DataFrame, rope_scalings: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Says which length set the frequencies of scaled RoPE, where they follow a request's length; else nothing."""
    sentences = []
    for label in dict.fromkeys(table["setting"]):
        scaling = rope_scalings.get(label) or {}
        if scaling.get("rope_type", scaling.get("type")) not in _FOLLOWS_REQUEST:
            continue
        own = table[table["setting"] == label]
        sentences.append(f"{label}: RoPE's base is set for {_passes(own)} at every position.")
    return " ".join(sentences)


def _levels(
    table: pd.DataFrame,
    title: str,
    stem: str,
    looks: Mapping[str, Look],
    training_lengths: Mapping[str, int],
    bases: str,
    publish: Publish,
) -> Drawing:
    finding = _level_finding(table, list(looks), training_lengths)
    variants = {
        metric: position_figure(
            table,
            looks=looks,
            training_lengths=training_lengths,
            title=title,
            subtitle=bases or f"One pass at {_passes(table)}",
            description=f"{title}. {finding}",
            perplexity=metric == "token_perplexity",
        )
        for metric in ("nll", "token_perplexity")
    }
    picture, links = publish(variants["nll"], stem)
    return Drawing(title=title, finding=finding, explanation=bases, variants=variants, picture=picture, downloads=links)


def _differences(
    table: pd.DataFrame,
    title: str,
    stem: str,
    baseline: str,
    looks: Mapping[str, Look],
    training_lengths: Mapping[str, int],
    bases: str,
    publish: Publish,
) -> Drawing:
    parts = []
    for label in dict.fromkeys(table["setting"]):
        last = records(table[table["setting"] == label])[-1]
        side = "below" if last["nll"] < 0 else "above"
        parts.append(f"{label} ends {abs(last['nll']):.2f} nats {side} {baseline}")
    finding = "; ".join(parts[:4]) + "."
    spec = position_figure(
        table,
        looks=looks,
        training_lengths=training_lengths,
        title=title,
        subtitle=bases or "Below zero is better than the baseline",
        description=f"{title}. {finding}",
        difference=True,
    )
    picture, links = publish(spec, stem)
    explanation = f"Below zero is better than the baseline. {bases}".rstrip()
    return Drawing(
        title=title, finding=finding, explanation=explanation, variants={"nll": spec}, picture=picture, downloads=links
    )


def _level_finding(table: pd.DataFrame, order: Sequence[str], training_lengths: Mapping[str, int]) -> str:
    parts = []
    for label in order:
        own = records(table[table["setting"] == label])
        if not own:
            continue
        trained = training_lengths.get(label)
        inside = [row for row in own if trained is not None and row["last"] <= trained]
        last = own[-1]
        start = inside[-1] if inside else own[0]
        parts.append(
            f"{label} goes from {start['nll']:.2f} around position {length_text(int(start['last']))} "
            f"to {last['nll']:.2f} around {length_text(int(last['last']))}"
        )
    return "; ".join(parts[:4]) + "."
