"""The section on recall probes: share of exact answers by number of pairs (MQRAR) and by context length."""

from collections.abc import Mapping, Sequence

import pandas as pd

from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.recall import SOLVED, recall_scores, solved_up_to
from sbeval.reports.analyse.ruler import by_length
from sbeval.reports.figures.curves import curve_tooltip, length_domain, length_rows, training_marks
from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.models import length_text
from sbeval.reports.read.results import by_setting
from sbeval.reports.sections.section import Figure, Publish, Section
from sbeval.reports.write.html import Markup, element, name, table

_TASKS = {
    "sb_mqrar": ("MQRAR", "Every key is given new values; at each return of a key its earlier value is asked for."),
    "sb_mqrar_text": ("MQRAR as text", "Numbers assigned to names again and again, each shown before it changes."),
    "sb_flipflop": ("Flip-flop", "Write, ignore and read a bit; a read shows the bit written last."),
}
_TOOLTIP = {"setting": "model", "x_text": "", "value_text": "exact answers", "interval_text": "95% interval"}


def recall_section(
    measurements: pd.DataFrame, *, looks: Mapping[str, Look], training_lengths: Mapping[str, int], publish: Publish
) -> Section | None:
    """Builds the section, None where no recall task was run."""
    scores = recall_scores(measurements)
    if scores.empty:
        return None
    shown = {label: looks[label] for label in looks if (scores["setting"] == label).any()}
    figures, content = [], []
    for task in sorted(set(scores["task"]), key=_order):
        of_task = scores[scores["task"] == task]
        for rows, words, by_pairs in _panels(of_task):
            figures.append(_figure(task, rows, words, by_pairs, shown, training_lengths, publish))
            content.append(_table(f"{_title(task)}{words}", rows, by_pairs, list(shown)))
    return Section(
        identifier="recall",
        title="Recall",
        lead=(
            f"Share of answers whose every token is the model's most probable one. Solved means at least {SOLVED:.0%}. "
            "Bands: 95% intervals over samples."
        ),
        figures=tuple(figures),
        legend=shown,
        content=tuple(content),
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


def _counted(rows: pd.DataFrame, metric: str, *, by_pairs: bool) -> pd.DataFrame:
    """Returns one metric's rows with the axis in `context_length_tokens`, as curves have it."""
    own = rows[rows["metric"] == metric].assign(tokens=float("nan"), clusters=float("nan"))
    return own.assign(context_length_tokens=own["pairs"]) if by_pairs else own


def _figure(
    task: str,
    scores: pd.DataFrame,
    words: str,
    by_pairs: bool,
    looks: Mapping[str, Look],
    training_lengths: Mapping[str, int],
    publish: Publish,
) -> Figure:
    exact = _counted(scores, "exact_match", by_pairs=by_pairs)
    order = [label for label in looks if (exact["setting"] == label).any()]
    marks = {} if by_pairs else training_marks(training_lengths, order)
    counts = sorted(int(count) for count in exact["context_length_tokens"].unique())
    rows = length_rows(exact, order, ".2%")
    unit = "pairs" if by_pairs else "tokens"
    for row in rows:
        row["x_text"] = f"{row['x']:,} {unit}"
    guesses = _counted(scores, "chance", by_pairs=by_pairs)["value"]
    levels = {SOLVED: f"solved, {SOLVED:.0%}"}
    if len(guesses) and guesses.max() == guesses.min():
        levels[float(guesses.max())] = "chance"
    title = f"{_title(task)}{words}"
    finding = _finding(exact, order, unit)
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
        subtitle=_TASKS.get(task, ("", ""))[1],
        description=f"{title}. {finding}",
    )
    image, links = publish(spec, safe_stem(f"recall-{task}{words}"))
    return Figure(
        title=title,
        finding=finding,
        explanation=_TASKS.get(task, ("", ""))[1],
        variants={"exact_match": spec},
        image=image,
        downloads=links,
    )


def _finding(exact: pd.DataFrame, order: Sequence[str], unit: str) -> str:
    parts = []
    for label in order:
        scores = by_length(exact, label)
        solved = solved_up_to(scores)
        last = max(scores)
        if solved is None:
            parts.append(f"{label} solves none ({scores[min(scores)]:.1%} at {_count(min(scores), unit)})")
        elif solved == last:
            parts.append(f"{label} solves all, up to {_count(last, unit)}")
        else:
            parts.append(f"{label} solves up to {_count(solved, unit)} ({scores[last]:.1%} at {_count(last, unit)})")
    return "; ".join(parts[:4]) + (f"; {len(parts) - 4} more lines." if len(parts) > 4 else ".")


def _count(number: int, unit: str) -> str:
    return f"{number} pairs" if unit == "pairs" else length_text(number)


def _table(title: str, scores: pd.DataFrame, by_pairs: bool, labels: Sequence[str]) -> Markup:
    exact, nll = (_counted(scores, metric, by_pairs=by_pairs) for metric in ("exact_match", "answer_nll"))
    counts = sorted(int(count) for count in exact["context_length_tokens"].unique())
    best = {
        count: exact[exact["context_length_tokens"] == count]["value"].max() if exact["setting"].nunique() > 1 else None
        for count in counts
    }
    lines = {
        metric: {
            label: {int(row["context_length_tokens"]): row["value"] for row in rows} for label, rows in own.items()
        }
        for metric, own in (("exact_match", by_setting(exact)), ("answer_nll", by_setting(nll)))
    }
    body = []
    for label in labels:
        values = lines["exact_match"].get(label)
        if not values:
            continue
        answers = lines["answer_nll"].get(label, {})
        cells = []
        for count in counts:
            if count not in values:
                cells.append(element("td", "not measured", attributes={"class": "missing"}))
                continue
            words = f"{values[count]:.1%}"
            small = element("small", f"{answers[count]:.3f} nats") if count in answers else ""
            cells.append(element("td", element("b", words) if values[count] == best[count] else words, small))
        body.append([name(label), *cells])
    unit = "pairs" if by_pairs else "tokens"
    header = ["model", *[f"{count:,} pairs" if by_pairs else length_text(count) for count in counts]]
    content = table(
        header,
        body,
        caption=f"{title}: exact answers by {'number of pairs' if unit == 'pairs' else 'context length'}",
        explanation="Best in bold. Small print: negative log-likelihood of an answer.",
    )
    return element("details", element("summary", f"Numbers: {title}"), content)
