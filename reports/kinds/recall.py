"""The section "Recall": share of exact answers of recall probes by number of key-value pairs, distance or length.

A recall probe asks for a value that was shown earlier in the context.
"""

import itertools
import re
from collections.abc import Mapping, Sequence

import pandas as pd

from sbeval.reports.analyse.left_out import unfit_cell, unfit_sentence
from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.ruler import by_length
from sbeval.reports.analyse.statistics import share_interval
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.lines import SHARES, Axes, length_domain, length_rows, line_figure, with_seeds
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import first_listed, length_text, quote_name, ranked
from sbeval.reports.read.results import column_values, records
from sbeval.reports.section import Cell, Figure, Kind, Material, Section, Table, interval

_SOLVED = 0.99
_METRIC = re.compile(r"(?P<metric>exact_match|answer_nll|chance)(?:_(?P<pairs>\d+)_(?P<unit>pairs|tokens))?")
_UNITS = {"pairs": "pairs", "tokens": "tokens back"}
_AXIS_NAMES = {"pairs": "keys", "tokens back": "distance"}
_TASKS = {
    "sb_mqrar": (
        "MQRAR",
        "Keys get new values again and again; a key that returns asks for an earlier one.",
    ),
    "sb_mqrar_text": (
        "MQRAR as text",
        "Names get new numbers again and again; each is printed before it changes.",
    ),
    "sb_copy_passage": ("Copying a passage", "Random words from the very beginning are repeated at the very end."),
    "sb_copy_phrase": ("Copying phrases", "Short phrases of random words are repeated, each after its own distance."),
    "sb_copy_selective": (
        "Selective copying",
        "Some words are marked; the end lists the marked words in order.",
    ),
    "sb_json_kv_forced": ("JSON keys and values", "The value of one key in an object of random pairs."),
    "sb_association_forced": ("Association", "A name whose sentence shares no word with the question."),
    "sb_turns_forced": ("The n-th of several turns", "One of several replies to the same request, by its number."),
    **{
        f"sb_longbench2_{stratum}": (f"LongBench v2, {stratum} texts", "Four choices; long texts lose their middle.")
        for stratum in ("short", "medium", "long")
    },
    "sb_flipflop": ("Flip-flop", "Write, ignore and read a bit; a read shows the bit written last."),
    "sb_algorithm_association": ("Association of tokens", "The values of four of many keys, each of two tokens."),
    "sb_algorithm_copy": ("Copying the source", "A random source comes again as a whole."),
    "sb_algorithm_reverse": ("Reversing the source", "A random source comes again backwards, as a whole."),
    "sb_algorithm_sort": ("Sorting the source", "A random source comes again in order, as a whole."),
    "sb_algorithm_two_back": ("Two back", "Each symbol of a sequence comes again two steps later; all of them count."),
    "sb_algorithm_flipflop": ("Flip-flop of tokens", "The bit written last, at the end of a sequence."),
}
_MANY_SHOT = "sb_many_shot_"
_TOOLTIP = {"setting": "model", "x_text": "", "value_text": "exact answers", "interval_text": "95% interval"}


def _section(material: Material) -> Section | None:
    """Builds the section "Recall"; None if no recall task was run."""
    scores = recall_scores(material.results.measurements)
    if scores.empty:
        return None
    recalling = material.looks_of(material.results.measurements.query("family == 'recall'")["setting"])
    looks = {label: look for label, look in recalling.items() if (scores["setting"] == label).any()}
    figures, tables = [], []
    for task in sorted(set(scores["task"]), key=lambda task: ranked(task, list(_TASKS))):
        for rows, fixed, counted in _panels(scores[scores["task"] == task]):
            figures.append(_figure(material, looks, task, rows, fixed, counted))
            tables.append(_table(task, rows, fixed, counted, list(looks)))
    return Section(
        identifier="recall",
        title="Recall",
        lead=(
            "Share of answers whose every token is the model's most probable one; in many-shot classification, of "
            f"texts whose label is the most probable of all. Solved means at least {_SOLVED:.0%}. "
            "Bands: 95% intervals over samples."
        ),
        figures=tuple(figures),
        legend=looks,
        tables=tuple(tables),
    )


RECALL = Kind(section=_section)


def is_drawn(metric: str) -> bool:
    """Whether the section on recall shows this metric of a recall task."""
    return _METRIC.fullmatch(metric) is not None


def recall_scores(measurements: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of recall tasks from the table of measurements, with two more columns, `pairs` and `unit`.

    `pairs` is the number in the name of a metric. `unit` says whether this number counts key-value pairs in a sequence
    or tokens since the answer was shown. Both are NA for a metric without a number. Intervals of shares are Wilson's
    (`share_interval`).
    """
    rows = measurements[measurements["family"] == "recall"].copy()
    names = rows["metric"].str.extract(f"^{_METRIC.pattern}$")
    rows["metric"] = names["metric"]
    rows["pairs"] = pd.to_numeric(names["pairs"]).astype("Int64")
    rows["unit"] = names["unit"].map(_UNITS)
    rows = rows.dropna(subset=["metric", "context_length_tokens"])
    lows, highs = share_interval(rows)
    share = rows["metric"] == "exact_match"
    rows.loc[share, "ci95_low"], rows.loc[share, "ci95_high"] = lows[share], highs[share]
    return rows.drop(columns=["tokens", "clusters"]).reset_index(drop=True)


def solved_up_to(scores: Mapping[int, float]) -> int | None:
    """Returns the largest number of pairs, distance or context length up to which all scores are at least 99%.

    These are the keys of `scores`. Returns None if the score of the smallest key is below 99%.
    """
    solved = itertools.takewhile(lambda count: scores[count] >= _SOLVED, sorted(scores))
    return max(solved, default=None)


def _title(task: str, fixed: str) -> str:
    many_shot = f"Many-shot classification, {task.removeprefix(_MANY_SHOT)}" if task.startswith(_MANY_SHOT) else task
    return _TASKS.get(task, (many_shot, ""))[0] + fixed


def _panels(scores: pd.DataFrame) -> list[tuple[pd.DataFrame, str, str | None]]:
    """Splits the scores of a task into figures.

    The x axis is either the number of pairs or the context length, whichever has more distinct values. There is one
    figure for each value of the other quantity.

    Returns:
        For each figure: its table rows; the value of the other quantity, as the end of the figure's title; and what the
        x axis counts, None for context lengths.
    """
    pairs = column_values(scores, "pairs")
    lengths = column_values(scores)
    if not pairs:
        return [(scores, "", None)]
    counted = str(scores["unit"].dropna().iloc[0])
    if len(pairs) >= len(lengths):
        at_length = {length: scores[scores["context_length_tokens"] == length] for length in lengths}
        return [(rows, f", {length:,} tokens", counted) for length, rows in at_length.items()]
    return [(scores[scores["pairs"] == count], f", {count} {counted}", None) for count in pairs]


def _column(counted: str | None) -> str:
    return "pairs" if counted else "context_length_tokens"


def _figure(
    material: Material, looks: Mapping[str, Look], task: str, scores: pd.DataFrame, fixed: str, counted: str | None
) -> Figure:
    exact = scores[scores["metric"] == "exact_match"]
    order = [label for label in looks if (exact["setting"] == label).any()]
    counts = column_values(exact, _column(counted))
    rows = length_rows(exact, order, ".2%", _column(counted))
    for point in rows:
        point["x_text"] = f"{point['x']:,} {counted or 'tokens'}"
    guesses = scores[scores["metric"] == "chance"]["value"]
    levels = {_SOLVED: f"solved, {_SOLVED:.0%}"}
    if len(guesses) and guesses.max() == guesses.min():
        levels[float(guesses.max())] = "chance"
    finding = _finding(exact, order, counted)
    explanation = f"{_TASKS.get(task, ('', ''))[1]} {unfit_sentence(exact)}".strip()
    caption = Caption(title=_title(task, fixed), finding=finding, explanation=explanation)
    axes = Axes(
        x_title=f"{counted} (log scale)" if counted else "context length (tokens, log scale)",
        x_domain=(counts[0], max(counts[-1], counts[0] + 1)) if counted else length_domain(exact, looks),
        x_values=tuple(counts) if counted else None,
        y_title="exact answers",
        levels=levels,
        start_level=_SOLVED,
        **SHARES,
    )
    tooltip = with_seeds(_TOOLTIP | {"x_text": _AXIS_NAMES[counted] if counted else "context"}, rows)
    spec = line_figure(rows, caption, axes=axes, looks=looks, tooltip=tooltip)
    return material.figure({"exact_match": spec}, safe_stem(f"recall-{task}{fixed}"), caption)


def _finding(exact: pd.DataFrame, order: Sequence[str], counted: str | None) -> str:
    sentences = []
    for label in order:
        scores = by_length(exact, label, _column(counted))
        solved = solved_up_to(scores)
        first = min(scores)
        last = max(scores)
        if solved is None:
            range_text = f"is below {_SOLVED:.0%} even at {_count(first, counted)} ({scores[first]:.1%})"
        elif solved == last:
            range_text = f"solves all, up to {_count(last, counted)}"
        else:
            range_text = f"solves up to {_count(solved, counted)} ({scores[last]:.1%} at {_count(last, counted)})"
        sentences.append(f"{quote_name(label)} {range_text}")
    return first_listed(sentences)


def _count(number: int, counted: str | None) -> str:
    return f"{number:,} {counted}" if counted else length_text(number)


def _table(task: str, scores: pd.DataFrame, fixed: str, counted: str | None, labels: Sequence[str]) -> Table:
    column = _column(counted)
    exact = scores[scores["metric"] == "exact_match"]
    best = exact.groupby(column)["value"].max().to_dict() if exact["setting"].nunique() > 1 else {}
    rows = []
    for label in labels:
        values, lows, highs = (by_length(exact, label, column, end) for end in ("value", "ci95_low", "ci95_high"))
        answers = by_length(scores[scores["metric"] == "answer_nll"], label, column)
        unfit = {int(row[column]): unfit_cell(row) for row in records(exact[exact["setting"] == label])}
        cells = {
            count: Cell(
                f"{value:.1%}",
                interval=interval(lows[count], highs[count], ".1%"),
                bold=value == best.get(count),
                small=(*((f"{answers[count]:.3f} nats",) if count in answers else ()), *unfit[count]),
            )
            for count, value in values.items()
        }
        if cells:
            rows.append((Cell(name=label), cells))
    title = _title(task, fixed)
    return Table.by_length(
        rows,
        lengths=column_values(exact, column),
        column_name=lambda count: _count(count, counted),
        stem=safe_stem(f"recall-{task}{fixed}"),
        caption=f"{title}: exact answers by {counted or 'context length'}",
        explanation="Best in bold. Small print: 95% interval, Wilson's; negative log-likelihood of an answer.",
        interval="95% interval",
        folded=f"Numbers: {title}",
    )
