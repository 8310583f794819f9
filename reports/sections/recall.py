"""The section on recall probes: share of exact answers by number of pairs (MQRAR) and by context length."""

from collections.abc import Mapping, Sequence

import pandas as pd

from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.recall import SOLVED, recall_scores, solved_up_to
from sbeval.reports.analyse.ruler import by_length
from sbeval.reports.figures.curves import curve_tooltip, length_domain, length_rows, training_marks
from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import length_text
from sbeval.reports.sections.section import Figure, Material, Section
from sbeval.reports.table import NOT_MEASURED, Cell, Table, row, texts

_TASKS = {
    "sb_mqrar": ("MQRAR", "Every key is given new values; at each return of a key its earlier value is asked for."),
    "sb_mqrar_text": ("MQRAR as text", "Numbers assigned to names again and again, each shown before it changes."),
    "sb_flipflop": ("Flip-flop", "Write, ignore and read a bit; a read shows the bit written last."),
}
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
        for rows, words, by_pairs in _panels(scores[scores["task"] == task]):
            figures.append(_figure(material, looks, task, rows, words, by_pairs))
            tables.append(_table(task, rows, words, by_pairs, list(looks)))
    return Section(
        identifier="recall",
        title="Recall",
        lead=(
            f"Share of answers whose every token is the model's most probable one. Solved means at least {SOLVED:.0%}. "
            "Bands: 95% intervals over samples."
        ),
        figures=tuple(figures),
        legend=looks,
        tables=tuple(tables),
    )


def _order(task: str) -> tuple[int, str]:
    return (list(_TASKS).index(task) if task in _TASKS else len(_TASKS), task)


def _title(task: str) -> str:
    return _TASKS.get(task, (task, ""))[0]


def _panels(scores: pd.DataFrame) -> list[tuple[pd.DataFrame, str, bool]]:
    """Returns (rows, what is held fixed, whether the axis counts pairs); the axis is what takes more values."""
    pairs = sorted(int(count) for count in scores["pairs"].dropna().unique())
    lengths = sorted(int(length) for length in scores["context_length_tokens"].unique())
    if not pairs:
        return [(scores, "", False)]
    if len(pairs) >= len(lengths):
        return [(scores[scores["context_length_tokens"] == length], f", {length:,} tokens", True) for length in lengths]
    return [(scores[scores["pairs"] == count], f", {count} pairs", False) for count in pairs]


def _figure(
    material: Material, looks: Mapping[str, Look], task: str, scores: pd.DataFrame, words: str, by_pairs: bool
) -> Figure:
    column, unit = ("pairs", "pairs") if by_pairs else ("context_length_tokens", "tokens")
    exact = scores[scores["metric"] == "exact_match"]
    order = [label for label in looks if (exact["setting"] == label).any()]
    marks = {} if by_pairs else training_marks(material.training_lengths, order)
    counts = sorted(int(count) for count in exact[column].unique())
    rows = length_rows(exact, order, ".2%", column)
    for one in rows:
        one["x_text"] = f"{one['x']:,} {unit}"
    guesses = scores[scores["metric"] == "chance"]["value"]
    levels = {SOLVED: f"solved, {SOLVED:.0%}"}
    if len(guesses) and guesses.max() == guesses.min():
        levels[float(guesses.max())] = "chance"
    title, explanation = f"{_title(task)}{words}", _TASKS.get(task, ("", ""))[1]
    finding = _finding(exact, order, column)
    spec = line_figure(
        rows,
        axes=Axes(
            x_title="pairs (log scale)" if by_pairs else "context length (tokens, log scale)",
            x_domain=(counts[0], max(counts[-1], counts[0] + 1)) if by_pairs else length_domain(exact, marks),
            x_values=tuple(counts) if by_pairs else None,
            y_title="exact answers",
            y_domain=(0.0, 1.0),
            y_format=".0%",
            levels=levels,
        ),
        looks={label: looks[label] for label in order},
        marks=marks,
        tooltip=curve_tooltip(rows, _TOOLTIP | {"x_text": "keys" if by_pairs else "context"}),
        title=title,
        subtitle=explanation,
        description=f"{title}. {finding}",
    )
    return material.figure(
        {"exact_match": spec}, _stem(task, words), title=title, finding=finding, explanation=explanation
    )


def _stem(task: str, words: str) -> str:
    return safe_stem(f"recall-{task}{words}")


def _finding(exact: pd.DataFrame, order: Sequence[str], column: str) -> str:
    parts = []
    for label in order:
        scores = by_length(exact, label, column)
        solved = solved_up_to(scores)
        last = max(scores)
        if solved is None:
            parts.append(f"{label} solves none ({scores[min(scores)]:.1%} at {_count(min(scores), column)})")
        elif solved == last:
            parts.append(f"{label} solves all, up to {_count(last, column)}")
        else:
            parts.append(
                f"{label} solves up to {_count(solved, column)} ({scores[last]:.1%} at {_count(last, column)})"
            )
    return "; ".join(parts[:4]) + (f"; {len(parts) - 4} more lines." if len(parts) > 4 else ".")


def _count(number: int, column: str) -> str:
    return f"{number} pairs" if column == "pairs" else length_text(number)


def _table(task: str, scores: pd.DataFrame, words: str, by_pairs: bool, labels: Sequence[str]) -> Table:
    column = "pairs" if by_pairs else "context_length_tokens"
    exact = scores[scores["metric"] == "exact_match"]
    counts = sorted(int(count) for count in exact[column].unique())
    several = exact["setting"].nunique() > 1
    best = {count: exact[exact[column] == count]["value"].max() if several else None for count in counts}
    rows = []
    for label in labels:
        values = by_length(exact, label, column)
        answers = by_length(scores[scores["metric"] == "answer_nll"], label, column)
        if values:
            cells = [
                Cell(
                    f"{values[count]:.1%}",
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
        caption=f"{title}: exact answers by {'number of pairs' if by_pairs else 'context length'}",
        header=texts("model", *[f"{count:,} pairs" if by_pairs else length_text(count) for count in counts]),
        rows=tuple(rows),
        explanation="Best in bold. Small print: negative log-likelihood of an answer.",
        folded=f"Numbers: {title}",
    )
