"""The section "KV caches": what a quantized or replaced cache costs, against the same model with a full one.

Differences of NLL are paired by document, on the same targets, with bands that are simultaneous over the lengths of a
line. A cache keeps within a tolerance up to the longest length at and below which no band reaches above the tolerance,
and no band is doubtful because documents differ much in size.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from sbeval.foreign_files import usable_number
from sbeval.reports.analyse.findings import DOUBTFUL_TEXT, signed
from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.statistics import CONFIDENCE
from sbeval.reports.analyse.verdicts import DOUBTFUL
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.lines import COUNTED, SCORE_TOOLTIP, length_figure
from sbeval.reports.pairs import Difference, Side, score_differences, text_differences
from sbeval.reports.read.fields import first_listed, grouped, length_text, listed, name_list, quote_name
from sbeval.reports.read.models import EvaluatedModel, without_cache
from sbeval.reports.read.results import LENGTH
from sbeval.reports.read.runs import mapping
from sbeval.reports.section import Cell, Fact, Figure, Kind, Material, Section, Table, verdict
from sbeval.results.intervals import MINIMUM_CLUSTERS, change_text

_TASKS_NAMED = 6
_NEEDS_BAND = f"a band needs {MINIMUM_CLUSTERS} documents"


class CacheCost(NamedTuple):
    """The differences of a model with a replaced cache to the same model with a full one, for one text or RULER.

    Attributes:
        label: label of the model with the replaced cache.
        bytes_per_token: bytes that a token adds to the cache; None if the run did not measure them.
        full_bytes_per_token: bytes that a token adds to a full cache; None if the run did not measure them.
        dtype: dtype of the model; None if it is not recorded.
        by_length: context length to the difference there.
    """

    label: str
    bytes_per_token: float | None
    full_bytes_per_token: float | None
    dtype: str | None
    by_length: Mapping[int, Difference]

    def within_tokens(self, most: float) -> int | None:
        """Returns the longest measured length up to which every band stays at or below `most`.

        None if the band at the first length does not, or if there is none or a doubtful one: the cost is then unknown.
        """
        longest = None
        for length in sorted(self.by_length):
            _, _, high = self.by_length[length].change
            if math.isnan(high) or high > most or self.by_length[length].doubtful:
                break
            longest = length
        return longest


def cache_costs(material: Material) -> tuple[dict[str, list[CacheCost]], list[str]]:
    """Returns the name of a text or score to the cost of each cache, and sentences on what is not compared, and why."""
    costs: dict[str, list[CacheCost]] = {}
    obstacles = []
    models = material.results.models
    for model in models:
        if not model.record.cache:
            continue
        full = without_cache(model, models)
        if full is None:
            obstacles.append(f"{quote_name(model.label)}: the same model without cache=... is not among the results.")
            continue
        sides = (Side(material.results, each.label, each.label) for each in (full, model))
        reference, candidate = sides
        differences, reasons = text_differences(reference.texts(), candidate.texts(), confidence=CONFIDENCE)
        scores, unscored = score_differences(reference, candidate, confidence=CONFIDENCE)
        obstacles += [f"{quote_name(model.label)}: {reason}" for reason in reasons]
        with_lengths = {each.group for each in scores if each.context_length_tokens is not None}
        ordinary = [
            each.name for each in scores if each.context_length_tokens is None and each.group not in with_lengths
        ]
        obstacles += _left_out(model.label, unscored, ordinary)
        for group, of_group in grouped((each.group, each) for each in [*differences, *scores]).items():
            by_length = {each.context_length_tokens: each for each in of_group if each.context_length_tokens}
            if by_length:
                cost = CacheCost(
                    label=model.label,
                    bytes_per_token=_number(model, "bytes_per_token"),
                    full_bytes_per_token=_number(model, "full_bytes_per_token"),
                    dtype=model.record.dtype,
                    by_length=by_length,
                )
                costs.setdefault(group, []).append(cost)
    return costs, obstacles


def _number(model: EvaluatedModel, name: str) -> float | None:
    return usable_number(mapping(model.record.cache).get(name))


def _left_out(label: str, unscored: Sequence[str], ordinary: Sequence[str]) -> list[str]:
    """Returns one sentence on the scores of a model that are not in this section, and why; none if all are."""
    reasons = [text.rstrip(".") for text in unscored]
    if ordinary:
        names = name_list(ordinary, at_most=_TASKS_NAMED)
        reasons.append(f"{names}: no context length, so only `sbeval report --compare` compares them")
    return [f"{quote_name(label)}: {listed(reasons)}"] if reasons else []


def _section(material: Material) -> Section | None:
    """Builds the section; None if no model has a replaced cache."""
    costs, obstacles = cache_costs(material)
    if not costs and not obstacles:
        return None
    figures, tables = [], []
    for group, of_group in costs.items():
        is_score = next(iter(of_group[0].by_length.values())).higher_is_better is True
        stem = safe_stem(f"caches-{group}")
        figures.append(_figure(material, group, of_group, stem, is_score=is_score))
        tables.append(_table(material, group, of_group, stem, is_score=is_score))
    return Section(
        identifier="caches",
        title="KV caches",
        lead=(
            "The context is read into the cache, and the same targets are scored from it. Shown is the difference to "
            "the same model with a full cache, paired. Bands: 95%, simultaneous over a line."
        ),
        figures=tuple(figures),
        legend=material.looks_of(cost.label for of_group in costs.values() for cost in of_group),
        tables=tuple(tables),
        remarks=tuple(Fact(text=text) for text in obstacles),
    )


CACHES = Kind(section=_section)


def _figure(material: Material, group: str, costs: Sequence[CacheCost], stem: str, *, is_score: bool) -> Figure:
    rows = [
        {
            "setting": cost.label,
            LENGTH: length,
            "value": each.estimate,
            "ci95_low": each.low,
            "ci95_high": each.high,
            "clusters": each.count,
        }
        for cost in costs
        for length, each in cost.by_length.items()
    ]
    unit = "score" if is_score else "nats per token"
    better = "below" if is_score else "above"
    explanation = f"With the cache minus with a full one, on the same targets; {better} zero: the cache loses."
    caption = Caption(
        title=f"{group}: cost of the cache",
        finding=first_listed([_finding(cost) for cost in costs]),
        explanation=explanation + _doubt(costs),
    )
    looks = material.looks_of(cost.label for cost in costs)
    spec = length_figure(
        pd.DataFrame(rows),
        caption,
        looks=looks,
        number_format="+.4f",
        tooltip=SCORE_TOOLTIP | COUNTED | {"value_text": f"difference ({unit})"},
        y_title=f"difference ({unit})",
        levels={0.0: ""},
    )
    return material.figure({"difference": spec}, stem, caption)


def _doubt(costs: Sequence[CacheCost]) -> str:
    """Returns a sentence on the mark of doubtful bands; empty if there are none."""
    marked = any(each.doubtful and not math.isnan(each.low) for cost in costs for each in cost.by_length.values())
    return f" {DOUBTFUL}: {DOUBTFUL_TEXT}." if marked else ""


def _finding(cost: CacheCost) -> str:
    length = max(cost.by_length)
    last = cost.by_length[length]
    number = signed(last.estimate)
    if not math.isnan(last.low):
        _, low, high = change_text(last.estimate, last.low, last.high)
        number += f" [{low}, {high}]" + (f" {DOUBTFUL}" if last.doubtful else "")
    return f"{quote_name(cost.label)} {number} at {length_text(length)}"


def _table(material: Material, group: str, costs: Sequence[CacheCost], stem: str, *, is_score: bool) -> Table:
    lengths = sorted({length for cost in costs for length in cost.by_length})
    most = material.within_nats
    rows = []
    for cost in costs:
        cells = [
            _cell(cost.by_length[length]) if length in cost.by_length else Cell(missing=True) for length in lengths
        ]
        sizes = map(_size, (cost.bytes_per_token, cost.full_bytes_per_token))
        rows.append([Cell(name=cost.label), *sizes, *cells, *([] if is_score else [_within(cost, most)])])
    header = ["model", "bytes a token", "full cache", *map(length_text, lengths)]
    if not is_score:
        header.append(f"loses at most {most:g} nats up to")
    dtypes = name_list(dict.fromkeys(cost.dtype for cost in costs if cost.dtype))
    explanation = "Bytes do not count the newest tokens, which a quantized cache holds unrounded."
    if not is_score:
        explanation += " The last column counts a length only if the whole band is within the tolerance."
    return Table.of(
        header,
        rows,
        stem=stem,
        caption=(
            f"{group}: bytes of a token in the cache and in a full one{f' ({dtypes})' if dtypes else ''}, and the "
            "difference to the full cache"
        ),
        explanation=explanation + _doubt(costs),
        interval="simultaneous 95% band",
    )


def _size(bytes_per_token: float | None) -> Cell:
    return Cell("not measured", missing=True) if bytes_per_token is None else Cell(f"{bytes_per_token:,.0f}")


def _cell(each: Difference) -> Cell:
    text, low, high = change_text(each.estimate, each.low, each.high)
    if math.isnan(each.low):
        return Cell(text)
    side = verdict(each.low, each.high, higher_is_better=each.higher_is_better is True)
    return Cell(text + (f" {DOUBTFUL}" if each.doubtful else ""), interval=(low, high), verdict=side)


def _within(cost: CacheCost, most: float) -> Cell:
    if any(math.isnan(each.low) for each in cost.by_length.values()):
        return Cell(_NEEDS_BAND, missing=True)
    if cost.by_length[min(cost.by_length)].doubtful:
        return Cell(f"unknown {DOUBTFUL}", missing=True)
    longest = cost.within_tokens(most)
    return Cell("no length", missing=True) if longest is None else Cell(length_text(longest))
