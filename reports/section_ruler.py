"""The section on RULER: averages against length, the grid of tasks, effective lengths."""

from collections.abc import Mapping, Sequence

import pandas as pd

from sbeval.reports.figures.scores import score_figure, score_grid
from sbeval.reports.figures.theme import Look
from sbeval.reports.html import Markup, element, name, table
from sbeval.reports.paired import PairedDifference, ruler_differences
from sbeval.reports.ruler import (
    ABSOLUTE_THRESHOLD,
    AVERAGES,
    NEAR_CHANCE,
    RELATIVE_THRESHOLD,
    TASKS,
    EffectiveLength,
    absolute_effective_length,
    average,
    by_length,
    relative_effective_length,
    weighted_averages,
)
from sbeval.reports.sample_scores import SampleScores
from sbeval.reports.sections import Drawing, Publish, Section
from sbeval.reports.settings import length_text
from sbeval.reports.table import records


def effective_lengths(
    scores: pd.DataFrame, training_lengths: Mapping[str, int]
) -> dict[str, tuple[EffectiveLength, EffectiveLength]]:
    """Returns setting to (by RULER's threshold, relative to its own score), over the tasks it ran."""
    overall = average(scores, TASKS)
    return {
        label: (
            absolute_effective_length(by_length(overall, label)),
            relative_effective_length(by_length(overall, label), training_lengths.get(label)),
        )
        for label in dict.fromkeys(scores["setting"])
    }


def effective_sentences(
    lengths: Mapping[str, tuple[EffectiveLength, EffectiveLength]], scores: pd.DataFrame
) -> dict[str, list[str]]:
    """Returns the sentences of the summary on effective lengths."""
    sentences = {}
    for label, (absolute, relative) in lengths.items():
        count = scores[scores["setting"] == label]["ruler_task"].nunique()
        tasks = "13 tasks" if count == len(TASKS) else f"{count} of 13 tasks"
        text = (
            f"Effective length on RULER ({tasks}): {absolute.text} at the benchmark's threshold of "
            f"{ABSOLUTE_THRESHOLD:.1%}, {relative.text} at {RELATIVE_THRESHOLD:.0%} of its own short-context score"
        )
        reason = f" ({relative.reason})" if relative.reason else ""
        sentences[label] = [f"{text}{reason}."]
    return sentences


def ruler_section(
    scores: pd.DataFrame,
    samples: Mapping[tuple[str, str], SampleScores],
    *,
    looks: Mapping[str, Look],
    training_lengths: Mapping[str, int],
    baseline: str,
    publish: Publish,
) -> Section | None:
    """Builds the section, None where no RULER task was run; `samples` holds (setting label, task) to its samples."""
    if scores.empty:
        return None
    shown = set(scores["setting"])
    drawings = []
    for words, tasks in AVERAGES.items():
        means = average(scores, tasks)
        if means.empty:
            continue
        drawings.append(_average_drawing(words, means, looks, training_lengths, publish))
    labels = [label for label in looks if label in shown]
    grid = {task: scores[scores["ruler_task"] == task] for task in TASKS if (scores["ruler_task"] == task).any()}
    if len(grid) > 1:
        drawings.append(_grid_drawing(grid, looks, training_lengths, publish))
    lengths = effective_lengths(scores, training_lengths)
    return Section(
        identifier="ruler",
        title="RULER",
        lead="Share of the expected answers found in the generated text. Bands: 95 % intervals.",
        drawings=tuple(drawings),
        legend=looks,
        content=(
            _effective_table(labels, lengths, scores),
            *_difference_tables(labels, samples, baseline),
            _scores_table(labels, scores),
        ),
    )


def _average_drawing(
    words: str, means: pd.DataFrame, looks: Mapping[str, Look], training_lengths: Mapping[str, int], publish: Publish
) -> Drawing:
    parts = []
    for label in looks:
        values = by_length(means, label)
        if values:
            first, last = next(iter(values)), list(values)[-1]
            parts.append(
                f"{label} {values[first]:.0%} at {length_text(first)}, {values[last]:.0%} at {length_text(last)}"
            )
    finding = "; ".join(parts[:4]) + "."
    counts = sorted({int(count) for count in means["tasks"]})
    explanation = f"Mean over {' or '.join(map(str, counts))} {'task' if counts == [1] else 'tasks'}."
    title = f"RULER, {words}"
    spec = score_figure(
        means,
        looks=looks,
        training_lengths=training_lengths,
        title=title,
        subtitle=explanation,
        description=f"{title}. {finding}",
    )
    picture, links = publish(spec, f"ruler-{words.replace(' ', '-')}")
    return Drawing(
        title=title,
        finding=finding,
        explanation=explanation,
        variants={"score": spec},
        picture=picture,
        downloads=links,
    )


def _grid_drawing(
    grid: Mapping[str, pd.DataFrame], looks: Mapping[str, Look], training_lengths: Mapping[str, int], publish: Publish
) -> Drawing:
    finding = _grid_finding(grid, list(looks))
    spec = score_grid(
        grid,
        looks=looks,
        training_lengths=training_lengths,
        title="RULER, task by task",
        subtitle="score against context length (tokens, log scale)",
        description=f"RULER, task by task. {finding}",
    )
    picture, links = publish(spec, "ruler-tasks")
    return Drawing(
        title="RULER, task by task",
        finding=finding,
        explanation=f"{len(grid)} of RULER's 13 tasks on the same axes. Dotted lines mark training lengths.",
        variants={"score": spec},
        picture=picture,
        downloads=links,
        wide=True,
    )


def _grid_finding(grid: Mapping[str, pd.DataFrame], labels: Sequence[str]) -> str:
    parts = []
    for label in labels:
        scores = [values for rows in grid.values() if (values := by_length(rows, label))]
        if scores:
            longest = max(max(values) for values in scores)
            last = [values[longest] for values in scores if longest in values]
            half = sum(value >= 0.5 for value in last)
            parts.append(f"{label} scores at least 50% in {half} of {len(last)} tasks at {length_text(longest)}")
    return "; ".join(parts[:4]) + (f"; {len(parts) - 4} more lines." if len(parts) > 4 else ".")


def _effective_table(
    labels: Sequence[str], lengths: Mapping[str, tuple[EffectiveLength, EffectiveLength]], scores: pd.DataFrame
) -> Markup:
    overall = average(scores, TASKS)
    rows = []
    for label in labels:
        absolute, relative = lengths[label]
        weighted = weighted_averages(by_length(overall, label))
        count = scores[scores["setting"] == label]["ruler_task"].nunique()
        cells = [f"{value:.1%}" for value in weighted] if weighted else ["not all six lengths", "not all six lengths"]
        rows.append([name(label), f"{count} of 13", _effective_cell(absolute), _effective_cell(relative), *cells])
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
            f"The longest length such that every length up to it scores at least {ABSOLUTE_THRESHOLD:.1%} "
            f"(RULER's rule), or at least {RELATIVE_THRESHOLD:.0%} of the model's own score at no more than half its "
            f"training length; n/a where that score is below {NEAR_CHANCE:.0%}. Weighted averages cover 4K to 128K."
        ),
    )


def _effective_cell(length: EffectiveLength) -> Markup:
    small = element("small", length.reason) if length.reason else ""
    return element("td", length.text, small)


def _difference_tables(
    labels: Sequence[str], samples: Mapping[tuple[str, str], SampleScores], baseline: str
) -> list[Markup]:
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
                "Mean over the tasks both ran, in percentage points; band simultaneous over the lengths (95 %), over "
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


def _scores_table(labels: Sequence[str], scores: pd.DataFrame) -> Markup:
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
