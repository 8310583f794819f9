"""Two sections: one number for each curve over context lengths, and each model's claimed and effective context lengths.

The number of a curve is its mean change of NLL beyond the training length, its mean score, or its effective length.
Every effective length is shown with the rule that defines it and with its confidence interval.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from sbeval.reports.analyse.one_number import NLL_CHANGE, CurveNumber, effective_nll_length
from sbeval.reports.analyse.panels import safe_stem, text_name
from sbeval.reports.analyse.protocols import on_identical_targets
from sbeval.reports.analyse.ruler import (
    ABSOLUTE_THRESHOLD,
    NIAH_TASKS,
    TASKS,
    average,
    by_length,
    passing_length,
    short_name,
)
from sbeval.reports.analyse.verdicts import DOUBTFUL
from sbeval.reports.kinds.recall import recall_scores
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.section import NOT_MEASURED, Cell, Kind, Material, Section, Table, interval, verdict
from sbeval.results.records import IDENTICAL_TARGETS

_TABLES_AT_ONCE = 2


def _numbers_section(material: Material) -> Section | None:
    """Builds the section "One number per curve"; None if no curve has two context lengths."""
    nll = [number for number in material.numbers if number.metric == NLL_CHANGE]
    scores = [number for number in material.numbers if number.metric != NLL_CHANGE]
    if not material.numbers:
        return None
    tables = (
        Table.of(
            ("model", "text", "lengths", "mean change (nats per token)", "effective length"),
            [_nll_row(number, material.results.model(number.setting).origin_length_tokens) for number in nll],
            stem="numbers-nll",
            caption="Mean change of NLL beyond the training length, and how far more context lowers NLL",
            interval="95% intervals",
        ),
        Table.of(
            ("model", "task", "lengths", "mean score"),
            [_score_row(number, material.results.model(number.setting).origin_length_tokens) for number in scores],
            stem="numbers-scores",
            caption="Mean score over octaves",
            interval="95% intervals",
        ),
    )
    return Section(
        identifier="numbers",
        title="One number per curve",
        lead=(
            "The area under each curve over log length, divided by its width, so that every octave weighs the same. "
            "For NLL: on identical targets, minus NLL at the training length, or at the longest length compared within "
            "it, where the lengths begin; below zero is better. The effective length is the last one at which NLL is "
            "measurably lower than at the next shorter length, before any at which it is measurably higher; its lower "
            "end counts every step that is not measurable as a loss, its upper end as a gain. Small print: in "
            "multiples of the training length."
        ),
        tables=tuple(table for table in tables if table.rows),
    )


NUMBERS = Kind(section=_numbers_section)


def _nll_row(number: CurveNumber, trained_at: int | None) -> tuple[Cell | str, ...]:
    area = number.area
    text = area.text + (f" {DOUBTFUL}" if area.doubtful else "")
    change = Cell(text, verdict=verdict(area.low, area.high))
    effective = "" if number.effective is None else number.effective.text
    reached = _times((number.effective.tokens,) if number.effective else (), trained_at)
    lengths = _lengths(number, trained_at)
    return Cell(name=number.setting), text_name(*number.text), lengths, change, Cell(effective, small=reached)


def _score_row(number: CurveNumber, trained_at: int | None) -> tuple[Cell | str, ...]:
    area = number.area
    mean = Cell(f"{area.estimate:.1%}", interval=interval(area.low, area.high, ".1%"))
    return Cell(name=number.setting), number.task, _lengths(number, trained_at), mean


def _lengths(number: CurveNumber, trained_at: int | None) -> Cell:
    ends = (number.area.from_tokens, number.area.to_tokens)
    return Cell(" to ".join(map(length_text, ends)), small=_times(ends, trained_at))


def _times(lengths: Sequence[int | None], trained_at: int | None) -> tuple[str, ...]:
    """Returns lengths as multiples of the training length, for small print; empty if the training length is unknown."""
    known = [f"{length / trained_at:g}\N{MULTIPLICATION SIGN}" for length in lengths if length and trained_at]
    return (" to ".join(known),) if known else ()


class _Length(NamedTuple):
    """One row of a model's table: a context length, and the rule by which it was determined."""

    name: str
    cell: Cell
    rule: str


def _section(material: Material) -> Section | None:
    """Builds the section "Claimed and effective lengths"; None if no model has an effective length."""
    forced = recall_scores(material.results.measurements)
    forced = forced[(forced["metric"] == "exact_match") & forced["task"].map(_is_forced_needle)]
    averages = {
        "needles, generated": average(material.ruler.scores, NIAH_TASKS),
        "needles, teacher-forced": average(forced.assign(ruler_task=forced["task"]), forced["task"].unique().tolist()),
    }
    lengths = {
        model.label: [*_claimed(model), *effective]
        for model in material.results.models
        if (effective := list(_effective(material, model.label, averages)))
    }
    if not lengths:
        return None
    tables = [
        Table.of(
            ("length", "tokens", "rule"),
            [(line.name, line.cell, line.rule) for line in lines],
            stem=f"lengths-{safe_stem(label)}",
            caption=f"Claimed and effective context lengths of {label}",
            interval="95% interval",
            folded=label if len(lengths) > _TABLES_AT_ONCE else "",
        )
        for label, lines in lengths.items()
    ]
    if len(lengths) > 1:
        names = list(dict.fromkeys(line.name for lines in lengths.values() for line in lines))
        cells = {label: {line.name: line.cell for line in lines} for label, lines in lengths.items()}
        rows = [
            (Cell(name=label), *(known.get(name, NOT_MEASURED) for name in names)) for label, known in cells.items()
        ]
        together = {"caption": "Claimed and effective context lengths", "interval": "95% interval"}
        tables.insert(0, Table.of(("model", *names), rows, stem="lengths", **together))
    return Section(
        identifier="lengths",
        title="Claimed and effective lengths",
        lead="What a model declares, what it was trained at, and how far context works by each rule. An interval of "
        "scores is the same rule on the lower and on the upper ends of each length's own 95% interval.",
        tables=tuple(tables),
    )


CLAIMED = Kind(section=_section)


def _claimed(model: EvaluatedModel) -> Iterator[_Length]:
    declared, trained = model.declared_length_tokens, model.origin_length_tokens
    known = model.record.declared_length_tokens is not None
    yield _Length("declared", _tokens(declared), "configuration" if known else "training length and scaling recorded")
    yield _Length("training", _tokens(trained), "before extension and scaling")


def _tokens(tokens: int | None) -> Cell:
    return Cell(length_text(tokens)) if tokens else Cell("not recorded", missing=True)


def _effective(material: Material, label: str, averages: Mapping[str, pd.DataFrame]) -> Iterator[_Length]:
    for (model, corpus, protocol), claim in material.claims.items():
        if model == label and protocol in IDENTICAL_TARGETS and (effective := effective_nll_length(claim)) is not None:
            name = f"effective, perplexity ({text_name(corpus, protocol)})"
            nll_rule = "the last length with a measurably lower NLL than the next shorter one, before any loss"
            rule = on_identical_targets(protocol, f"{nll_rule}; same targets, {claim.clusters} documents")
            yield _Length(name, Cell(effective.shown, interval=effective.shown_interval), rule)
    for name, means in averages.items():
        if len(of_model := means[means["setting"] == label]):
            count = int(of_model["tasks"].iloc[0])
            rule = f"at least {ABSOLUTE_THRESHOLD:.1%} at every length up to it, {count} task{'s' * (count > 1)}"
            yield _Length(f"effective, {name}", _passing(of_model, label), rule)
    if label in material.ruler.effective:
        length = material.ruler.effective[label][0]
        small = (length.reason,) if length.reason else ()
        measured = Cell(length.shown, interval=length.shown_interval, small=small)
        yield _Length("effective, RULER", measured, f"at least {ABSOLUTE_THRESHOLD:.1%} over all {len(TASKS)} tasks")


def _passing(means: pd.DataFrame, label: str) -> Cell:
    """Returns a table cell: the longest length up to which a model's mean scores all reach the absolute threshold.

    The cell also has an interval. Its ends are the same length computed from the lower, and from the upper, ends of the
    scores' intervals.
    """
    value, low, high = (by_length(means, label, numbers=end) for end in ("value", "ci95_low", "ci95_high"))
    passing = passing_length(value, ABSOLUTE_THRESHOLD, (low, high))
    return Cell(passing.shown, interval=passing.shown_interval)


def _is_forced_needle(task: str) -> bool:
    return task.endswith("_forced") and short_name(task.removesuffix("_forced")) in NIAH_TASKS
