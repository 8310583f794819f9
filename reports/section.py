"""Classes for the content of a report, independent of file formats: tables of typed cells, figures, facts, sections.

A section builds each table once, from cells with a text, an interval, small print and a verdict. The page, Markdown and
LaTeX all render these cells, so they show the same tables. On the page a cell has several lines. Markdown and LaTeX
write the interval in brackets and the small print in parentheses after the text, unless `Cell.in_files` holds another
text for them.

At its top the page shows the first figures of a section (`Report.opening`): a curve and its paired differences fit the
first screen at 1400 by 900 and at 390 by 844 pixels. The cards with sentences on each model are below.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import pandas as pd

from sbeval.reports.analyse.claims import Claims
from sbeval.reports.analyse.findings import Finding
from sbeval.reports.analyse.one_number import CurveNumber
from sbeval.reports.analyse.ruler import RulerScores
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.lengths import UNITS, axes_of
from sbeval.reports.figures.theme import Look, within
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.files import Notes
from sbeval.reports.read.results import Reader, Results

_OPENING = ("curves", "ruler", "recall", "absent", "levels", "mrcr", "inputs", "positions")
"""Identifiers of sections whose figures may be shown at the top of the page, the most interesting section first."""
Publish = Callable[[Mapping[str, Any], str], tuple[str, tuple[str, ...]]]
"""Function that writes the image files of a figure.

It takes a Vega-Lite specification and a wanted file name; it returns the file name used and links to the files.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: the main text.
        name: a name shown before the text, such as that of a model. It may be in a script of another writing direction.
        interval: lower and upper end of the confidence interval of a number, as texts.
        small: additional lines in small print.
        verdict: whether a difference is measurably "better" or "worse"; None if it is neither.
        bold: whether the text is bold, as it is for the best number of a column.
        missing: whether the text says that there is no number.
        quiet: whether the text has a muted colour.
        in_files: text for Markdown and LaTeX; None for the same content as on the page.
    """

    text: str = ""
    _: dataclasses.KW_ONLY
    name: str = ""
    interval: tuple[str, str] | None = None
    small: tuple[str, ...] = ()
    verdict: Literal["better", "worse"] | None = None
    bold: bool = False
    missing: bool = False
    quiet: bool = False
    in_files: str | None = None

    @property
    def plain(self) -> str:
        """The cell as one line of text, for Markdown and LaTeX."""
        if self.in_files is not None:
            return self.in_files
        interval = f" [{self.interval[0]}, {self.interval[1]}]" if self.interval else ""
        return f"{self.name}{self.text}{interval}" + (f" ({'; '.join(self.small)})" if self.small else "")


def cells_of(cells: Iterable[Cell | str]) -> tuple[Cell, ...]:
    """Returns all items as cells; a string is converted to a cell with that text."""
    return tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in cells)


NOT_MEASURED = Cell("not measured", missing=True, in_files="")


class Row(NamedTuple):
    """A row of a table; its first cell is the heading. A `page_only` row is left out in Markdown and LaTeX."""

    cells: tuple[Cell, ...]
    page_only: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table with a caption.

    Attributes:
        stem: name of the table's LaTeX file, without extension.
        caption: the caption.
        header: column headings.
        rows: rows, each with a heading and one cell for every other column.
        explanation: how to read the table; shown below it on the page.
        interval: kind of the intervals, such as "95% interval"; Markdown and LaTeX append it to the caption.
        folded: title that the page shows instead of the table until the reader clicks it; empty to show the table.
        compact: whether each row is one line with the colour of its model.
        prose: whether cells hold sentences.
        on_page: False for a table that only Markdown and LaTeX show.
    """

    stem: str
    caption: str
    header: tuple[Cell, ...]
    rows: tuple[Row, ...]
    explanation: str = ""
    interval: str = ""
    folded: str = ""
    compact: bool = False
    prose: bool = False
    on_page: bool = True

    @classmethod
    def of(cls, header: Iterable[Cell | str], rows: Iterable[Row | Iterable[Cell | str]], **fields: Any) -> Self:
        """Builds a table from rows of cells or strings; `fields` are other fields of `Table`."""
        lines = (line if isinstance(line, Row) else Row(cells_of(line)) for line in rows)
        return cls(header=cells_of(header), rows=tuple(lines), **fields)

    @classmethod
    def by_length(
        cls,
        rows: Iterable[tuple[Cell, Mapping[int, Cell | str]]],
        *,
        lengths: Sequence[int],
        lacking: Cell = NOT_MEASURED,
        heading: str = "model",
        column_name: Callable[[int], str] = length_text,
        **fields: Any,
    ) -> Self:
        """Builds a table with one column for each context length, or for each value of another integer.

        Args:
            rows: for each row, its heading and (context length to cell).
            lengths: the context lengths, one for each column, in order.
            lacking: the cell shown if a row has no cell for a length.
            heading: heading of the first column.
            column_name: a function that returns the column heading for a length.
            fields: other fields of `Table`.
        """
        lines = [(name, *(known.get(length, lacking) for length in lengths)) for name, known in rows]
        return cls.of([heading, *map(column_name, lengths)], lines, **fields)

    @property
    def caption_in_files(self) -> str:
        """The caption for Markdown and LaTeX, followed by the kind of interval if some cell shows one in brackets."""
        has_brackets = any(cell.interval or "[" in cell.text for line in self.rows for cell in line.cells)
        return f"{self.caption} [{self.interval}]" if self.interval and has_brackets else self.caption

    @property
    def rows_in_files(self) -> tuple[tuple[Cell, ...], ...]:
        """The cells of every row that Markdown and LaTeX show."""
        return tuple(row.cells for row in self.rows if not row.page_only)


def interval(low: float, high: float, number_format: str) -> tuple[str, str] | None:
    """Returns the ends of an interval as texts; None if there is no interval."""
    return None if math.isnan(low) else (format(low, number_format), format(high, number_format))


def verdict(low: float, high: float, *, higher_is_better: bool = False) -> Literal["better", "worse"] | None:
    """Returns whether a difference with this interval is "better" or "worse"; None if the interval includes zero."""
    if low > 0 or high < 0:
        return "better" if (low > 0) == higher_is_better else "worse"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure of the page.

    Attributes:
        caption: title and other texts of the first variant.
        variants: metric to a Vega-Lite specification of the figure in this metric; the page can switch between them.
        image: file name, without extension, of the image of the first variant, for print and for pages without scripts.
        findings: metric to a sentence on the result in this metric, for variants whose sentence differs from the first.
        downloads: links to the image files beside the page.
        wide: whether the figure takes the whole width of the page.
        folded: whether the page shows the figure only after a click.
    """

    caption: Caption
    variants: Mapping[str, Mapping[str, Any]]
    image: str
    findings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    downloads: tuple[str, ...]
    wide: bool = False
    folded: bool = False


class Link(NamedTuple):
    """A link to a file, relative to the page."""

    target: str
    text: str


class Fact(NamedTuple):
    """A text with an optional name before it and an optional link to the file that the text is about."""

    name: str = ""
    text: str = ""
    link: Link | None = None


class Fold(NamedTuple):
    """Facts that the page shows after a click on their heading, which is the name followed by the suffix."""

    name: str
    suffix: str
    facts: tuple[Fact, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One section of the page.

    Attributes:
        identifier: anchor of the section on the page.
        title: heading.
        lead: text below the heading.
        figures: figures in order.
        metrics: metric to the name of the metric, for the switch between variants of the figures; empty for no switch.
        legend: label of a model to its colours and line style, for the buttons that hide the lines of a model.
        tables: tables in order.
        folds: facts shown after a click.
        remarks: sentences shown as a list at the end of the section.
    """

    identifier: str
    title: str
    lead: str = ""
    figures: tuple[Figure, ...] = ()
    metrics: Mapping[str, str] = dataclasses.field(default_factory=dict)
    legend: Mapping[str, Look] = dataclasses.field(default_factory=dict)
    tables: tuple[Table, ...] = ()
    folds: tuple[Fold, ...] = ()
    remarks: tuple[Fact, ...] = ()

    @property
    def axes(self) -> dict[str, str]:
        """Unit of the length axis to its name, for a switch; empty if all figures have only an axis in tokens."""
        units = {unit for figure in self.figures for spec in figure.variants.values() for unit in axes_of(spec)}
        names = {unit: f"\N{MULTIPLICATION SIGN} {name}" for unit, name in UNITS.items() if unit in units}
        return {"tokens": "Tokens", **names} if names else {}

    @property
    def first_row(self) -> tuple[Figure, ...]:
        """The first figure or the first two: as many as fit side by side at the top of the page."""
        unfolded = [figure for figure in self.figures if not figure.folded]
        return tuple(unfolded[:1] if any(figure.wide for figure in unfolded[:2]) else unfolded[:2])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The content of the page and of the Markdown, LaTeX and CSV files in the page's folder.

    Attributes:
        overview: the verdicts, one for each text.
        findings: a card of headline numbers and sentences for each model.
        caveats: warnings below the summary.
        overview_table: the table that compares all models; None for fewer than two models.
        sections: sections in the order of the page.
        looks: model label to the colours, marker shape and line style of the model.
        counts: number of models and runs, as text.
        cards_folded: whether the cards are shown only after a click, since there are many models.
        numbers: a table of the numbers that sum up curves: one row for each number of each model.
        notes: sentences on data that was left out, and why.
    """

    overview: tuple[str, ...]
    findings: tuple[Finding, ...]
    caveats: tuple[str, ...]
    overview_table: Table | None
    sections: tuple[Section, ...]
    looks: Mapping[str, Look]
    counts: str
    cards_folded: bool
    numbers: pd.DataFrame
    notes: Notes

    @property
    def opening(self) -> Section | None:
        """The section whose first figures are at the top of the page; None if no section of `_OPENING` has figures."""
        lines = {section.identifier: section for section in self.sections if section.first_row}
        return next((lines[name] for name in _OPENING if name in lines), None)

    @property
    def tables(self) -> list[Table]:
        """All tables, in the order of the page."""
        overview = [self.overview_table] if self.overview_table else []
        return overview + [table for section in self.sections for table in section.tables]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """The data that sections are built from, including results that several sections use and that are computed once.

    Attributes:
        results: all results.
        looks: model label to the colours, marker shape and line style of the model.
        training_lengths: model label to training length in tokens, for models whose training length is known.
        baseline: label of the model whose numbers are subtracted from those of all others.
        claims: (model, text, protocol) to the paired differences of NLL between lengths.
        ruler: RULER scores and effective lengths.
        numbers: the numbers that sum up curves over context lengths.
        folder: folder of the page, for relative links to result files.
        publish: a function that writes the image files of a figure.
        within_nats: a context length suffices if its NLL is at most this much above that of the longest context.
    """

    results: Results
    looks: Mapping[str, Look]
    training_lengths: Mapping[str, int]
    baseline: str
    claims: Claims
    ruler: RulerScores
    numbers: Sequence[CurveNumber]
    folder: Path
    publish: Publish
    within_nats: float

    def looks_of(self, labels: Iterable[str]) -> dict[str, Look]:
        """Returns model label to `Look` for the models in one figure.

        The line of a model is dashed only if the figure also shows a model that was context-extended from it.
        """
        parents = {model.label: model.parent for model in self.results.models if model.parent}
        return within(self.looks, list(dict.fromkeys(labels)), parents)

    def figure(self, variants: Mapping[str, Mapping[str, Any]], stem: str, caption: Caption, **fields: Any) -> Figure:
        """Builds a figure and writes image files of its first variant; `fields` are other fields of `Figure`."""
        image, downloads = self.publish(next(iter(variants.values())), stem)
        return Figure(caption=caption, variants=variants, image=image, downloads=downloads, **fields)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of measurement or another part of the page.

    Attributes:
        section: a function that builds the section, or returns None if there is nothing to show.
        readers: readers of data that is not in the tidy table (one row for each number).
        needs: a reader of this or another kind, or None; if this reader found no data, `section` is not called.
    """

    section: Callable[[Material], Section | None]
    readers: tuple[Reader[Any], ...] = ()
    needs: Reader[Any] | None = None
