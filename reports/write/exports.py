"""The files beside the page: the tidy table as CSV and Parquet, the summary as Markdown, tables as LaTeX."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from pandas.api.extensions import ExtensionDtype

from sbeval.reports.read.results import Results
from sbeval.reports.sections.section import Report
from sbeval.reports.write.latex import latex_table
from sbeval.reports.write.markdown import markdown_summary

_OTHER_TYPES: dict[str, ExtensionDtype] = {
    "higher_is_better": pd.BooleanDtype(),
    "targets_per_window": pd.Int64Dtype(),
}
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def write_tables(every_seed: Results, report: Report, folder: Path, *, title: str) -> None:
    """Writes `results.csv`, `results.parquet`, `summary.md` and `latex/*.tex` into the folder.

    Args:
        every_seed: the tidy table with every training seed by itself, for CSV and Parquet.
        report: the page's content.
        folder: where to write.
        title: heading of the Markdown file.
    """
    _spreadsheet_safe(every_seed.measurements).to_csv(folder / "results.csv", index=False)
    _typed(every_seed.measurements).to_parquet(folder / "results.parquet", index=False)
    (folder / "summary.md").write_text(markdown_summary(title, report), encoding="utf-8")
    written: set[str] = set()
    for table in report.tables:
        stem = next(name for name in _numbered(table.stem) if name not in written)
        written.add(stem)
        (folder / "latex" / f"{stem}.tex").write_text(latex_table(table), encoding="utf-8")


def _numbered(stem: str) -> Iterator[str]:
    yield stem
    yield from (f"{stem}-{number}" for number in itertools.count(2))


def _typed(table: pd.DataFrame) -> pd.DataFrame:
    """Gives columns that hold nothing their type too, so that the files of several reports can be joined."""
    typed = table.copy()
    for column in typed.select_dtypes(include=["object", "string"]):
        typed[column] = typed[column].astype(_OTHER_TYPES.get(str(column), pd.StringDtype()))
    return typed


def _spreadsheet_safe(table: pd.DataFrame) -> pd.DataFrame:
    """Puts an apostrophe before texts that a spreadsheet would run as a formula."""
    safe = table.copy()
    for column in safe.select_dtypes(include=["object", "string"]):
        safe[column] = [
            f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value
            for value in safe[column]
        ]
    return safe
