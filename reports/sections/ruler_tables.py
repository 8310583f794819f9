"""RULER's tables: effective lengths, differences paired by sample, every score."""

from collections.abc import Mapping, Sequence

import pandas as pd

from sbeval.reports.analyse.paired import PairedDifference, ruler_differences
from sbeval.reports.analyse.ruler import (
    ABSOLUTE_THRESHOLD,
    NEAR_CHANCE,
    RELATIVE_THRESHOLD,
    TASKS,
    EffectiveLength,
    average,
    by_length,
    missing_tasks,
    weighted_averages,
)
from sbeval.reports.read.models import length_text
from sbeval.reports.read.results import records
from sbeval.reports.read.sample_scores import SampleScores
from sbeval.reports.write.html import Markup, element, name, table


def effective_table(
    labels: Sequence[str], lengths: Mapping[str, tuple[EffectiveLength, EffectiveLength]], scores: pd.DataFrame
) -> Markup:
    """Returns effective lengths and weighted averages, one row a model."""
    overall = average(scores, TASKS)
    rows = []
    for label in labels:
        absolute, relative = lengths[label]
        missing = missing_tasks(scores, label)
        weighted = None if missing else weighted_averages(by_length(overall, label))
        lacking = "not all 13 tasks" if missing else "not all six lengths"
        cells = [f"{value:.1%}" for value in weighted] if weighted else [_missing(lacking), _missing(lacking)]
        count = f"{len(TASKS) - len(missing)} of {len(TASKS)}"
        rows.append([name(label), count, _effective_cell(absolute), _effective_cell(relative), *cells])
    return table(
        [
            "model",
            "tasks",
            f"effective length, {ABSOLUTE_THRESHOLD:.1%}",
            f"effective length, {RELATIVE_THRESHOLD:.0%} of own",
            "weighted to long",
            "weighted to short",
        ],
        rows,
        caption="Effective context length and weighted averages",
        explanation=(
            f"The longest length such that every length up to it scores at least {ABSOLUTE_THRESHOLD:.1%} over all 13 "
            f"tasks (RULER's rule), or, over the tasks run, at least {RELATIVE_THRESHOLD:.0%} of the model's own score "
            f"at no more than half its training length; n/a where that score is below {NEAR_CHANCE:.0%}. Weighted "
            "averages are over all 13 tasks at 4K to 128K."
        ),
    )


def _missing(words: str) -> Markup:
    return element("td", words, attributes={"class": "missing"})


def _effective_cell(length: EffectiveLength) -> Markup:
    small = element("small", length.reason) if length.reason else ""
    return element("td", length.text, small)


def difference_tables(
    labels: Sequence[str], samples: Mapping[tuple[str, str], SampleScores], baseline: str
) -> list[Markup]:
    """Returns the differences to the baseline by length, or nothing where no two models share samples."""
    by_task = {label: {task: one for (own, task), one in samples.items() if own == label} for label in labels}
    rows: list[list[object]] = []
    found = {
        label: ruler_differences(by_task[label], by_task.get(baseline, {})) for label in labels if label != baseline
    }
    lengths = sorted({length for differences, _ in found.values() for length in differences})
    for label, (differences, tasks) in found.items():
        if differences:
            title = element("span", name(label), element("small", f"{len(tasks)} tasks"))
            rows.append([title, *[_difference_cell(differences.get(length)) for length in lengths]])
    if not rows:
        return []
    return [
        table(
            ["model", *map(length_text, lengths)],
            rows,
            caption=f"RULER: difference to {baseline}, paired by sample",
            explanation=(
                "Mean over the tasks both ran, in percentage points; band simultaneous over the lengths (95%), over "
                "the samples both answered."
            ),
        )
    ]


def _difference_cell(found: PairedDifference | None) -> Markup:
    if found is None:
        return element("td", "not measured", attributes={"class": "missing"})
    kind = "better" if found.low > 0 else "worse" if found.high < 0 else None
    known = found.low == found.low
    small = element("small", f"{100 * found.low:+.1f} to {100 * found.high:+.1f}") if known else ""
    return element("td", f"{100 * found.estimate:+.1f}", small, attributes={"class": kind})


def scores_table(labels: Sequence[str], scores: pd.DataFrame) -> Markup:
    """Returns every score, folded away."""
    lengths = sorted(int(length) for length in scores["context_length_tokens"].unique())
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in records(scores):
        own = found.setdefault((row["setting"], row["ruler_task"]), {})
        own[int(row["context_length_tokens"])] = row["value"]
    body = []
    for label in labels:
        for task in TASKS:
            if (values := found.get((label, task))) is None:
                continue
            cells = [
                f"{values[length]:.1%}"
                if length in values
                else element("td", "not measured", attributes={"class": "missing"})
                for length in lengths
            ]
            body.append([element("span", name(label), f" {task}"), *cells])
    content = table(["model and task", *map(length_text, lengths)], body, caption="RULER scores, task by task")
    return element("details", element("summary", "Numbers: RULER, task by task"), content)
