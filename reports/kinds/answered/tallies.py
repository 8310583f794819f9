"""The section "Tallies": counts of labels and their errors, and which label is the most frequent."""

from collections.abc import Mapping, Sequence

import pandas as pd

from sbeval.reports.analyse.left_out import unfit_sentence
from sbeval.reports.figures.labels import Caption
from sbeval.reports.kinds.answered.panels import Shown, ends_text, metrics_figure, metrics_table, with_intervals
from sbeval.reports.read.fields import first_listed, quote_name
from sbeval.reports.section import Figure, Kind, Material, Section, Table
from sbeval.results.records import CHANCE_RELATIVE_ERROR, RELATIVE_ERROR

FAMILY, SCORE = "tally", "score"
_CHANCE = {SCORE: "chance", RELATIVE_ERROR: CHANCE_RELATIVE_ERROR}
_TITLES = {
    "tally_count": "how many things have a label",
    "tally_most": "the most frequent label",
    "tally_compare": "the more frequent of two labels",
}
_FORCED = "_forced"


def _section(material: Material) -> Section | None:
    """Builds the section; None if no tally was run."""
    measured = material.results.measurements
    measured = measured[measured["family"] == FAMILY]
    names = {SCORE: Shown(title="right answers"), RELATIVE_ERROR: Shown(title="relative error", is_share=False)}
    rows = with_intervals(measured, names)
    if rows.empty:
        return None
    looks = material.looks_of(rows["setting"])
    figures: list[Figure] = []
    tables: list[Table] = []
    protocols = {str(task): str(protocol) for task, protocol in zip(rows["task"], rows["protocol"], strict=True)}
    for task in sorted(protocols, key=lambda task: (_order(protocols[task]), task)):
        of_task = rows[rows["task"] == task]
        shown = {name: _with_chance(shown, measured[measured["task"] == task], name) for name, shown in names.items()}
        caption = Caption(
            title=_title(task, protocols),
            finding=_finding(of_task, list(looks)),
            explanation=unfit_sentence(of_task),
            subtitle="against context length (tokens, log scale)",
        )
        figures.append(metrics_figure(material, of_task, caption, shown, looks, task))
        explanation = "Small print: 95% interval over samples."
        if (of_task["metric"] == RELATIVE_ERROR).any():
            explanation = f"Relative error: distance from the right count as a share of it, at most 1. {explanation}"
        labels = list(looks)
        tables.append(metrics_table(of_task, shown, labels, stem=task, title=caption.title, explanation=explanation))
    return Section(
        identifier="tallies",
        title="Tallies",
        lead=(
            "Some things of a text have a label, and their number is the same at every context length: only the lines "
            "between them become more. Chance: a random guess among the labels of the question, or among the counts "
            "that may be asked for; in a forced choice among four counts. Chance of the relative error: the best "
            "answer without the text. Bands: 95% intervals over samples."
        ),
        figures=tuple(figures),
        legend=looks,
        tables=tuple(tables),
    )


TALLIES = Kind(section=_section)


def _order(protocol: str) -> tuple[bool, int]:
    kinds = [*_TITLES, protocol.removesuffix(_FORCED)]
    return protocol.endswith(_FORCED), kinds.index(protocol.removesuffix(_FORCED))


def _title(task: str, protocols: Mapping[str, str]) -> str:
    """Returns the title of a task: its question, with the task's name if several tasks ask it."""
    protocol = protocols[task]
    question = _TITLES.get(protocol.removesuffix(_FORCED))
    if question is None:  # results without the question in their protocol
        return f"Tally {task}"
    how = "chosen by log-probability" if protocol.endswith(_FORCED) else "generated"
    title = f"{question[0].upper()}{question[1:]}, {how}"
    return f"{title}: {task}" if list(protocols.values()).count(protocol) > 1 else title


def _with_chance(shown: Shown, rows: pd.DataFrame, metric: str) -> Shown:
    """Returns how a metric is shown, with a line at chance if it is the same for all models and lengths."""
    chance = rows[rows["metric"] == _CHANCE[metric]]["value"].dropna()
    if chance.empty or chance.max() - chance.min() > 1e-9:
        return shown
    return Shown(title=shown.title, is_share=shown.is_share, levels={float(chance.iloc[0]): "chance"})


def _finding(rows: pd.DataFrame, labels: Sequence[str]) -> str:
    sentences = []
    for label in labels:
        of_model = rows[rows["setting"] == label]
        if not of_model.empty:
            sentences.append(f"{quote_name(label)} {ends_text(of_model, SCORE, '.0%')}")
    return first_listed(sentences)
