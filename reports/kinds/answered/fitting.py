"""The section "What did not fit": samples left out or cut at each context length, by model and task."""

import pandas as pd

from sbeval.reports.read.fields import length_text
from sbeval.reports.read.results import LENGTH, records
from sbeval.reports.section import Cell, Kind, Material, Section, Table

_COLUMNS = ["left_out_samples", "cut_samples"]


def _section(material: Material) -> Section | None:
    """Builds the section; None if every sample of every task fits."""
    rows = material.results.measurements.dropna(subset=[LENGTH])
    rows = rows.drop_duplicates(["setting", "task", LENGTH])
    counted = rows[rows[_COLUMNS].notna().any(axis=1)]
    unfit = counted.groupby(["setting", "task"])[_COLUMNS].transform("sum").gt(0).any(axis=1)
    if (shown := counted[unfit]).empty:
        return None
    table = Table.of(
        ("model and task", "context", "samples", "left out", "cut"),
        [
            (
                Cell(f" {row['task']}", name=row["setting"]),
                length_text(int(row[LENGTH])),
                *(_number(row[column]) for column in ("samples", *_COLUMNS)),
            )
            for row in records(shown.sort_values(["setting", "task", LENGTH], kind="stable"))
        ],
        stem="fitting",
        caption="Samples left out or cut, since their prompts do not fit the context length",
        explanation=(
            "`too_long` of a task says what becomes of them. A number at a length is the mean over its samples. Lines "
            "join only lengths with the same samples."
        ),
    )
    lead = "Samples whose prompts do not fit a context length, by task and length."
    return Section(identifier="fitting", title="What did not fit", lead=lead, tables=(table,))


FITTING = Kind(section=_section)


def _number(value: object) -> str:
    return "" if pd.isna(value) else f"{int(value):,}"  # type: ignore[call-overload]
