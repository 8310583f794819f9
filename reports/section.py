"""What a report is made of before any file is written: tables of typed cells, figures, facts, sections, their material.

The page shows every line of a cell; Markdown and LaTeX hold an interval in brackets and small print in parentheses
behind the text, unless a cell says what stands there instead.
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

_OPENING = ("curves", "ruler", "recall", "inputs", "positions")
"""Sections by what a reader of a report looks for first."""
Publish = Callable[[Mapping[str, Any], str], tuple[str, tuple[str, ...]]]
"""Writes a figure's image files under a name; returns the image's name and the links to the files."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    Attributes:
        name: a name before the text, such as a model's, whose writing direction is its own.
        interval: ends of the interval around a number, as texts.
        small: further lines in small print.
        verdict: which way a difference points, where it certainly does.
        quiet: True to show the text in muted colour.
        in_files: what Markdown and LaTeX show, None for the same as the page.
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
    """Returns cells; texts become cells."""
    return tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in cells)


NOT_MEASURED = Cell("not measured", missing=True, in_files="")


class Row(NamedTuple):
    """A row, its first cell the heading; `page_only` for one that the files hold in a table of its own."""

    cells: tuple[Cell, ...]
    page_only: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table with a caption; `stem` names its LaTeX file.

    Attributes:
        interval: what the intervals are; files say it in the caption, since they show intervals in brackets.
        folded: words under which the page shows the table on request, empty to show it at once.
        compact: True for rows of one line, each with the colour of its model.
        prose: True for cells of running text.
        on_page: False for a table that the page holds in another form.
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
        """Returns a table with further fields; texts become cells, and cells rows."""
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
        words: Callable[[int], str] = length_text,
        **fields: Any,
    ) -> Self:
        """Returns a table with one column a context length, or another count that `words` name.

        Each row is a heading and the cells by length; `lacking` stands where it has none. Further fields are those of
        `Table`.
        """
        lines = [(name, *(known.get(length, lacking) for length in lengths)) for name, known in rows]
        return cls.of([heading, *map(words, lengths)], lines, **fields)

    @property
    def caption_in_files(self) -> str:
        """The caption, with what the brackets hold where there are some."""
        shown = any(cell.interval or "[" in cell.text for line in self.rows for cell in line.cells)
        return f"{self.caption} [{self.interval}]" if self.interval and shown else self.caption

    @property
    def rows_in_files(self) -> tuple[tuple[Cell, ...], ...]:
        """The cells of every row that Markdown and LaTeX show."""
        return tuple(row.cells for row in self.rows if not row.page_only)


def interval(low: float, high: float, number_format: str) -> tuple[str, str] | None:
    """Returns the ends of an interval as texts, None where there is none."""
    return None if math.isnan(low) else (format(low, number_format), format(high, number_format))


def verdict(low: float, high: float, *, higher_is_better: bool = False) -> Literal["better", "worse"] | None:
    """Returns which way a difference certainly points, None where its interval holds zero."""
    if low > 0 or high < 0:
        return "better" if (low > 0) == higher_is_better else "worse"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure of the page.

    Attributes:
        caption: of its first variant.
        variants: metric to its Vega-Lite specification.
        findings: metric to what that variant shows, where it is not what the first shows.
        image: name of the first variant's image, for paper and for pages without scripts.
        downloads: image files beside the page, as relative links.
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
    words: str


class Fact(NamedTuple):
    """A text with a name, about a file where it has a link."""

    name: str = ""
    text: str = ""
    link: Link | None = None


class Fold(NamedTuple):
    """Facts shown on request, under a name and what follows it."""

    name: str
    words: str
    facts: tuple[Fact, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One section of the page.

    Attributes:
        identifier: anchor.
        metrics: metric to its name, for the switch; empty for no switch.
        legend: models with a button that hides their lines, and how they are drawn here.
        remarks: a list at the end.
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
        """The axes of lengths that some figure has, to their names, for the switch."""
        units = {unit for figure in self.figures for spec in figure.variants.values() for unit in axes_of(spec)}
        words = {unit: f"\N{MULTIPLICATION SIGN} {name}" for unit, name in UNITS.items() if unit in units}
        return {"tokens": "Tokens", **words} if words else {}

    @property
    def first_row(self) -> tuple[Figure, ...]:
        """The figures that fit side by side where the page begins with them."""
        shown = [figure for figure in self.figures if not figure.folded]
        return tuple(shown[:1] if any(figure.wide for figure in shown[:2]) else shown[:2])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the page and the files beside it are written from.

    Attributes:
        overview: sentences on what all models show side by side.
        overview_table: the same as a table, None for fewer than two models.
        cards_folded: True where the models are so many that each one's words are shown on request.
        numbers: one row for each curve of each model.
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
        """The section whose first figures the page begins with, None where no section has figures of lines."""
        lines = {section.identifier: section for section in self.sections if section.first_row}
        return next((lines[name] for name in _OPENING if name in lines), None)

    @property
    def tables(self) -> list[Table]:
        """Every table, in the order of the page."""
        overview = [self.overview_table] if self.overview_table else []
        return overview + [table for section in self.sections for table in section.tables]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """What sections are made from; what several of them need is computed once and kept here.

    Attributes:
        training_lengths: model label to its training length in tokens, where known.
        folder: where the page will stand, for links to the result files.
        within_nats: how much worse than with the longest context NLL may be where no more context is needed.
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
        """Returns the looks of models shown together; a parent is dashed only beside its extension."""
        parents = {model.label: model.parent for model in self.results.models if model.parent}
        return within(self.looks, list(dict.fromkeys(labels)), parents)

    def figure(self, variants: Mapping[str, Mapping[str, Any]], stem: str, caption: Caption, **shown: Any) -> Figure:
        """Has the first variant's image files written under a name, and returns the figure with fields of it."""
        image, downloads = self.publish(next(iter(variants.values())), stem)
        return Figure(caption=caption, variants=variants, image=image, downloads=downloads, **shown)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of measurement, or another part of the page; its readers read what is not in the tidy table.

    `section` is not asked where the reader `needs` brought nothing, and may still return None.
    """

    section: Callable[[Material], Section | None]
    readers: tuple[Reader[Any], ...] = ()
    needs: Reader[Any] | None = None
