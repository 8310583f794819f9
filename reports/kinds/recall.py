"""The section on recall probes: share of exact answers by number of pairs, by distance and by context length."""

from collections.abc import Mapping, Sequence

import pandas as pd

from sbeval.reports.analyse.names import in_words
from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.recall import SOLVED, intervals, recall_scores, solved_up_to
from sbeval.reports.analyse.ruler import by_length
from sbeval.reports.figures.curves import curve_tooltip, length_domain, length_rows, training_marks
from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import length_text
from sbeval.reports.section import Figure, Kind, Material, Section
from sbeval.reports.table import NOT_MEASURED, Cell, Table, row, texts

_TASKS = {
    "sb_mqrar": ("MQRAR", "Every key is given new values; at each return of a key its earlier value is asked for."),
    "sb_mqrar_text": ("MQRAR as text", "Numbers assigned to names again and again, each shown before it changes."),
    "sb_copy_passage": ("Copying a passage", "Random words from the very beginning come back at the very end."),
    "sb_copy_phrase": ("Copying phrases", "Short phrases of random words come back, each after its own distance."),
    "sb_copy_selective": ("Selective copying", "Words marked among others are listed at the end, in their order."),
    "sb_json_kv_forced": ("JSON keys and values", "The value of one key in an object of random pairs."),
    "sb_flipflop": ("Flip-flop", "Write, ignore and read a bit; a read shows the bit written last."),
}
_MANY_SHOT = "sb_many_shot_"
_COUNTED = {"pairs": "keys", "tokens back": "distance"}
_TOOLTIP = {"setting": "model", "x_text": "", "value_text": "exact answers", "interval_text": "95% interval"}


def recall_section(material: Material) -> Section | None:
    """Builds the section, None where no recall task was run."""
    scores = recall_scores(material.results.measurements)
    if scores.empty:
        return None
    recalling = material.looks_of(material.results.measurements.query("family == 'recall'")["setting"])
    looks = {label: look for label, look in recalling.items() if (scores["setting"] == label).any()}
    figures, tables = [], []
    for task in sorted(set(scores["task"]), key=_order):
        for rows, words, counted in _panels(scores[scores["task"] == task]):
            figures.append(_figure(material, looks, task, rows, words, counted))
            tables.append(_table(task, rows, words, counted, list(looks)))
    return Section(
        identifier="recall",
        title="Recall",
        lead=(
            "Share of answers whose every token is the model's most probable one; in many-shot classification, of "
            f"texts whose label is the most probable of all. Solved means at least {SOLVED:.0%}. "
            "Bands: 95% intervals over samples."
        ),
        figures=tuple(figures),
        legend=looks,
        tables=tuple(tables),
    )


def _order(task: str) -> tuple[int, str]:
    return (list(_TASKS).index(task) if task in _TASKS else len(_TASKS), task)


def _title(task: str) -> str:
    many_shot = f"Many-shot classification, {task.removeprefix(_MANY_SHOT)}" if task.startswith(_MANY_SHOT) else task
    return _TASKS.get(task, (many_shot, ""))[0]


def _panels(scores: pd.DataFrame) -> list[tuple[pd.DataFrame, str, str | None]]:
    """Returns (rows, what is held fixed, what the axis counts or None for lengths); the axis takes more values."""
    pairs = sorted(int(count) for count in scores["pairs"].dropna().unique())
    lengths = sorted(int(length) for length in scores["context_length_tokens"].unique())
    if not pairs:
        return [(scores, "", None)]
    counted = str(scores["unit"].dropna().iloc[0])
    if len(pairs) >= len(lengths):
        return [
            (scores[scores["context_length_tokens"] == length], f", {length:,} tokens", counted) for length in lengths
        ]
    return [(scores[scores["pairs"] == count], f", {count} {counted}", None) for count in pairs]


def _figure(
    material: Material, looks: Mapping[str, Look], task: str, scores: pd.DataFrame, words: str, counted: str | None
) -> Figure:
    column, unit = ("pairs", counted) if counted else ("context_length_tokens", "tokens")
    exact = scores[scores["metric"] == "exact_match"]
    order = [label for label in looks if (exact["setting"] == label).any()]
    marks = {} if counted else training_marks(material.training_lengths, order)
    counts = sorted(int(count) for count in exact[column].unique())
    rows = length_rows(exact, order, ".2%", column)
    for one in rows:
        one["x_text"] = f"{one['x']:,} {unit}"
    guesses = scores[scores["metric"] == "chance"]["value"]
    levels = {SOLVED: f"solved, {SOLVED:.0%}"}
    if len(guesses) and guesses.max() == guesses.min():
        levels[float(guesses.max())] = "chance"
    title, explanation = f"{_title(task)}{words}", _TASKS.get(task, ("", ""))[1]
    finding = _finding(exact, order, counted)
    spec = line_figure(
        rows,
        axes=Axes(
            x_title=f"{counted} (log scale)" if counted else "context length (tokens, log scale)",
            x_domain=(counts[0], max(counts[-1], counts[0] + 1)) if counted else length_domain(exact, marks),
            x_values=tuple(counts) if counted else None,
            y_title="exact answers",
            y_domain=(0.0, 1.0),
            y_format=".0%",
            levels=levels,
        ),
        looks={label: looks[label] for label in order},
        marks=marks,
        tooltip=curve_tooltip(rows, _TOOLTIP | {"x_text": _COUNTED[counted] if counted else "context"}),
        title=title,
        subtitle=explanation,
        description=f"{title}. {finding}",
    )
    return material.figure(
        {"exact_match": spec}, _stem(task, words), title=title, finding=finding, explanation=explanation
    )


def _stem(task: str, words: str) -> str:
    return safe_stem(f"recall-{task}{words}")


def _finding(exact: pd.DataFrame, order: Sequence[str], counted: str | None) -> str:
    parts = []
    for label in order:
        scores = by_length(exact, label, "pairs" if counted else "context_length_tokens")
        solved = solved_up_to(scores)
        last = max(scores)
        if solved is None:
            parts.append(f"{in_words(label)} solves none ({scores[min(scores)]:.1%} at {_count(min(scores), counted)})")
        elif solved == last:
            parts.append(f"{in_words(label)} solves all, up to {_count(last, counted)}")
        else:
            parts.append(
                f"{in_words(label)} solves up to {_count(solved, counted)} "
                f"({scores[last]:.1%} at {_count(last, counted)})"
            )
    return "; ".join(parts[:4]) + (f"; {len(parts) - 4} more lines." if len(parts) > 4 else ".")


def _count(number: int, counted: str | None) -> str:
    return f"{number:,} {counted}" if counted else length_text(number)


def _table(task: str, scores: pd.DataFrame, words: str, counted: str | None, labels: Sequence[str]) -> Table:
    column = "pairs" if counted else "context_length_tokens"
    exact = scores[scores["metric"] == "exact_match"]
    counts = sorted(int(count) for count in exact[column].unique())
    several = exact["setting"].nunique() > 1
    best = {count: exact[exact[column] == count]["value"].max() if several else None for count in counts}
    rows = []
    for label in labels:
        values, ends = by_length(exact, label, column), intervals(exact, label, column)
        answers = by_length(scores[scores["metric"] == "answer_nll"], label, column)
        if values:
            cells = [
                Cell(
                    f"{values[count]:.1%}",
                    interval=ends.get(count),
                    bold=values[count] == best[count],
                    small=(f"{answers[count]:.3f} nats",) if count in answers else (),
                )
                if count in values
                else NOT_MEASURED
                for count in counts
            ]
            rows.append(row(Cell(name=label), cells))
    title = f"{_title(task)}{words}"
    return Table(
        stem=_stem(task, words),
        caption=f"{title}: exact answers by {counted or 'context length'}",
        header=texts("model", *[_count(count, counted) for count in counts]),
        rows=tuple(rows),
        explanation="Best in bold. Small print: 95% interval, Wilson's; negative log-likelihood of an answer.",
        interval="95% interval",
        folded=f"Numbers: {title}",
    )


KIND = Kind(section=recall_section)
