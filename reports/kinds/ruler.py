"""The section on RULER: averages against length, the grid of tasks, effective lengths, differences, every score."""

from collections.abc import Mapping, Sequence

import pandas as pd

from sbeval.reports.analyse.names import in_words
from sbeval.reports.analyse.paired import PairedDifference, ruler_differences
from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.ruler import (
    ABSOLUTE_THRESHOLD,
    ALIAS_SHARES,
    ALIAS_WORDS,
    AVERAGED_TASKS,
    NEAR_CHANCE,
    RELATIVE_THRESHOLD,
    TASKS,
    Alike,
    EffectiveLength,
    RulerScores,
    apart,
    average,
    averaged_alike,
    by_length,
    missing_tasks,
    weighted_averages,
)
from sbeval.reports.figures.curves import score_figure, score_grid
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.results import TaskKey, records
from sbeval.reports.read.samples import SAMPLE_SCORES, SampleScores
from sbeval.reports.section import Figure, Kind, Material, Section, listed
from sbeval.reports.table import NOT_MEASURED, Cell, Table, row, texts


def ruler_section(material: Material) -> Section | None:
    """Builds the section, None where no RULER task was run."""
    scores = material.ruler.scores
    if scores.empty:
        return None
    looks = material.looks_of(scores["setting"])
    figures = []
    for words, tasks in AVERAGED_TASKS.items():
        for chosen in averaged_alike(scores, tasks):
            if not (means := average(chosen.scores, chosen.tasks)).empty:
                title = f"RULER, {words}" if chosen.tasks == tasks else f"RULER, {chosen.words}"
                figures.append(_average_figure(material, looks, title, means, chosen))
    alike = len(looks) == 1 or any(len(set(one.scores["setting"])) > 1 for one in averaged_alike(scores, TASKS))
    grid = {task: scores[scores["ruler_task"] == task] for task in TASKS if (scores["ruler_task"] == task).any()}
    if len(grid) > 1:
        figures.append(_grid_figure(material, looks, grid))
    return Section(
        identifier="ruler",
        title="RULER",
        lead="Share of the expected answers found in the generated text. Bands: 95% intervals."
        + ("" if alike else " No average over tasks sets the models side by side, since no task was run with all."),
        figures=tuple(figures),
        legend=looks,
        tables=(
            _means_table(material.ruler, list(looks)),
            _effective_table(material.ruler, list(looks)),
            *_difference_tables(material.results[SAMPLE_SCORES], list(looks), material.baseline),
            _scores_table(scores, list(looks)),
        ),
    )


def _average_figure(
    material: Material, looks: Mapping[str, Look], title: str, means: pd.DataFrame, chosen: Alike
) -> Figure:
    parts = []
    for label in looks:
        values = by_length(means, label)
        if values:
            first, last = next(iter(values)), list(values)[-1]
            parts.append(
                f"{in_words(label)} {values[first]:.0%} at {length_text(first)}, "
                f"{values[last]:.0%} at {length_text(last)}"
            )
    finding = listed(parts)
    spec = score_figure(
        means,
        looks=looks,
        training_lengths=material.training_lengths,
        title=title,
        subtitle=chosen.explanation,
        description=f"{title}. {finding}",
    )
    stem = safe_stem(title.replace("RULER, ", "ruler-").replace(" ", "-"))
    return material.figure({"score": spec}, stem, title=title, finding=finding, explanation=chosen.explanation)


def _grid_figure(material: Material, looks: Mapping[str, Look], grid: Mapping[str, pd.DataFrame]) -> Figure:
    title, finding = "RULER, task by task", _grid_finding(grid, list(looks))
    spec = score_grid(
        grid,
        looks=looks,
        training_lengths=material.training_lengths,
        title=title,
        subtitle="score against context length (tokens, log scale)",
        description=f"{title}. {finding}",
    )
    explanation = f"{len(grid)} of RULER's 13 tasks on the same axes. Dotted lines mark training lengths."
    return material.figure(
        {"score": spec}, "ruler-tasks", title=title, finding=finding, explanation=explanation, wide=True
    )


def _grid_finding(grid: Mapping[str, pd.DataFrame], labels: Sequence[str]) -> str:
    parts = []
    for label in labels:
        scores = [values for rows in grid.values() if (values := by_length(rows, label))]
        if scores:
            longest = max(max(values) for values in scores)
            last = [values[longest] for values in scores if longest in values]
            half = sum(value >= 0.5 for value in last)
            parts.append(
                f"{in_words(label)} scores at least 50% in {half} of {len(last)} tasks at {length_text(longest)}"
            )
    return "; ".join(parts[:4]) + (f"; {len(parts) - 4} more lines." if len(parts) > 4 else ".")


def _means_table(ruler: RulerScores, labels: Sequence[str]) -> Table:
    """Returns the mean score at every length; the page draws it."""
    lengths = sorted(int(length) for length in ruler.overall["context_length_tokens"].unique())
    rows = []
    for label in labels:
        values = by_length(ruler.overall, label)
        cells = [f"{values[length]:.3f}" if length in values else NOT_MEASURED for length in lengths]
        effective = [Cell(length.text) for length in ruler.effective[label]]
        rows.append(row(Cell(name=label), [_tasks_run(ruler, label), *cells, *effective]))
    return Table(
        stem="ruler",
        caption="RULER: mean score over the tasks run, and effective lengths at the benchmark's threshold (all 13 "
        "tasks) and of its own score",
        header=texts("model", "tasks", *map(length_text, lengths), "effective, 85.6%", "effective, 85% of own"),
        rows=tuple(rows),
        on_page=False,
    )


def _tasks_run(ruler: RulerScores, label: str) -> str:
    return f"{len(TASKS) - len(missing_tasks(ruler.scores, label))} of {len(TASKS)}"


def _effective_table(ruler: RulerScores, labels: Sequence[str]) -> Table:
    rows = []
    for label in labels:
        missing = missing_tasks(ruler.scores, label)
        weighted = None if missing else weighted_averages(by_length(ruler.overall, label))
        lacking = Cell("not all 13 tasks" if missing else "not all six lengths", missing=True)
        cells = [Cell(f"{value:.1%}") for value in weighted] if weighted else [lacking, lacking]
        effective = [_effective_cell(length) for length in ruler.effective[label]]
        rows.append(row(Cell(name=label), [_tasks_run(ruler, label), *effective, *cells]))
    return Table(
        stem="ruler-effective",
        caption="Effective context length and weighted averages",
        header=texts(
            "model",
            "tasks",
            f"effective length, {ABSOLUTE_THRESHOLD:.1%}",
            f"effective length, {RELATIVE_THRESHOLD:.0%} of own",
            "weighted to long",
            "weighted to short",
        ),
        rows=tuple(rows),
        explanation=(
            f"The longest length such that every length up to it scores at least {ABSOLUTE_THRESHOLD:.1%} over all 13 "
            f"tasks (RULER's rule), or, over the tasks run, at least {RELATIVE_THRESHOLD:.0%} of the model's own score "
            f"at no more than half its training length; n/a where that score is below {NEAR_CHANCE:.0%}. Weighted "
            "averages are over all 13 tasks at 4K to 128K."
        ),
    )


def _effective_cell(length: EffectiveLength) -> Cell:
    return Cell(length.text, small=(length.reason,) if length.reason else ())


def _difference_tables(samples: Mapping[TaskKey, SampleScores], labels: Sequence[str], baseline: str) -> list[Table]:
    """Returns the differences to the baseline by length, or nothing where no two models share samples."""
    by_task = {label: {task: one for (own, task), one in samples.items() if own == label} for label in labels}
    found = {
        label: ruler_differences(by_task[label], by_task.get(baseline, {})) for label in labels if label != baseline
    }
    known = {length for differences, _ in found.values() for length in differences}
    lengths = sorted(known, key=lambda length: (length is None, length or 0))
    rows = [
        row(
            Cell(name=label, small=(f"{len(tasks)} tasks",)),
            [_difference_cell(differences.get(length)) for length in lengths],
        )
        for label, (differences, tasks) in found.items()
        if differences
    ]
    if not rows:
        return []
    return [
        Table(
            stem="ruler-differences",
            caption=f"RULER: difference to {baseline}, paired by sample",
            header=texts("model", *(length_text(length) if length else "mean over octaves" for length in lengths)),
            rows=tuple(rows),
            explanation=(
                "Mean over the tasks both ran, in percentage points; band simultaneous over the lengths (95%), over "
                "the samples both answered."
            ),
            interval="percentage points, simultaneous 95% band",
        )
    ]


def _difference_cell(found: PairedDifference | None) -> Cell:
    if found is None:
        return NOT_MEASURED
    known = found.low == found.low
    return Cell(
        f"{100 * found.estimate:+.1f}",
        interval=(f"{100 * found.low:+.1f}", f"{100 * found.high:+.1f}") if known else None,
        verdict="better" if found.low > 0 else "worse" if found.high < 0 else None,
    )


def _scores_table(scores: pd.DataFrame, labels: Sequence[str]) -> Table:
    lengths = sorted(int(length) for length in scores["context_length_tokens"].unique())
    found: dict[tuple[str, str], dict[int, float]] = {}
    for one in records(scores):
        found.setdefault((one["setting"], one["ruler_task"]), {})[int(one["context_length_tokens"])] = one["value"]
    rows = [
        row(
            Cell(f" {task}", name=label),
            [f"{values[length]:.1%}" if length in values else NOT_MEASURED for length in lengths],
        )
        for label in labels
        for task in (*TASKS, *ALIAS_SHARES)
        if (values := found.get((label, task))) is not None
    ]
    return Table(
        stem="ruler-tasks",
        caption="RULER scores, task by task",
        header=texts("model and task", *map(length_text, lengths)),
        rows=tuple(rows),
        folded="Numbers: RULER, task by task",
        explanation=f"Not RULER's score, and in no average: {ALIAS_WORDS}." if apart(scores) else "",
    )


KIND = Kind(section=ruler_section)
