"""How much context is needed: the shortest length whose NLL is as good as the longest one's, on the same targets."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from sbeval.reports.analyse.panels import CORPUS_WORDS, safe_stem
from sbeval.reports.analyse.statistics import graded_errors, simultaneous_band
from sbeval.reports.figures.curves import COUNTED, SCORE_TOOLTIP, SHARES, length_figure
from sbeval.reports.figures.labels import Caption
from sbeval.reports.read.fields import in_words, length_text, listed, name_list
from sbeval.reports.read.results import LENGTH, Reader, averaging, column_values, records
from sbeval.reports.read.samples import DOCUMENT_SUMS, SumsByDocument, document_of, read_documents
from sbeval.reports.section import Cell, Fact, Figure, Kind, Material, Section, Table, interval

WITHIN_NATS = 0.01
_UNITS = {"stretch": "Stretches of targets", "document": "Documents"}
_TEXT = ["task", "corpus", "corpus_sha256"]
STRETCH_SUMS = Reader(read=functools.partial(read_documents, by_stretch=True), pool=averaging(SumsByDocument.averaged))
"""Sums of every run of targets of `fixed_target`, where there are several in a document."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """How much context one model's targets need.

    Attributes:
        shares: one row a length, with the share of targets that need at most that much; the band is simultaneous.
        beyond: share of targets that need more than the training length, with its band; None where none is longer.
        units: stretches or documents.
    """

    shares: pd.DataFrame
    beyond: tuple[float, float, float] | None
    units: int


def context_needed(sums: SumsByDocument, trained_at: int | None, *, within_nats: float = WITHIN_NATS) -> Needed | None:
    """Finds the shortest length of every unit whose NLL is no more than `within_nats` above the longest length's.

    A target counts with its unit's length; the band is over documents. None where fewer than two lengths share targets.
    """
    same_S = (sums.tokens == sums.tokens[:, :1]).all(axis=1) & (sums.tokens[:, 0] > 0)
    if len(sums.lengths) < 2 or not same_S.any():
        return None
    tokens_S = sums.tokens[same_S, 0]
    nll_SK = sums.nll_nats[same_S] / tokens_S[:, None]
    enough_SK = nll_SK <= nll_SK[:, -1:] + within_nats
    suffices_SK = np.logical_or.accumulate(enough_SK, axis=1)
    documents, index_S = np.unique([document_of(name) for name in np.array(sums.clusters)[same_S]], return_inverse=True)
    tokens_C = np.bincount(index_S, tokens_S)
    targets_CK = np.stack([np.bincount(index_S, tokens_S * column) for column in suffices_SK.T], axis=1)
    least = graded_errors(targets_CK / tokens_C[:, None], tokens_C)
    band = simultaneous_band(targets_CK, tokens_C, least_errors_K=least)
    rows = []
    for length, (share, low, high) in zip(sums.lengths, band, strict=True):
        last = length == sums.lengths[-1]  # by what is asked, every target
        ends = (math.nan, math.nan) if last else (max(0.0, low), min(1.0, high))
        rows.append((length, share, *ends, tokens_S.sum(), len(documents)))
    columns = [LENGTH, "value", "ci95_low", "ci95_high", "tokens", "clusters"]
    shares = pd.DataFrame(rows, columns=columns)
    within = shares[(shares[LENGTH] <= (trained_at or 0)) & (shares[LENGTH] < sums.lengths[-1])]
    beyond = None
    if len(within) and trained_at:
        share, low, high = within[["value", "ci95_low", "ci95_high"]].iloc[-1]
        beyond = (1 - share, 1 - high, 1 - low)
    return Needed(shares=shares, beyond=beyond, units=int(same_S.sum()))


def _section(material: Material) -> Section | None:
    """Returns None where no model was scored on the same targets at two lengths."""
    measured = material.results.measurements
    rows = measured[(measured["protocol"] == "fixed_target") & (measured["metric"] == "nll")]
    rows = rows[rows.groupby(["setting", *_TEXT], dropna=False)[LENGTH].transform("nunique") > 1]
    figures, tables, unlogged = [], [], []
    for (task, corpus, _), of_text in rows.drop_duplicates(["setting", *_TEXT]).groupby(
        _TEXT, dropna=False, sort=False
    ):
        by_unit: dict[str, dict[str, Needed]] = {unit: {} for unit in _UNITS}
        for row in records(of_text):
            trained = material.results.model(row["setting"]).origin_length_tokens
            for unit, reader in (("stretch", STRETCH_SUMS), ("document", DOCUMENT_SUMS)):
                if (sums := material.results.behind(reader, row)) is None:
                    unlogged.append(row["setting"])
                elif needed := context_needed(sums, trained, within_nats=material.within_nats):
                    by_unit[unit][row["setting"]] = needed
        if any(by_unit.values()):
            name, stem = CORPUS_WORDS.get(str(corpus), str(corpus)), f"needed-{safe_stem(str(task))}"
            figures.append(_figure(material, by_unit, f"{name}: how much context is needed", stem))
            tables.append(
                _table(material, by_unit, f"{name}: share of targets that need at most a context length", stem)
            )
    if not figures and not unlogged:
        return None
    missing = f"{name_list(dict.fromkeys(unlogged))}: samples were not logged (--log_samples), so this cannot be said."
    return Section(
        identifier="needed",
        title="How much context is needed",
        lead=f"The shortest context whose NLL is at most {material.within_nats:g} nats per token above that of the "
        "longest one, for each stretch of targets or each document; the share of targets that need no more. A model "
        "that gets worse with context needs little by this rule.",
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
        within = f"within {material.within_nats:g} nats per token of the longest context"
        words = "Bands: 95% over documents, simultaneous over a line."
        captions.append(
            Caption(title=title, finding=findings[unit], explanation=words, subtitle=f"{_UNITS[unit].lower()} {within}")
        )
        shown = {"y_title": "share of targets that need at most this", **SHARES}
        looks, tooltip = material.looks_of(of_models), SCORE_TOOLTIP | COUNTED | {"value_text": "share of targets"}
        variants[unit] = length_figure(
            pd.concat(shares, ignore_index=True),
            captions[-1],
            looks=looks,
            number_format=".1%",
            tooltip=tooltip,
            **shown,
        )
    return material.figure(variants, stem, captions[0], findings=findings, wide=len(by_unit["stretch"]) > 6)


def _finding(material: Material, label: str, needed: Needed) -> str:
    half = needed.shares[needed.shares["value"] >= 0.5][LENGTH].iloc[0]
    words = f"{in_words(label)}: half of the targets need at most {length_text(int(half))}"
    trained = material.results.model(label).origin_length_tokens
    if needed.beyond is None or not trained:
        return words
    share, low, high = needed.beyond
    band = "" if math.isnan(low) else f" [{low:.0%}, {high:.0%}]"
    return f"{words}, {share:.0%}{band} more than the {length_text(trained)} it was trained at"


def _table(material: Material, by_unit: Mapping[str, Mapping[str, Needed]], caption: str, stem: str) -> Table:
    lengths = column_values(pd.concat([one.shares for of_models in by_unit.values() for one in of_models.values()]))
    rows = []
    for unit, of_models in by_unit.items():
        for label, needed in of_models.items():
            heading = Cell(f", {needed.units:,} {unit}{'es' if unit == 'stretch' else 's'}", name=label)
            cells = {
                int(row[LENGTH]): _share(row["value"], row["ci95_low"], row["ci95_high"])
                for row in records(needed.shares)
            }
            last = _share(*needed.beyond) if needed.beyond else Cell("not evaluated", missing=True)
            rows.append((heading, *(cells.get(length, "") for length in lengths), last))
    header = ("model", *map(length_text, lengths), "more than the training length")
    named: dict[str, Any] = {"stem": stem, "caption": caption, "interval": "simultaneous 95% band"}
    return Table.of(header, rows, folded=f"Numbers: {caption}", **named)


def _share(share: float, low: float, high: float) -> Cell:
    return Cell(f"{share:.0%}", interval=interval(low, high, ".0%"))
