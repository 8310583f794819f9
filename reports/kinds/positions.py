"""The section "NLL by position": figures of NLL by position in one long window, and of its difference to the baseline.

The baseline is the model whose NLL is subtracted from that of the others.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.reports.analyse.findings import DOUBTFUL_TEXT, signed
from sbeval.reports.analyse.panels import CORPUS_NAMES, safe_stem
from sbeval.reports.analyse.selection import comparable
from sbeval.reports.analyse.verdicts import DOUBTFUL
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.lines import COUNTED, METRIC_NAMES, Axes, count_text, line_figure
from sbeval.reports.kinds.position_sums import (
    BINS,
    POSITION_SUMS,
    UNLOGGED,
    Bin,
    PositionBand,
    first_pass,
    position_bands,
)
from sbeval.reports.read.fields import LARGEST_NATS, length_text, listed, name_list, quote_name
from sbeval.reports.read.results import by_model, records
from sbeval.reports.section import Figure, Kind, Material, Section
from sbeval.rope_parameters import LENGTH_DEPENDENT, kind_of, rope_entries

_TOOLTIP = {"setting": "model", "range_text": "positions", "value_text": "", "interval_text": "95% interval"} | COUNTED


def _section(material: Material) -> Section:
    """Builds the section "NLL by position". Models whose tokenizer differs from the baseline's are left out."""
    positions = first_pass(material.results[BINS])
    baseline = material.baseline
    looks = material.looks_of(positions["setting"])
    figures: list[Figure] = []
    texts = positions[["corpus", "corpus_sha256"]].astype(object).fillna("")
    several = texts.drop_duplicates()["corpus"].duplicated(keep=False).any()
    for corpus, digest in dict.fromkeys(texts.itertuples(index=False, name=None)):
        on_text = positions[(texts == [corpus, digest]).all(axis=1)]
        table = _whole_bins(comparable(on_text, baseline))
        bases = _bases(material, table)
        name = CORPUS_NAMES.get(corpus, corpus or "Text") + (f" ({digest[:6]})" if several else "")
        stem = "-".join([safe_stem(corpus), "position", *([digest[:6]] if several else [])])
        figures.append(_levels(material, table, name, stem, [_doubt(material, table), bases]))
        bands, without_bands = _bands(material, table)
        differences = difference_to_baseline(table, baseline, bands)
        if not differences.empty:
            figures.append(_differences(material, differences, name, stem, [_band_text(bands), without_bands, bases]))
    bands_sentence = (
        "Bands: 95% intervals over source documents, point by point."
        if positions["ci95_low"].notna().any()
        else "No bands: the results hold no intervals by position."
    )
    return Section(
        identifier="positions",
        title="NLL by position",
        lead="One pass at one context length; every point is the mean over targets that far into the window. "
        f"{bands_sentence} A last bin cut short by the window's end is not drawn.",
        figures=tuple(figures),
        legend=looks,
    )


POSITIONS = Kind(section=_section, readers=(BINS, POSITION_SUMS), needs=BINS)


def difference_to_baseline(
    table: pd.DataFrame, baseline: str, bands: Mapping[str, Mapping[Bin, PositionBand]]
) -> pd.DataFrame:
    """Subtracts the NLL of the baseline from that of every other model, in each position bin that both models have.

    Args:
        table: a table with columns setting (the model's label), first, last (positions) and nll: one row for each model
            and bin.
        baseline: label of the baseline; its rows are left out of the result.
        bands: model label to (bin to the paired interval of the difference).

    Returns:
        The table with differences in the column `nll`, with the intervals of `bands`; NaN if a bin has none there. The
        intervals of the two models' NLL are dropped, since no interval of the difference follows from them.
    """
    base = table[table["setting"] == baseline].set_index(["first", "last"])["nll"]
    differences = table[table["setting"] != baseline].copy()
    bins = pd.MultiIndex.from_frame(differences[["first", "last"]])
    differences["nll"] = differences["nll"].to_numpy() - base.reindex(bins).to_numpy()
    no_band = PositionBand()
    row_bands = [
        bands.get(row["setting"], {}).get((int(row["first"]), int(row["last"])), no_band)
        for row in records(differences)
    ]
    differences["ci95_low"] = [band.low for band in row_bands]
    differences["ci95_high"] = [band.high for band in row_bands]
    return differences.dropna(subset=["nll"]).reset_index(drop=True)


def _bands(material: Material, table: pd.DataFrame) -> tuple[dict[str, dict[Bin, PositionBand]], str]:
    """Returns model label to the intervals of its difference to the baseline in every bin, and a sentence.

    The sentence says which models and bins have no interval, and why.
    """
    results, baseline = material.results, material.baseline
    facts = {row["setting"]: row for row in records(table.drop_duplicates("setting"))}
    bands: dict[str, dict[Bin, PositionBand]] = {}
    lacking: dict[str, list[str]] = {}
    for label, row in facts.items():
        if label == baseline or baseline not in facts:
            continue
        base = facts[baseline]
        sums, base_sums = (results.behind(POSITION_SUMS, side) or UNLOGGED for side in (row, base))
        if sums.obstacle or base_sums.obstacle:
            who = label if sums.obstacle else baseline
            reason = f"samples of {quote_name(who)} {sums.obstacle or base_sums.obstacle}"
        elif row["context_length_tokens"] != base["context_length_tokens"]:
            reason = "the passes have different lengths"
        else:
            bands[label], reason = position_bands(sums, base_sums)
        if reason:
            lacking.setdefault(reason, []).append(label)
    sentences = []
    for reason, labels in lacking.items():
        where = " at some positions" if any(map(bands.get, labels)) else ""
        sentences.append(f"No band{where} for {name_list(labels)}: {reason}.")
    return bands, " ".join(sentences)


def _band_text(bands: Mapping[str, Mapping[Bin, PositionBand]]) -> str:
    if not any(bands.values()):
        return ""
    bands_text = "Bands: 95%, paired by document on identical targets, simultaneous over the positions."
    doubtful = any(band.doubtful for of_model in bands.values() for band in of_model.values())
    return f"{bands_text} {DOUBTFUL}: {DOUBTFUL_TEXT}." if doubtful else bands_text


def _doubt(material: Material, table: pd.DataFrame) -> str:
    """Returns a warning if some model's documents are so uneven in size that intervals may be too narrow; else empty.

    Document sizes are read from the samples. If samples were not logged, the run's record (`uneven_documents`) is used.
    """
    for row in records(table.drop_duplicates("setting")):
        sums = material.results.behind(POSITION_SUMS, row) or UNLOGGED
        recorded = material.results.model(row["setting"]).uneven_documents(row["task"])
        if recorded if sums.obstacle else sums.doubtful:
            return f"{DOUBTFUL}: {DOUBTFUL_TEXT}."
    return ""


def _whole_bins(table: pd.DataFrame) -> pd.DataFrame:
    """Drops the last bin if it is narrower than the one before it, because the window ends within it."""
    whole = []
    for _, bins in table.groupby(["setting", "task"], sort=False):
        widths = (bins["last"] - bins["first"]).tolist()
        whole.append(bins.iloc[:-1] if len(bins) > 1 and widths[-1] < widths[-2] else bins)
    return pd.concat(whole, ignore_index=True)


def _passes(table: pd.DataFrame) -> str:
    """Returns, in words, the context lengths of the forward passes that the figures show."""
    lengths = sorted({int(length) for length in table["context_length_tokens"].dropna()})
    return ", ".join(map(length_text, lengths)) if lengths else "a length that was not recorded"


def _bases(material: Material, table: pd.DataFrame) -> str:
    """Returns which input length set the RoPE frequencies, for models whose RoPE scaling depends on it; else empty."""
    sentences = []
    for label in dict.fromkeys(table["setting"]):
        scalings = rope_entries(material.results.model(label).record.rope_scaling).values()
        if any(kind_of(scaling) in LENGTH_DEPENDENT for scaling in scalings):
            passes = _passes(table[table["setting"] == label])
            sentences.append(f"{quote_name(label)}: RoPE's base is set for {passes} at every position.")
    return " ".join(sentences)


def _levels(material: Material, table: pd.DataFrame, name: str, stem: str, remarks: Sequence[str]) -> Figure:
    explanation = " ".join(filter(None, remarks))
    subtitle = explanation or f"One pass at {_passes(table)}"
    findings = {metric: _level_finding(material, table, metric) for metric in ("nll", "token_perplexity")}
    title = f"{name}: NLL by position"
    nll = Caption(title=title, finding=findings["nll"], explanation=explanation, subtitle=subtitle)
    perplexity = dataclasses.replace(nll, finding=findings["token_perplexity"])
    levels = _figure(material, table, nll), _figure(material, table, perplexity, perplexity=True)
    return material.figure(dict(zip(findings, levels, strict=True)), stem, nll, findings=findings)


def _level_finding(material: Material, table: pd.DataFrame, metric: str) -> str:
    def number_text(nll: float) -> str:
        return f"{nll:.2f}" if metric == "nll" else f"{math.exp(min(nll, LARGEST_NATS)):,.1f}"

    sentences = []
    rows_of = by_model(table)
    for label in material.looks:
        if label not in rows_of:
            continue
        bins = rows_of[label]
        trained = material.training_lengths.get(label)
        inside = [row for row in bins if trained is not None and row["last"] <= trained]
        start = inside[-1] if inside else bins[0]
        last = bins[-1]
        ends = [f"{number_text(row['nll'])} around position {length_text(int(row['last']))}" for row in (start, last)]
        range_text = f"is {ends[0]}" if ends[0] == ends[1] else f"goes from {ends[0]} to {ends[1]}"
        sentences.append(f"{quote_name(label)} {range_text}")
    return f"{METRIC_NAMES[metric]}: {listed(sentences)}"


def _differences(material: Material, table: pd.DataFrame, name: str, stem: str, remarks: Sequence[str]) -> Figure:
    sentences = []
    for label, bins in by_model(table).items():
        last = bins[-1]
        side = "below" if last["nll"] < 0 else "above"
        band = "" if math.isnan(last["ci95_low"]) else f" ({signed(last['ci95_low'])} to {signed(last['ci95_high'])})"
        size = signed(abs(last["nll"]))[1:]
        sentences.append(f"{quote_name(label)} ends {size} nats {side} {quote_name(material.baseline)}{band}")
    how_to_read = "Below zero is better than the baseline"
    explanation = " ".join([f"{how_to_read}.", *filter(None, remarks)])
    title = f"{name}: difference to {material.baseline}"
    caption = Caption(title=title, finding=listed(sentences), explanation=explanation, subtitle=how_to_read)
    spec = _figure(material, table, caption, difference=True)
    return material.figure({"nll": spec}, f"{stem}-difference", caption)


def _figure(
    material: Material, table: pd.DataFrame, caption: Caption, *, perplexity: bool = False, difference: bool = False
) -> dict[str, Any]:
    """Returns the Vega-Lite specification of NLL, perplexity (log axis) or differences in NLL against position."""
    looks = material.looks_of(material.results[BINS]["setting"])
    order = list(looks)
    rows = [_row(row, perplexity, end_digits=".3f" if difference else ",.2f") for row in records(table)]
    positions = [row["x"] for row in rows]
    level_title = "perplexity per token (log scale)" if perplexity else "NLL (nats per token)"
    quantity = "difference in NLL (nats per token)" if difference else level_title
    return line_figure(
        sorted(rows, key=lambda row: (order.index(row["setting"]), row["x"])),
        caption,
        axes=Axes(
            x_title="position in the window (tokens, log scale)",
            x_domain=(max(1, math.floor(min(positions))), math.ceil(max(positions))),
            y_title=quantity,
            y_scale="log" if perplexity else "linear",
            y_format="~g" if perplexity else None,
            levels={0.0: ""} if difference else {},
        ),
        looks=looks,
        tooltip=_TOOLTIP | {"value_text": quantity.removesuffix(" (log scale)")},
    )


def _row(row: Mapping[str, Any], perplexity: bool, *, end_digits: str) -> dict[str, Any]:
    first, last = float(row["first"]), float(row["last"])
    measured = math.isfinite(row["ci95_low"])
    nats = [float(row[key]) for key in ("nll", "ci95_low", "ci95_high")]
    value, low, high = (math.exp(min(number, LARGEST_NATS)) if perplexity else number for number in nats)
    return {
        "setting": row["setting"],
        "x": math.sqrt(max(1.0, first) * max(1.0, last)),
        "y": value,
        "range_text": f"{int(first):,} to {int(last):,}",
        "low": low if measured else None,
        "high": high if measured else None,
        "value_text": format(value, ",.2f" if perplexity else ".3f"),
        "interval_text": f"{low:{end_digits}} to {high:{end_digits}}" if measured else "none",
        "tokens_text": f"{int(row['tokens']):,}",
        "clusters_text": count_text(row["clusters"]),
    }
