"""The section on NLL by position in one long window, and the difference to a baseline."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.reports.analyse.findings import DOUBTFUL_WORDS, signed
from sbeval.reports.analyse.names import in_words, name_list
from sbeval.reports.analyse.overview import DOUBTFUL
from sbeval.reports.analyse.panels import CORPUS_WORDS, safe_stem
from sbeval.reports.analyse.positions import (
    PositionBand,
    difference_to_baseline,
    doubtful_positions,
    position_bands,
)
from sbeval.reports.figures.curves import METRIC_WORDS
from sbeval.reports.figures.positions import position_figure
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import LARGEST_NATS, length_text
from sbeval.reports.read.positions import POSITION_SUMS, POSITIONS, UNLOGGED, Bin, SumsByPosition
from sbeval.reports.read.results import records
from sbeval.reports.section import Figure, Kind, Material, Section, listed

# kinds of RoPE scaling whose frequencies depend on the length of the request
_FOLLOWS_REQUEST = ("dynamic", "longrope")


def positions_section(material: Material) -> Section | None:
    """Builds the section, None where no run recorded positions.

    Models with different tokenizers are not drawn on one axis: only those that share the baseline's stay.
    """
    positions, baseline = material.results[POSITIONS], material.baseline
    looks = material.looks_of(positions["setting"])
    if positions.empty:
        return None
    figures: list[Figure] = []
    texts = positions[["corpus", "corpus_sha256"]].astype(object).fillna("")
    several = texts.drop_duplicates()["corpus"].duplicated(keep=False).any()
    for corpus, digest in dict.fromkeys(texts.itertuples(index=False, name=None)):
        own = positions[(texts == [corpus, digest]).all(axis=1)]
        table = _whole_bins(_comparable(own, baseline))
        bases = _bases(table, {model.label: model.record.rope_scaling for model in material.results.models})
        name = CORPUS_WORDS.get(corpus, corpus or "Text") + (f" ({digest[:6]})" if several else "")
        stem = "-".join([safe_stem(corpus), "position", *([digest[:6]] if several else [])])
        remarks = " ".join(part for part in (_doubt(material, table), bases) if part)
        figures.append(_levels(material, table, looks, f"{name}: NLL by position", stem, remarks))
        paired, unpaired = _bands(table, material.results[POSITION_SUMS], baseline)
        others = difference_to_baseline(table, baseline, paired)
        if not others.empty:
            title = f"{name}: difference to {baseline}"
            remarks = " ".join(part for part in (_band_words(paired), unpaired, bases) if part)
            figures.append(_differences(material, others, looks, title, f"{stem}-difference", remarks))
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
        figures=tuple(figures),
        legend=looks,
    )


def _bands(
    table: pd.DataFrame, sums: Mapping[tuple[str, str], SumsByPosition], baseline: str
) -> tuple[dict[str, dict[Bin, PositionBand]], str]:
    """Returns each model's bands against the baseline, and a sentence on those that have none."""
    facts = {row["setting"]: row for row in records(table.drop_duplicates("setting"))}
    none = SumsByPosition(sums={}, obstacle=UNLOGGED)
    found: dict[str, dict[Bin, PositionBand]] = {}
    lacking: dict[str, list[str]] = {}
    for label, own in facts.items():
        if label == baseline or baseline not in facts:
            continue
        base = facts[baseline]
        mine, theirs = sums.get((label, own["task"]), none), sums.get((baseline, base["task"]), none)
        if mine.obstacle or theirs.obstacle:
            who = label if mine.obstacle else baseline
            reason = f"samples of {in_words(who)} {mine.obstacle or theirs.obstacle}"
        elif own["context_length_tokens"] != base["context_length_tokens"]:
            reason = "the passes have different lengths"
        else:
            found[label], reason = position_bands(mine, theirs)
        if reason:
            lacking.setdefault(reason, []).append(label)
    words = []
    for reason, labels in lacking.items():
        where = " at some positions" if any(map(found.get, labels)) else ""
        words.append(f"No band{where} for {name_list(labels)}: {reason}.")
    return found, " ".join(words)


def _band_words(bands: Mapping[str, Mapping[Bin, PositionBand]]) -> str:
    if not any(bands.values()):
        return ""
    words = "Bands: 95%, paired by document on identical targets, simultaneous over the positions."
    doubtful = any(band.doubtful for own in bands.values() for band in own.values())
    return f"{words} {DOUBTFUL}: {DOUBTFUL_WORDS}." if doubtful else words


def _doubt(material: Material, table: pd.DataFrame) -> str:
    """Says whether intervals are doubtful, by the sums by position or, without samples, by what the run recorded."""
    for row in records(table.drop_duplicates("setting")):
        sums = material.results[POSITION_SUMS].get((row["setting"], row["task"]))
        logged = None if sums is None or sums.obstacle else sums
        recorded = material.results.model(row["setting"]).uneven_documents(row["task"])
        if recorded if logged is None else doubtful_positions(logged):
            return f"{DOUBTFUL}: {DOUBTFUL_WORDS}."
    return ""


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
        sentences.append(f"{in_words(label)}: RoPE's base is set for {_passes(own)} at every position.")
    return " ".join(sentences)


def _levels(
    material: Material, table: pd.DataFrame, looks: Mapping[str, Look], title: str, stem: str, remarks: str
) -> Figure:
    levels = {
        metric: _level_finding(table, list(looks), material.training_lengths, metric)
        for metric in ("nll", "token_perplexity")
    }
    variants = {
        metric: position_figure(
            table,
            looks=looks,
            training_lengths=material.training_lengths,
            title=title,
            subtitle=remarks or f"One pass at {_passes(table)}",
            description=f"{title}. {finding}",
            perplexity=metric == "token_perplexity",
        )
        for metric, finding in levels.items()
    }
    return material.figure(variants, stem, title=title, finding=levels["nll"], findings=levels, explanation=remarks)


def _differences(
    material: Material, table: pd.DataFrame, looks: Mapping[str, Look], title: str, stem: str, remarks: str
) -> Figure:
    parts = []
    for label in dict.fromkeys(table["setting"]):
        last = records(table[table["setting"] == label])[-1]
        side = "below" if last["nll"] < 0 else "above"
        band = "" if math.isnan(last["ci95_low"]) else f" ({signed(last['ci95_low'])} to {signed(last['ci95_high'])})"
        parts.append(
            f"{in_words(label)} ends {signed(abs(last['nll']))[1:]} nats {side} {in_words(material.baseline)}{band}"
        )
    finding = listed(parts)
    spec = position_figure(
        table,
        looks=looks,
        training_lengths=material.training_lengths,
        title=title,
        subtitle="Below zero is better than the baseline",
        description=f"{title}. {finding}",
        difference=True,
    )
    explanation = f"Below zero is better than the baseline. {remarks}".rstrip()
    return material.figure({"nll": spec}, stem, title=title, finding=finding, explanation=explanation)


def _level_finding(table: pd.DataFrame, order: Sequence[str], training_lengths: Mapping[str, int], metric: str) -> str:
    def shown(nll: float) -> str:
        return f"{nll:.2f}" if metric == "nll" else f"{math.exp(min(nll, LARGEST_NATS)):,.1f}"

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
            f"{in_words(label)} goes from {shown(start['nll'])} around position {length_text(int(start['last']))} "
            f"to {shown(last['nll'])} around {length_text(int(last['last']))}"
        )
    return f"{METRIC_WORDS[metric]}: {listed(parts)}"


KIND = Kind(section=positions_section, readers=(POSITIONS, POSITION_SUMS))
