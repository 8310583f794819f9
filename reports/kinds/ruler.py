"""The section "RULER": average and task scores against context length, effective lengths, paired differences."""

import itertools
from collections.abc import Mapping, Sequence

import pandas as pd

from sbeval.reports.analyse import ruler as analysis
from sbeval.reports.analyse.left_out import unfit_cell, unfit_sentence
from sbeval.reports.analyse.paired import PairedDifference, ruler_differences
from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.ruler import ABSOLUTE_THRESHOLD, RELATIVE_THRESHOLD, TASKS, RulerScores, by_length
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.lines import (
    SCORE_TOOLTIP,
    SHARES,
    Axes,
    length_domain,
    length_figure,
    length_rows,
    small_multiples,
)
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import first_listed, length_text, listed, quote_name
from sbeval.reports.read.results import LENGTH, TaskKey, column_values, records
from sbeval.reports.read.samples import SAMPLE_SCORES, SampleScores
from sbeval.reports.section import NOT_MEASURED, Cell, Figure, Kind, Material, Section, Table, interval, verdict


def _section(material: Material) -> Section | None:
    """Builds the section "RULER"; None if no RULER task was run.

    If no RULER task was run, but another task counted how often the thinking of a model was cut off at its token
    budget, the section consists of the table of these counts.
    """
    scores = material.ruler.scores
    cut = analysis.ruler_scores(material.results.measurements, analysis.THINKING_CUT)
    thinking = _thinking_tables(cut, [*dict.fromkeys(cut["setting"])])
    if scores.empty:
        lead = "How often models that think had to be made to answer."
        return Section(identifier="ruler", title="Thinking", lead=lead, tables=tuple(thinking)) if thinking else None
    looks = material.looks_of(scores["setting"])
    figures = []
    drawn = set()
    for average_name, tasks in analysis.AVERAGED_TASKS.items():
        for alike in analysis.averaged_alike(scores, tasks):
            if alike.tasks not in drawn and not (means := analysis.average(alike.scores, alike.tasks)).empty:
                drawn.add(alike.tasks)
                lacking = analysis.without_mean(alike.scores, alike.tasks)
                explanation = f"{alike.explanation} {lacking} {unfit_sentence(alike.scores)}".strip()
                figures.append(_average_figure(material, looks, alike.name or average_name, means, explanation))
    averaged = [alike.scores["setting"].nunique() for alike in analysis.averaged_alike(scores, TASKS)]
    alone = "No average over tasks compares the models, since no task was run with all of them."
    grid = {task: scores[scores["ruler_task"] == task] for task in TASKS if (scores["ruler_task"] == task).any()}
    if len(grid) > 1:
        figures.append(_grid_figure(material, looks, grid))
    labels = list(looks)
    return Section(
        identifier="ruler",
        title="RULER",
        lead="Share of the expected answers found in the generated text. Bands: 95% intervals."
        + ("" if len(looks) == 1 or max(averaged, default=0) > 1 else f" {alone}"),
        figures=tuple(figures),
        legend=looks,
        tables=(
            _means_table(material.ruler, labels),
            _effective_table(material.ruler, labels),
            *_difference_tables(material.results[SAMPLE_SCORES], labels, material.baseline),
            _scores_table(scores, labels),
            *thinking,
        ),
    )


RULER = Kind(section=_section)


def _average_figure(
    material: Material, looks: Mapping[str, Look], average_name: str, means: pd.DataFrame, explanation: str
) -> Figure:
    sentences = []
    for label in looks:
        if values := by_length(means, label):
            lengths = dict.fromkeys((min(values), max(values)))
            ends = [f"{values[length]:.0%} at {length_text(length)}" for length in lengths]
            sentences.append(f"{quote_name(label)} {', '.join(ends)}")
    caption = Caption(title=f"RULER, {average_name}", finding=listed(sentences), explanation=explanation)
    axis = {"tooltip": SCORE_TOOLTIP, "y_title": "score", **SHARES}
    spec = length_figure(means, caption, looks=looks, number_format=".3f", **axis)
    return material.figure({"score": spec}, safe_stem(f"ruler-{average_name.replace(' ', '-')}"), caption)


def _grid_figure(material: Material, looks: Mapping[str, Look], grid: Mapping[str, pd.DataFrame]) -> Figure:
    caption = Caption(
        title="RULER, task by task",
        finding=_grid_finding(grid, list(looks)),
        explanation=f"{len(grid)} of RULER's 13 tasks on the same axes. Dotted lines mark training lengths. "
        f"{unfit_sentence(pd.concat(list(grid.values())))}".strip(),
        subtitle="score against context length (tokens, log scale)",
    )
    everything = pd.concat(list(grid.values()), ignore_index=True)
    drawn_looks = {label: look for label, look in looks.items() if (everything["setting"] == label).any()}
    axes = Axes(x_title=None, x_octaves=3, x_domain=length_domain(everything, looks), y_title=None, **SHARES)
    panels = {task: (length_rows(scores, drawn_looks, ".3f"), axes) for task, scores in grid.items()}
    spec = small_multiples(panels, caption, columns=4, height=130, width=200, tooltip=SCORE_TOOLTIP, looks=drawn_looks)
    return material.figure({"score": spec}, "ruler-tasks", caption, wide=True)


def _grid_finding(grid: Mapping[str, pd.DataFrame], labels: Sequence[str]) -> str:
    sentences = []
    for label in labels:
        scores = [values for rows in grid.values() if (values := by_length(rows, label))]
        if scores:
            longest = max(max(values) for values in scores)
            last = [values[longest] for values in scores if longest in values]
            half = f"{sum(value >= 0.5 for value in last)} of {len(last)} tasks"
            sentences.append(f"{quote_name(label)} scores at least 50% in {half} at {length_text(longest)}")
    return first_listed(sentences)


def _means_table(ruler: RulerScores, labels: Sequence[str]) -> Table:
    """Returns the table of mean scores at every context length for exported files; the page shows them as a figure."""
    lengths = column_values(ruler.overall)
    rows: list[list[Cell | str]] = []
    for label in labels:
        values = by_length(ruler.overall, label)
        cells = [f"{values[length]:.3f}" if length in values else NOT_MEASURED for length in lengths]
        effective = [Cell(length.shown, interval=length.shown_interval) for length in ruler.effective[label]]
        rows.append([Cell(name=label), _tasks_run(ruler, label), *cells, *effective])
    return Table.of(
        ("model", "tasks", *map(length_text, lengths), "effective, 85.6%", "effective, 85% of own"),
        rows,
        stem="ruler",
        caption="RULER: mean score over the tasks run, and effective lengths at the benchmark's threshold (all 13 "
        "tasks) and of its own score",
        interval="95% interval",
        on_page=False,
    )


def _tasks_run(ruler: RulerScores, label: str) -> str:
    return f"{len(TASKS) - len(analysis.missing_tasks(ruler.scores, label))} of {len(TASKS)}"


def _effective_table(ruler: RulerScores, labels: Sequence[str]) -> Table:
    rows: list[list[Cell | str]] = []
    for label in labels:
        missing = analysis.missing_tasks(ruler.scores, label)
        weighted = None if missing else analysis.weighted_averages(by_length(ruler.overall, label))
        lacking = Cell("not all 13 tasks" if missing else "not all six lengths", missing=True)
        cells = [Cell(f"{value:.1%}") for value in weighted] if weighted else [lacking, lacking]
        effective = [
            Cell(length.shown, interval=length.shown_interval, small=tuple(filter(None, [length.reason])))
            for length in ruler.effective[label]
        ]
        rows.append([Cell(name=label), _tasks_run(ruler, label), *effective, *cells])
    thresholds = (f"{ABSOLUTE_THRESHOLD:.1%}", f"{RELATIVE_THRESHOLD:.0%} of own")
    effective_words = [f"effective length, {threshold}" for threshold in thresholds]
    return Table.of(
        ("model", "tasks", *effective_words, "weighted to long", "weighted to short"),
        rows,
        stem="ruler-effective",
        caption="Effective context length and weighted averages",
        interval="95% interval",
        explanation=(
            f"The longest length such that every length up to it scores at least {ABSOLUTE_THRESHOLD:.1%} over all 13 "
            f"tasks (RULER's rule), or, over the tasks run, at least {RELATIVE_THRESHOLD:.0%} of the model's own score "
            f"at no more than half its training length; n/a where that score is below "
            f"{analysis.NEAR_CHANCE:.0%}. An interval is the same rule on the lower and on the upper ends of every "
            "length's own 95% interval. Weighted averages are over all 13 tasks at 4K to 128K."
        ),
    )


def _difference_tables(samples: Mapping[TaskKey, SampleScores], labels: Sequence[str], baseline: str) -> list[Table]:
    """Returns the table of paired differences to the baseline by context length, in a list.

    The list is empty if no model was run on samples that the baseline was run on too.
    """
    by_task = {label: {task: scores for (model, task), scores in samples.items() if model == label} for label in labels}
    base = by_task.get(baseline, {})
    pairs = {label: ruler_differences(by_task[label], base) for label in labels if label != baseline}
    known = {length for differences, _ in pairs.values() for length in differences}
    if not known:
        return []
    lengths = sorted(known, key=lambda length: (length is None, length or 0))
    rows = [
        (Cell(name=label, small=(f"{len(tasks)} tasks",)), *(_difference_cell(pair.get(length)) for length in lengths))
        for label, (pair, tasks) in pairs.items()
        if pair
    ]
    return [
        Table.of(
            ("model", *(length_text(length) if length else "mean over octaves" for length in lengths)),
            rows,
            stem="ruler-differences",
            caption=f"RULER: difference to {baseline}, paired by sample",
            explanation=(
                "Mean over the tasks both ran, in percentage points; band simultaneous over the lengths (95%), over "
                "the samples both answered."
            ),
            interval="percentage points, simultaneous 95% band",
        )
    ]


def _difference_cell(pair: PairedDifference | None) -> Cell:
    if pair is None:
        return NOT_MEASURED
    ends = interval(100 * pair.low, 100 * pair.high, "+.1f")
    side = verdict(pair.low, pair.high, higher_is_better=True)
    return Cell(f"{100 * pair.estimate:+.1f}", interval=ends, verdict=side)


def _scores_table(scores: pd.DataFrame, labels: Sequence[str]) -> Table:
    rows = []
    for label in labels:
        for task in (*TASKS, *analysis.ALIAS_SHARES):
            of_task = scores[(scores["ruler_task"] == task) & (scores["setting"] == label)]
            if not of_task.empty:
                cells = {
                    int(row[LENGTH]): Cell(f"{row['value']:.1%}", small=unfit_cell(row)) for row in records(of_task)
                }
                rows.append((Cell(f" {task}", name=label), cells))
    aside = f"Not RULER's score, and in no average: {analysis.ALIAS_TEXT}." if analysis.apart(scores) else ""
    return Table.by_length(
        rows,
        lengths=column_values(scores),
        heading="model and task",
        stem="ruler-tasks",
        caption="RULER scores, task by task",
        folded="Numbers: RULER, task by task",
        explanation=aside,
    )


def _thinking_tables(cut: pd.DataFrame, labels: Sequence[str]) -> list[Table]:
    """Returns a list with the table of how often thinking was cut off at its token budget; empty if no model thinks."""
    rows = []
    for label, task in itertools.product(labels, dict.fromkeys(cut["ruler_task"])):
        of_task = cut[cut["ruler_task"] == task]
        values, lows, highs = (by_length(of_task, label, numbers=name) for name in ("value", "ci95_low", "ci95_high"))
        cells = {n: Cell(f"{values[n]:.1%}", interval=interval(lows[n], highs[n], ".1%")) for n in values}
        if cells:
            rows.append((Cell(f" {task}", name=label), cells))
    table = Table.by_length(
        rows,
        lengths=column_values(cut),
        heading="model and task",
        stem="ruler-thinking",
        caption="Answers before which the model's thinking had to be cut",
        explanation="Share of samples in which thinking_tokens did not suffice, with its 95% interval, Wilson's.",
        interval="95% interval",
    )
    return [table] if rows else []
