"""Plans of tasks: what a number of documents shows, what a wanted difference needs, and what both cost."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from sbeval.errors import time_text
from sbeval.planning.power import Spread
from sbeval.results.intervals import MINIMUM_CLUSTERS, decimals

NATS = "nats per token"
_LEAST_DIGITS = 4
_TOO_MANY = "*"
"""Marks a number of documents that the task does not have."""
LONG_TAIL = 2.0
"""Skewness beyond which a pilot has a long tail."""
TAILS = (
    "If a few documents differ far more than the others, a pilot may lack them: with pilots of 60 such documents, "
    "75 to 79% of simulated runs showed a difference planned for 80%, and 81 to 91% of 95% intervals held the truth."
)
"""A note on plans from earlier results; the numbers are those of `research/interval_studies/plan_power.py`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """One difference of a plan.

    Attributes:
        task: the task.
        difference: what is subtracted from what, such as "16K minus 4K, demo-sb".
        unit: "nats per token" or "score".
        spread: the standard deviation of the difference over documents or samples.
        source: where the spread comes from.
        units: planned number of documents or samples.
        comparisons: number of differences of the task that are judged at once.
        power: probability with which a difference is to be shown.
        wanted: difference that is wanted, in the unit; None for none.
        available: number of documents or samples that the task has; None if it is unknown.
    """

    task: str
    difference: str
    unit: str
    spread: Spread
    source: str
    units: int
    comparisons: int
    power: float
    wanted: float | None = None
    available: int | None = None

    def smallest(self, *, rise: bool, together: bool = False) -> tuple[float, float, float]:
        """Returns the smallest rise or fall that is shown, with the ends of its interval.

        With `together`, all differences of the task are judged at once.
        """
        comparisons = self.comparisons if together else 1
        return self.spread.smallest(self.units, rise=rise, power=self.power, comparisons=comparisons)

    @functools.cached_property
    def needed(self) -> tuple[int | None, int | None, int | None]:
        """How many documents or samples show the wanted difference, whichever its sign, with the ends of its interval.

        They are None if no difference is wanted, or if no number shows it.
        """
        return (None, None, None) if self.wanted is None else self.spread.needed(self.wanted, power=self.power)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan for JSON; unknown values are null."""
        rise, *rise_ends = map(_or_none, self.smallest(rise=True))
        fall, *fall_ends = map(_or_none, self.smallest(rise=False))
        together = [_or_none(self.smallest(rise=rise, together=True)[0]) for rise in (True, False)]
        needed, fewest, most = self.needed
        return {
            **{name: getattr(self, name) for name in ("task", "difference", "unit", "source", "units", "comparisons")},
            "spread": self.spread.estimate,
            "spread_ci95": list(self.spread.interval),
            "skewness": self.spread.skewness,
            "power": self.power,
            "smallest_rise": rise,
            "smallest_rise_ci95": rise_ends,
            "smallest_fall": fall,
            "smallest_fall_ci95": fall_ends,
            "smallest_together": together,
            "wanted_difference": self.wanted,
            "needed": needed,
            "needed_ci95": [fewest, most],
            "available": self.available,
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What the planned documents or samples of a task cost.

    Attributes:
        task: the task.
        units: number of documents or samples.
        tokens: input tokens of the model.
        new_tokens: largest number of generated tokens.
        seconds: time in the model; None if it is unknown.
        is_counted: whether the tokens were counted from the task's requests; otherwise they are the sum of the context
            lengths, once for each document.
        generates: whether the task generates.
        excludes_generation: whether the time is that of the input tokens only, although the task generates.
        available: number of documents or samples that the task has; None if it is unknown.
    """

    task: str
    units: int
    tokens: int
    new_tokens: int = 0
    seconds: float | None = None
    is_counted: bool = True
    generates: bool = False
    excludes_generation: bool = False
    available: int | None = None

    def of(self, units: int) -> tuple[int, float | None]:
        """Returns the tokens and the seconds of another number of documents."""
        share = units / max(1, self.units)
        return round(self.tokens * share), None if self.seconds is None else self.seconds * share


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A plan of several tasks.

    Attributes:
        planned: the differences.
        costs: the cost of each task.
        time_source: where the time comes from; None if it is unknown.
        notes: sentences on what is unknown.
    """

    planned: Sequence[Planned]
    costs: Sequence[Cost]
    time_source: str | None = None
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the plan for JSON."""
        costs = [dataclasses.asdict(cost) for cost in self.costs]
        differences = [planned.to_json() for planned in self.planned]
        return {"differences": differences, "costs": costs, "time_source": self.time_source, "notes": list(self.notes)}

    def to_text(self) -> str:
        """Returns the plan as text."""
        lines: list[str] = []
        for task in dict.fromkeys(planned.task for planned in self.planned):
            lines += [*_task_lines([planned for planned in self.planned if planned.task == task]), ""]
        if self.costs:
            lines += [*self._cost_lines(), ""]
        return "\n".join([*lines, *self.notes]).rstrip()

    def _cost_lines(self) -> list[str]:
        needed = {cost.task: self._most_needed(cost.task) for cost in self.costs}
        header = ["cost", "documents", "tokens", "new, at most", "in the model"]
        rows = []
        for cost in self.costs:
            new_tokens = f"{cost.new_tokens:,}" if cost.new_tokens else ""
            rows.append([cost.task, f"{cost.units:,}", f"{cost.tokens:,}", new_tokens, _seconds(cost, cost.seconds)])
            if (most := needed[cost.task]) is not None:
                tokens, seconds = cost.of(most)
                mark = _mark(most, cost.available)
                rows.append(
                    ["  for the wanted difference", f"{most:,}{mark}", f"{tokens:,}", "", _seconds(cost, seconds)]
                )
        lines = _aligned([header, *rows])
        if not all(cost.is_counted for cost in self.costs):
            lines.append("Tokens: the sum of the context lengths, once for each document. --model_args counts them.")
        if self.time_source is None:
            remedy = "--measure estimates it on this machine, --tokens_per_second states a speed"
            return [*lines, f"The time is unknown: {remedy}, and earlier results may record one."]
        return [*lines, f"Time: {self.time_source}."]

    def _most_needed(self, task: str) -> int | None:
        """Returns the largest number of documents that a wanted difference of a task needs; None for none."""
        counts = [planned.needed[0] for planned in self.planned if planned.task == task]
        known = [count for count in counts if count is not None]
        return max(known) if known else None


def _task_lines(planned: Sequence[Planned]) -> list[str]:
    """Returns the lines of one task: a heading, a table, and how to read it."""
    first = planned[0]
    units = _units_word(first.unit)
    wanted = first.wanted
    header = ["difference", "spread [95%]", "rise [95%]", "fall [95%]"]
    header += ["all at once"] * (first.comparisons > 1)
    header += [] if wanted is None else [f"{units} for {wanted:g} [95%]"]
    rows = []
    for each in planned:
        row = [each.difference, _with_ends((each.spread.estimate, *each.spread.interval))]
        row += [_with_ends(each.smallest(rise=rise)) for rise in (True, False)]
        if first.comparisons > 1:
            row.append(_number(max(each.smallest(rise=rise, together=True)[0] for rise in (True, False))))
        row += [_counts(each)] * (wanted is not None)
        rows.append(row)
    title = f"smallest difference that {first.units:,} {units} show with a power of {first.power:.0%}"
    lines = [f"{first.task}, {first.unit}: {title}"]
    lines += _aligned([header, *rows])
    sources = dict.fromkeys(each.source for each in planned)
    lines.append(f"Spread: {'; '.join(sources)}.")
    lines += [sentence for each in planned if (sentence := _tail_sentence(each))]
    lines += dict.fromkeys(sentence for each in planned for sentence in _limit_sentences(each, units))
    if first.units < MINIMUM_CLUSTERS:
        lines.append(f"With fewer than {MINIMUM_CLUSTERS} {units} there is no interval, so nothing is shown.")
    return lines


def _units_word(unit: str) -> str:
    return "documents" if unit == NATS else "samples"


def _limit_sentences(planned: Planned, units: str) -> list[str]:
    """Returns sentences on differences that are not possible, and on needed numbers that the task does not have."""
    sentences = []
    largest, wanted = planned.spread.largest, planned.wanted
    if math.isfinite(largest) and planned.units >= MINIMUM_CLUSTERS:
        is_none_shown = any(math.isnan(planned.smallest(rise=True, together=together)[0]) for together in (False, True))
        if is_none_shown or (wanted is not None and wanted > largest):
            sentences.append(f"No difference is larger than {largest:g}, the share of samples that change.")
    counts = [count for count in planned.needed if count is not None]
    if any(_mark(count, planned.available) for count in counts):
        sentences.append(f"{_TOO_MANY} More than the task has: {planned.available:,} {units}.")
    return sentences


def _tail_sentence(planned: Planned) -> str | None:
    """Returns a sentence on a pilot's long tail, which is even longer in most cases; None for none."""
    skewness = planned.spread.skewness
    if planned.spread.draws_B2 is None or abs(skewness) < LONG_TAIL:
        return None
    harder = "fall" if skewness > 0 else "rise"
    return (
        f"Long tail (skewness {skewness:.1f}): a {harder} of {planned.difference} may need to be larger than planned."
    )


def _with_ends(values: tuple[float, float, float]) -> str:
    value, low, high = values
    if math.isnan(value) or low == high:
        return _number(value)
    digits = decimals(high - low, least=_LEAST_DIGITS)
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _number(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:.{_LEAST_DIGITS}f}"


def _counts(planned: Planned) -> str:
    units = _units_word(planned.unit)
    texts = [
        f"more than any number of {units}" if count is None else f"{count:,}{_mark(count, planned.available)}"
        for count in planned.needed
    ]
    return texts[0] if len(set(texts)) == 1 else f"{texts[0]} [{texts[1]}, {texts[2]}]"


def _mark(count: int, available: int | None) -> str:
    """Returns the mark of a number of documents that the task does not have."""
    return _TOO_MANY if available is not None and count > available else ""


def _seconds(cost: Cost, seconds: float | None) -> str:
    if seconds is None:
        return ""
    return time_text(seconds) + (" without generation" if cost.excludes_generation else "")


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines with aligned columns: the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "   ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
