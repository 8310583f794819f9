"""Tables as plain text, from which the Markdown and LaTeX files are written."""

import dataclasses
import math
from collections.abc import Mapping

from sbeval.reports.analyse.claims import LengthClaims, LengthDifference
from sbeval.reports.analyse.overview import HEADER as OVERVIEW_HEADER
from sbeval.reports.analyse.panels import Panel
from sbeval.reports.analyse.ruler import TASKS, average, by_length, missing_tasks, ruler_scores
from sbeval.reports.analyse.suite import suite_rows
from sbeval.reports.assemble import Report
from sbeval.reports.figures.curves import METRICS
from sbeval.reports.read.models import length_text
from sbeval.reports.read.results import Results, by_setting
from sbeval.reports.sections.curves import METRIC_WORDS
from sbeval.reports.sections.ruler import effective_lengths
from sbeval.reports.sections.speed import SPEED_HEADER, speed_rows

_MISSING = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlainTable:
    """A table of texts.

    Attributes:
        stem: file name without its ending.
        caption: what it shows.
        header: column names; the first column names the rows.
        rows: cells, an empty text where nothing was measured.
        bold: (row, column) of the cells to stress.
    """

    stem: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: frozenset[tuple[int, int]] = frozenset()


def plain_tables(results: Results, report: Report) -> list[PlainTable]:
    """Returns the report's tables in the order of its sections."""
    tables = []
    if report.overview.rows:
        tables.append(
            PlainTable(
                stem="overview",
                caption="On identical targets, side by side [simultaneous 95% band]",
                header=OVERVIEW_HEADER,
                rows=report.overview.rows,
            )
        )
    for panel in report.panels:
        tables.append(_panel_table(panel))
        differences = _difference_table(panel, report.claims)
        if differences is not None:
            tables.append(differences)
    scores = ruler_scores(results.measurements)
    if not scores.empty:
        tables += _ruler_tables(results, report)
    rows = suite_rows(results)
    if rows:
        labels = [model.label for model in results.models if any(model.label in row.cells for row in rows)]
        tables.append(
            PlainTable(
                stem="tasks",
                caption="Ordinary tasks",
                header=("task", *labels),
                rows=tuple(
                    (
                        row.name,
                        *[f"{row.cells[label].value:.4f}" if label in row.cells else _MISSING for label in labels],
                    )
                    for row in rows
                ),
                bold=frozenset(
                    (index, 1 + labels.index(label)) for index, row in enumerate(rows) for label in row.best
                ),
            )
        )
    tables.append(
        PlainTable(
            stem="speed",
            caption="Speed and memory of every run",
            header=SPEED_HEADER,
            rows=tuple(tuple(row) for row in speed_rows(results.models)),
        )
    )
    return tables


def _panel_table(panel: Panel) -> PlainTable:
    metric, rows = next(iter(panel.tables.items()))
    digits = METRICS[metric][2]
    lengths = sorted(int(length) for length in rows["context_length_tokens"].unique())
    body = []
    measured = by_setting(rows)
    for label in panel.labels:
        own = {int(row["context_length_tokens"]): row for row in measured.get(label, [])}
        body.append((label, *[_with_interval(own.get(length), digits) for length in lengths]))
    return PlainTable(
        stem=panel.stem,
        caption=f"{panel.title}: {METRIC_WORDS[metric]} [95% interval]",
        header=("model", *map(length_text, lengths)),
        rows=tuple(body),
    )


def _with_interval(row: Mapping[str, float] | None, digits: str) -> str:
    if row is None:
        return _MISSING
    value = format(row["value"], digits)
    if math.isnan(row["ci95_low"]):
        return value
    return f"{value} [{row['ci95_low']:{digits}}, {row['ci95_high']:{digits}}]"


def _difference_table(panel: Panel, claims: Mapping[tuple[str, str, str], LengthClaims]) -> PlainTable | None:
    own = {
        label: claim
        for label in panel.labels
        if (claim := claims.get((label, panel.corpus, panel.protocol))) is not None and claim.differences
    }
    if not own or "nll" not in panel.tables:
        return None
    lengths = sorted({length for claim in own.values() for length in claim.lengths})
    body = []
    for label, claim in own.items():
        found = {item.context_length_tokens: item for item in claim.differences}
        cells = [_difference(found.get(length)) for length in lengths]
        reference = length_text(claim.reference_tokens) if claim.reference_tokens else ""
        body.append((f"{label} (to {reference})", *cells))
    return PlainTable(
        stem=f"{panel.stem}-differences",
        caption=f"{panel.title}: paired NLL difference to the training length [simultaneous 95% band]",
        header=("model", *map(length_text, lengths)),
        rows=tuple(body),
    )


def _difference(found: LengthDifference | None) -> str:
    if found is None:
        return _MISSING
    value = f"{found.estimate:+.4f}"
    return value if math.isnan(found.low) else f"{value} [{found.low:+.4f}, {found.high:+.4f}]"


def _ruler_tables(results: Results, report: Report) -> list[PlainTable]:
    scores = ruler_scores(results.measurements)
    overall = average(scores, TASKS)
    lengths = sorted(int(length) for length in overall["context_length_tokens"].unique())
    labels = [label for label in report.looks if label in set(scores["setting"])]
    trained = {
        model.label: model.record.training_length_tokens
        for model in results.models
        if model.record.training_length_tokens
    }
    effective = effective_lengths(scores, trained)
    body = []
    for label in labels:
        values = by_length(overall, label)
        cells = [f"{values[length]:.3f}" if length in values else _MISSING for length in lengths]
        count = f"{len(TASKS) - len(missing_tasks(scores, label))} of {len(TASKS)}"
        body.append((label, count, *cells, effective[label][0].text, effective[label][1].text))
    return [
        PlainTable(
            stem="ruler",
            caption="RULER: mean score over the tasks run, and effective lengths at the benchmark's threshold (all 13 "
            "tasks) and of its own score",
            header=("model", "tasks", *map(length_text, lengths), "effective, 85.6%", "effective, 85% of own"),
            rows=tuple(body),
        )
    ]
