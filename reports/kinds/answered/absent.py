"""The section "Absent needles": values found when they are there, and what is answered when they are not."""

from collections.abc import Sequence

import pandas as pd

from sbeval.reports.analyse.left_out import unfit_sentence
from sbeval.reports.analyse.ruler import average, short_name
from sbeval.reports.figures.labels import Caption
from sbeval.reports.kinds.answered.panels import Shown, metrics_figure, metrics_table, with_intervals
from sbeval.reports.read.fields import first_listed, length_text, quote_name
from sbeval.reports.read.results import LENGTH
from sbeval.reports.section import Figure, Kind, Material, Section, Table
from sbeval.results.records import FOUND, INVENTED, MARGIN_ABSENT, MARGIN_THERE, SAID_ABSENT

METRICS = {
    FOUND: Shown(title="found, if it is there"),
    SAID_ABSENT: Shown(title="said to be absent, if it is not there"),
    INVENTED: Shown(title="invented, if it is not there"),
    MARGIN_THERE: Shown(title="nats for none over the best value, if it is there", is_share=False),
    MARGIN_ABSENT: Shown(title="nats for none over the best value, if it is not there", is_share=False),
}
_SHARES = (FOUND, SAID_ABSENT, INVENTED)
_FORCED = "_forced"
_MEAN = "mean over tasks"


def _section(material: Material) -> Section | None:
    """Builds the section; None if no task asked for needles that are not there."""
    rows = with_intervals(material.results.measurements, METRICS)
    rows = rows[rows["absent_samples"].notna()]
    if rows.empty:
        return None
    looks = material.looks_of(rows["setting"])
    figures: list[Figure] = []
    tables: list[Table] = []
    for forced in (False, True):
        of_kind = rows[rows["task"].str.endswith(_FORCED) == forced]
        tasks = list(dict.fromkeys(of_kind["task"]))
        if len(tasks) > 1:
            figures.append(_mean_figure(material, of_kind, forced))
        for task in tasks:
            of_task = of_kind[of_kind["task"] == task]
            title = f"{short_name(task)}: needles that are there, and not"
            caption = Caption(
                title=title,
                finding=_finding(of_task, list(looks)),
                explanation=f"{_counts(of_task)} {unfit_sentence(of_task)}".strip(),
                subtitle="against context length (tokens, log scale)",
            )
            stem = f"absent-{task}"
            drawn = {name: shown for name, shown in METRICS.items() if name in _SHARES or forced}
            figures.append(metrics_figure(material, of_task, caption, drawn, looks, stem))
            explanation = "Shares of the samples whose key is there, or is not; small print: 95% interval over samples."
            tables.append(metrics_table(of_task, METRICS, list(looks), stem=stem, title=title, explanation=explanation))
    return Section(
        identifier="absent",
        title="Absent needles",
        lead=(
            "Some samples ask for a key that is not in the text, and every prompt says that the answer is then none. "
            "Invented: the answer holds a value all the same. Tasks that end in forced compare the log-probability of "
            "none with those of values in the text. Bands: 95% intervals over samples."
        ),
        figures=tuple(figures),
        legend=looks,
        tables=tuple(tables),
    )


ABSENT = Kind(section=_section)


def _mean_figure(material: Material, rows: pd.DataFrame, forced: bool) -> Figure:
    """Returns the figure of the means over those tasks that every model ran."""
    ran = rows.groupby("setting")["task"].agg(set)
    tasks = [task for task in dict.fromkeys(rows["task"]) if all(task in of_model for of_model in ran)]
    means = []
    for metric in _SHARES:
        of_metric = average(rows[rows["metric"] == metric].assign(ruler_task=rows["task"]), tasks)
        means.append(of_metric.assign(metric=metric, task=_MEAN))
    table = pd.concat(means, ignore_index=True)
    looks = material.looks_of(table["setting"])
    kind = "chosen by log-probability" if forced else "generated"
    caption = Caption(
        title=f"Needles that are there, and not: mean over {len(tasks)} tasks, {kind}",
        finding=_finding(table, list(looks)),
        explanation=f"Mean over {', '.join(map(short_name, tasks))}. {unfit_sentence(rows)}".strip(),
        subtitle="against context length (tokens, log scale)",
    )
    shown = {name: METRICS[name] for name in _SHARES}
    return metrics_figure(material, table, caption, shown, looks, f"absent-mean{_FORCED if forced else ''}")


def _finding(rows: pd.DataFrame, labels: Sequence[str]) -> str:
    """Returns a sentence with each model's three shares at its longest length."""
    sentences = []
    for label in labels:
        of_model = rows[rows["setting"] == label]
        if of_model.empty:
            continue
        longest = of_model[LENGTH].max()
        values = of_model[of_model[LENGTH] == longest].set_index("metric")["value"]
        words = {FOUND: "finds {} of those there", SAID_ABSENT: "says of {} that they are not", INVENTED: "invents {}"}
        parts = [text.format(f"{values[metric]:.0%}") for metric, text in words.items() if metric in values]
        sentences.append(f"{quote_name(label)} at {length_text(int(longest))}: {', '.join(parts)}")
    return first_listed(sentences)


def _counts(rows: pd.DataFrame) -> str:
    """Returns a sentence that says of how many samples the shares are."""
    there = rows[rows["metric"] == FOUND]["samples"].dropna()
    absent = rows["absent_samples"].dropna()
    if there.empty or absent.empty:
        return ""
    return f"{_span(there)} samples a length whose key is there, {_span(absent)} whose key is not."


def _span(counts: pd.Series) -> str:
    low, high = int(counts.min()), int(counts.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
