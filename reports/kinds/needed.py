"""How much context target tokens need: the shortest length at which their NLL is about as low as at the longest length.

A length suffices if NLL there is at most a tolerance above NLL at the longest context length. NLL may be any amount
below it. If NLL also had to be at most a tolerance below, every target of a model that fails at long contexts would
seem to need long context. Shares are weighted by number of targets. Their simultaneous confidence intervals are
computed by bootstrap over documents, with two observations added as in `graded_errors`.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from sbeval.reports.analyse.claims import not_compared
from sbeval.reports.analyse.panels import safe_stem, text_name
from sbeval.reports.analyse.statistics import graded_errors, simultaneous_band
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.lines import COUNTED, SCORE_TOOLTIP, SHARES, length_figure
from sbeval.reports.read.fields import length_text, listed, name_list, quote_name
from sbeval.reports.read.results import LENGTH, Reader, averaging, column_values, records
from sbeval.reports.read.samples import DOCUMENT_SUMS, SumsByDocument, document_of, read_documents
from sbeval.reports.section import Cell, Fact, Figure, Kind, Material, Section, Table, interval
from sbeval.results.records import IDENTICAL_TARGETS

WITHIN_NATS = 0.01
_UNITS = {"stretch": "Stretches of targets", "document": "Documents"}
_TEXT = ["task", "corpus", "protocol", "corpus_sha256"]
STRETCH_SUMS = Reader(read=functools.partial(read_documents, by_stretch=True), pool=averaging(SumsByDocument.averaged))
"""Reads sums of NLL for every contiguous stretch of target tokens, for protocols with identical targets."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """The shares of target tokens that need at most a given context length, for one model.

    Attributes:
        shares: a table with one row for each context length: the share of targets that need at most that length, with
            95% intervals that are simultaneous over lengths.
        within_tokens: the longest measured length within the training length; None if no measured length is within the
            training length, or none is beyond it.
        beyond: (share of targets that need more than `within_tokens`, lower end, upper end of its interval); None if
            `within_tokens` is None.
        without: why `beyond` is None; empty if `beyond` is not None.
        units: number of stretches of targets, or of documents, that the shares are computed from.
    """

    shares: pd.DataFrame
    within_tokens: int | None
    beyond: tuple[float, ...] | None
    units: int
    without: str = ""


def context_needed(sums: SumsByDocument, trained_at: int | None, *, within_nats: float = WITHIN_NATS) -> Needed | None:
    """Computes the share of targets that need at most each context length.

    A unit is a document or a contiguous stretch of targets. The length that a unit needs is the shortest length at
    which its NLL is at most `within_nats` above its NLL at the longest length. All targets of a unit need that length.

    Args:
        sums: sums of NLL and tokens by unit and context length.
        trained_at: the model's training length in tokens; None if it is unknown.
        within_nats: tolerance in nats per token.

    Returns:
        The shares; None if fewer than two lengths were measured, or no unit has the same targets at all lengths.
    """
    same_S = (sums.tokens == sums.tokens[:, :1]).all(axis=1) & (sums.tokens[:, 0] > 0)
    if len(sums.lengths) < 2 or not same_S.any():
        return None
    tokens_S = sums.tokens[same_S, 0]
    nll_SK = sums.nll_nats[same_S] / tokens_S[:, None]
    enough_SK = nll_SK <= nll_SK[:, -1:] + within_nats
    suffices_SK = np.logical_or.accumulate(enough_SK, axis=1)
    documents, index_S = np.unique([document_of(name) for name in np.array(sums.clusters)[same_S]], return_inverse=True)
    of_document_CS = (index_S == np.arange(len(documents))[:, None]).astype(np.float64)
    tokens_C = of_document_CS @ tokens_S
    targets_CK = of_document_CS @ (tokens_S[:, None] * suffices_SK)
    least = graded_errors(targets_CK / tokens_C[:, None], tokens_C)
    band = simultaneous_band(targets_CK, tokens_C, least_errors_K=least)
    shares = pd.DataFrame({LENGTH: sums.lengths, "value": band.estimates, "tokens": tokens_S.sum()})
    shares["ci95_low"], shares["ci95_high"] = np.clip(band.lows, 0, 1), np.clip(band.highs, 0, 1)
    shares["clusters"] = len(documents)
    shares.loc[len(shares) - 1, ["ci95_low", "ci95_high"]] = math.nan  # the longest length suffices by definition
    within = shares[shares[LENGTH] <= (trained_at or 0)]
    if not 0 < len(within) < len(shares):  # no measured length within the training length, or none beyond it
        without = not_compared(sums.lengths, trained_at)
        return Needed(shares=shares, within_tokens=None, beyond=None, units=int(same_S.sum()), without=without)
    ends = (1 - within[["value", "ci95_high", "ci95_low"]].to_numpy(float)).tolist()
    within_tokens = sums.lengths[len(within) - 1]
    return Needed(shares=shares, within_tokens=within_tokens, beyond=tuple(ends[-1]), units=int(same_S.sum()))


def _section(material: Material) -> Section | None:
    """Builds the section "How much context is needed"; None if no targets were scored at two context lengths."""
    measured = material.results.measurements
    rows = measured[measured["protocol"].isin(IDENTICAL_TARGETS) & (measured["metric"] == "nll")]
    rows = rows[rows.groupby(["setting", *_TEXT], dropna=False)[LENGTH].transform("nunique") > 1]
    figures = []
    tables = []
    unlogged = []
    ordered = rows.sort_values("setting", key=lambda labels: labels.map(list(material.looks).index), kind="stable")
    by_text = ordered.drop_duplicates(["setting", *_TEXT]).groupby(_TEXT, dropna=False, sort=False)
    for (task, *text, _), of_text in by_text:
        by_unit: dict[str, dict[str, Needed]] = {unit: {} for unit in _UNITS}
        for row in records(of_text):
            trained = material.results.model(row["setting"]).origin_length_tokens
            for unit, reader in (("stretch", STRETCH_SUMS), ("document", DOCUMENT_SUMS)):
                if (sums := material.results.behind(reader, row)) is None:
                    unlogged.append(row["setting"])
                elif needed := context_needed(sums, trained, within_nats=material.within_nats):
                    by_unit[unit][row["setting"]] = needed
        if any(by_unit.values()):
            name = text_name(*map(str, text))
            stem = f"needed-{safe_stem(str(task))}"
            figures.append(_figure(material, by_unit, f"{name}: how much context is needed", stem))
            tables.append(_table(by_unit, f"{name}: share of targets that need at most a context length", stem))
    if not figures and not unlogged:
        return None
    missing = f"{name_list(dict.fromkeys(unlogged))}: samples were not logged (--log_samples), so this is not known."
    return Section(
        identifier="needed",
        title="How much context is needed",
        lead=f"A context suffices if its NLL is at most {material.within_nats:g} nats per token above that of the "
        "longest context, for a stretch of targets or for a document. Shown is the share of targets for which a length "
        "suffices. By this rule, a model that gets worse with context needs little of it.",
        figures=tuple(figures),
        metrics=_UNITS,
        legend=material.looks_of(label for label in rows["setting"] if label not in unlogged),
        tables=tuple(tables),
        remarks=(Fact(text=missing),) if unlogged else (),
    )


NEEDED = Kind(section=_section, readers=(STRETCH_SUMS,))


def _figure(material: Material, by_unit: Mapping[str, Mapping[str, Needed]], title: str, stem: str) -> Figure:
    variants: dict[str, dict[str, Any]] = {}
    findings: dict[str, str] = {}
    captions = []
    for unit, of_models in by_unit.items():
        shares = [needed.shares.assign(setting=label) for label, needed in of_models.items()]
        findings[unit] = listed([_finding(material, label, needed) for label, needed in of_models.items()])
        table = pd.concat(shares, ignore_index=True)
        bands = "Bands: 95% over documents, simultaneous over a line." if table["ci95_low"].notna().any() else ""
        subtitle = f"{_UNITS[unit].lower()} within {material.within_nats:g} nats per token of the longest context"
        captions.append(Caption(title=title, finding=findings[unit], explanation=bands, subtitle=subtitle))
        options: dict[str, Any] = {
            "y_title": "share of targets that need at most this",
            "number_format": ".1%",
            **SHARES,
        }
        options["tooltip"] = SCORE_TOOLTIP | COUNTED | {"value_text": "share of targets"}
        variants[unit] = length_figure(table, captions[-1], looks=material.looks_of(of_models), **options)
    return material.figure(variants, stem, captions[0], findings=findings, wide=len(by_unit["stretch"]) > 6)


def _finding(material: Material, label: str, needed: Needed) -> str:
    half = needed.shares[needed.shares["value"] >= 0.5][LENGTH].iloc[0]
    longest = needed.shares[LENGTH].iloc[-1]
    sentence = f"{quote_name(label)}: at least half of the targets need at most {length_text(int(half))}"
    if half == longest:
        sentence = (
            f"{quote_name(label)}: more than half of the targets need the longest context, {length_text(int(longest))}"
        )
    if needed.beyond is None or needed.within_tokens is None:
        return sentence
    share, low, high = needed.beyond
    band = "" if math.isnan(low) else f" [{low:.0%}, {high:.0%}]"
    return (
        f"{sentence}, {share:.0%}{band} more than {_within(needed, material.results.model(label).origin_length_tokens)}"
    )


def _within(needed: Needed, trained: int | None) -> str:
    """Returns, in words, the longest measured length within the training length; it may be shorter than that length."""
    within = length_text(needed.within_tokens or 0)
    if needed.within_tokens == trained:
        return f"the training length of {within}"
    return f"{within}, the longest length compared within the training length of {length_text(trained or 0)}"


def _table(by_unit: Mapping[str, Mapping[str, Needed]], caption: str, stem: str) -> Table:
    every = pd.concat([needed.shares for of_models in by_unit.values() for needed in of_models.values()])
    lengths = column_values(every)
    rows = []
    for unit, of_models in by_unit.items():
        for label, needed in of_models.items():
            heading = Cell(f", {needed.units:,} {unit}{'es' if unit == 'stretch' else 's'}", name=label)
            cells = {
                int(row[LENGTH]): _share(row["value"], row["ci95_low"], row["ci95_high"])
                for row in records(needed.shares)
            }
            last = Cell(needed.without, missing=True)
            if needed.beyond is not None:
                small = (f"than {length_text(needed.within_tokens or 0)}",)
                last = dataclasses.replace(_share(*needed.beyond), small=small)
            rows.append((heading, *(cells.get(length, "") for length in lengths), last))
    header = ("model", *map(length_text, lengths), "more than the longest within the training length")
    named: dict[str, Any] = {"stem": stem, "caption": caption, "interval": "simultaneous 95% band"}
    return Table.of(header, rows, folded=f"Numbers: {caption}", **named)


def _share(share: float, low: float = math.nan, high: float = math.nan) -> Cell:
    return Cell(f"{share:.0%}", interval=interval(low, high, ".0%"))
