"""The section on RULER: averages against length, the grid of tasks, effective lengths."""

from collections.abc import Mapping, Sequence

import pandas as pd

from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.ruler import (
    ABSOLUTE_THRESHOLD,
    AVERAGES,
    RELATIVE_THRESHOLD,
    TASKS,
    Alike,
    EffectiveLength,
    absolute_effective_length,
    average,
    averaged_alike,
    by_length,
    missing_tasks,
    relative_effective_length,
)
from sbeval.reports.figures.scores import score_figure, score_grid
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.models import length_text
from sbeval.reports.read.sample_scores import SampleScores
from sbeval.reports.sections.ruler_tables import difference_tables, effective_table, scores_table
from sbeval.reports.sections.section import Figure, Publish, Section


def effective_lengths(
    scores: pd.DataFrame, training_lengths: Mapping[str, int]
) -> dict[str, tuple[EffectiveLength, EffectiveLength]]:
    """Returns model to (by RULER's threshold over all 13 tasks, relative to its own score over those it ran)."""
    overall = average(scores, TASKS)
    return {
        label: (
            absolute_effective_length(by_length(overall, label), missing=missing_tasks(scores, label)),
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
        count = len(TASKS) - len(missing_tasks(scores, label))
        tasks = "all 13 tasks" if count == len(TASKS) else f"the {count} of 13 tasks run"
        if count == 1:
            tasks = "the one of 13 tasks run"
        sentences[label] = [
            f"Effective length on RULER: {_length_words(absolute)} at the benchmark's threshold of "
            f"{ABSOLUTE_THRESHOLD:.1%}, {_length_words(relative)} at {RELATIVE_THRESHOLD:.0%} of its own "
            f"short-context score over {tasks}."
        ]
    return sentences


def _length_words(length: EffectiveLength) -> str:
    return f"{length.text} ({length.reason})" if length.reason else length.text


def ruler_section(
    scores: pd.DataFrame,
    samples: Mapping[tuple[str, str], SampleScores],
    *,
    looks: Mapping[str, Look],
    training_lengths: Mapping[str, int],
    baseline: str,
    publish: Publish,
) -> Section | None:
    """Builds the section, None where no RULER task was run; `samples` holds (model label, task) to its samples."""
    if scores.empty:
        return None
    shown = set(scores["setting"])
    figures = []
    for words, tasks in AVERAGES.items():
        for chosen in averaged_alike(scores, tasks):
            if not (means := average(chosen.scores, chosen.tasks)).empty:
                title = f"RULER, {words}" if chosen.tasks == tasks else f"RULER, {chosen.words}"
                figures.append(_average_figure(title, means, chosen, looks, training_lengths, publish))
    alike = len(shown) == 1 or any(len(set(one.scores["setting"])) > 1 for one in averaged_alike(scores, TASKS))
    labels = [label for label in looks if label in shown]
    grid = {task: scores[scores["ruler_task"] == task] for task in TASKS if (scores["ruler_task"] == task).any()}
    if len(grid) > 1:
        figures.append(_grid_figure(grid, looks, training_lengths, publish))
    lengths = effective_lengths(scores, training_lengths)
    return Section(
        identifier="ruler",
        title="RULER",
        lead="Share of the expected answers found in the generated text. Bands: 95% intervals."
        + ("" if alike else " No average over tasks sets the models side by side, since no task was run with all."),
        figures=tuple(figures),
        legend=looks,
        content=(
            effective_table(labels, lengths, scores),
            *difference_tables(labels, samples, baseline),
            scores_table(labels, scores),
        ),
    )


def _average_figure(
    title: str,
    means: pd.DataFrame,
    chosen: Alike,
    looks: Mapping[str, Look],
    training_lengths: Mapping[str, int],
    publish: Publish,
) -> Figure:
    parts = []
    for label in looks:
        values = by_length(means, label)
        if values:
            first, last = next(iter(values)), list(values)[-1]
            parts.append(
                f"{label} {values[first]:.0%} at {length_text(first)}, {values[last]:.0%} at {length_text(last)}"
            )
    finding = "; ".join(parts if len(parts) <= 4 else [*parts[:3], f"{len(parts) - 3} more lines"]) + "."
    explanation = chosen.explanation
    spec = score_figure(
        means,
        looks=looks,
        training_lengths=training_lengths,
        title=title,
        subtitle=explanation,
        description=f"{title}. {finding}",
    )
    image, links = publish(spec, safe_stem(title.replace("RULER, ", "ruler-").replace(" ", "-")))
    return Figure(
        title=title,
        finding=finding,
        explanation=explanation,
        variants={"score": spec},
        image=image,
        downloads=links,
    )


def _grid_figure(
    grid: Mapping[str, pd.DataFrame], looks: Mapping[str, Look], training_lengths: Mapping[str, int], publish: Publish
) -> Figure:
    finding = _grid_finding(grid, list(looks))
    spec = score_grid(
        grid,
        looks=looks,
        training_lengths=training_lengths,
        title="RULER, task by task",
        subtitle="score against context length (tokens, log scale)",
        description=f"RULER, task by task. {finding}",
    )
    image, links = publish(spec, "ruler-tasks")
    return Figure(
        title="RULER, task by task",
        finding=finding,
        explanation=f"{len(grid)} of RULER's 13 tasks on the same axes. Dotted lines mark training lengths.",
        variants={"score": spec},
        image=image,
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
