"""A table of typed cells, which the page, Markdown and LaTeX each render.

The page shows every line of a cell; the files hold an interval in brackets and small print in parentheses behind the
text, unless a cell says what stands there instead.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: what it says.
        name: a name before the text, such as a model's, whose writing direction is its own.
        interval: ends of the interval around a number, as texts.
        small: further lines in small print.
        verdict: which way a difference points, where it certainly does.
        bold: True to stress the text.
        missing: True where nothing was measured.
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


NOT_MEASURED = Cell("not measured", missing=True, in_files="")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A row, its first cell the heading; `page_only` for one that the files hold in a table of its own."""

    cells: tuple[Cell, ...]
    page_only: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table with a caption.

    Attributes:
        stem: name of its LaTeX file, without the ending.
        caption: what it shows.
        header: names of the columns; the first is of the rows' headings.
        rows: its rows.
        explanation: how to read it, on the page.
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

    @property
    def caption_in_files(self) -> str:
        """The caption, with what the brackets hold."""
        return f"{self.caption} [{self.interval}]" if self.interval else self.caption

    @property
    def rows_in_files(self) -> tuple[tuple[Cell, ...], ...]:
        """The cells of every row that Markdown and LaTeX show."""
        return tuple(row.cells for row in self.rows if not row.page_only)


def row(heading: Cell | str, cells: Iterable[Cell | str], *, page_only: bool = False) -> Row:
    """Returns a row; texts become cells."""
    return Row(texts(heading, *cells), page_only)


def texts(*cells: Cell | str) -> tuple[Cell, ...]:
    """Returns cells; texts become cells."""
    return tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in cells)
