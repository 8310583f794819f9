"""Writes the files beside the page: the tidy table as CSV and Parquet, a Markdown summary, tables as LaTeX (booktabs).

The tidy table has one row for each measured number. The manifest holds name and hash of every file that a report wrote,
so that a new report replaces these files and no others.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

import pandas as pd
from pandas.api.extensions import ExtensionDtype

from sbeval.errors import UserError, visible
from sbeval.foreign_files import read_bytes
from sbeval.keeping.writing import set_aside, set_files_aside
from sbeval.reports.read.fields import unique_name
from sbeval.reports.read.results import Results
from sbeval.reports.section import Figure, Report, Table

_OTHER_TYPES: dict[str, ExtensionDtype] = {"higher_is_better": pd.BooleanDtype(), "targets_per_window": pd.Int64Dtype()}
TABLE_FILES = ("results.csv", "results.parquet", "numbers.csv", "summary.md")
_BREAKS = str.maketrans({"\n": r"\n", "\t": r"\t"})
_FORMULA = re.compile("(^\\s*|[,;|'\"]\\s*)(?=[=+\\-@\uff1d\uff0b\uff0d\uff20])")
"""Matches the positions in a text at which a spreadsheet may read a formula.

These are before one of the characters listed by OWASP, or its full-width form, at the start of the text or after a
character that may end a cell.
"""
_MARKDOWN_ESCAPES = str.maketrans(
    {letter: f"\\{letter}" for letter in "\\`*_{}[]#|!~$"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}
)
_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    # at the start of a row, LaTeX would read these as optional arguments of the `\\` that ends the row before
    "[": "{[}",
    "*": "{*}",
    "\N{MINUS SIGN}": "$-$",
    "\N{GREATER-THAN OR EQUAL TO}": r"$\geq$",
    "\N{DAGGER}": r"\dag{}",
    "\N{BLACK DIAMOND}": r"$\diamond$",
    "\N{LEFT DOUBLE QUOTATION MARK}": "``",
    "\N{RIGHT DOUBLE QUOTATION MARK}": "''",
}
_BEHIND_NUMBER = re.compile(r"^(.*\S) (\{\[\}[^][]*\])")
_STACKED = r"\\begin{tabular}[t]{@{}r@{}}\1\\\\[-2pt]{\\scriptsize \2}\\end{tabular}"
_WRAPPED = re.compile(r"(?=.{25})\S{1,16}( \S{1,16})+")
_HEADING = r"\parbox[b]{1.1in}{\raggedleft %s}"
_PROSE = 60
"""A column of a LaTeX table is left-aligned if one of its texts has more characters than this.

In a table that is fitted to a page, long headings are broken into lines, and an interval is below its number.
"""
_FITTED = r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%"
_NEGATIVE = re.compile(r"(?<![\w.-])-(?=\d)")
_DASHES = re.compile("-(?=-)")


def write_tables(every_seed: Results, report: Report, folder: Path, *, title: str) -> None:
    """Writes `results.csv`, `results.parquet`, `numbers.csv`, `summary.md` and `latex/*.tex`.

    Args:
        every_seed: results in which every training seed is a model, for the tidy table.
        report: the report.
        folder: folder to write to; it must hold a folder `latex`.
        title: heading of the Markdown file.
    """
    _spreadsheet_safe(every_seed.measurements).to_csv(folder / "results.csv", index=False)
    _typed(every_seed.measurements).to_parquet(folder / "results.parquet", index=False)
    _spreadsheet_safe(report.numbers).to_csv(folder / "numbers.csv", index=False)
    (folder / "summary.md").write_text(markdown_summary(title, report), encoding="utf-8")
    written: set[str] = set()
    for table in report.tables:
        written.add(stem := unique_name(table.stem, written, "{}-{}"))
        (folder / "latex" / f"{stem}.tex").write_text(latex_table(table), encoding="utf-8")


def _typed(table: pd.DataFrame) -> pd.DataFrame:
    """Sets the dtype of all columns, even of empty ones, so that Parquet files of several reports can be joined."""
    typed = table.copy()
    for column in typed.select_dtypes(include=["object", "string"]):
        typed[column] = typed[column].astype(_OTHER_TYPES.get(str(column), pd.StringDtype()))
    return typed


def _spreadsheet_safe(table: pd.DataFrame) -> pd.DataFrame:
    """Puts an apostrophe before texts that a spreadsheet would read as a formula; numbers are unchanged."""
    safe = table.copy()
    for column in safe.select_dtypes(include=["object", "string"]):
        safe[column] = [csv_text(value) if isinstance(value, str) else value for value in safe[column]]
    return safe


def csv_text(value: str) -> str:
    """Returns the text for a CSV cell: on one line, with an apostrophe wherever a formula could begin."""
    return _FORMULA.sub(r"\1'", visible(value).translate(_BREAKS))


def markdown_text(value: str) -> str:
    """Escapes Markdown, HTML, and GitHub's formulas and mentions, and joins the lines of the text to one."""
    return visible(" ".join(value.split())).translate(_MARKDOWN_ESCAPES)


def markdown_summary(title: str, report: Report) -> str:
    """Returns the content of `summary.md`, in the order of the page."""
    opening = report.opening
    lines = [f"# {markdown_text(title)}", ""]
    for sentence in report.overview:
        lines += [markdown_text(sentence), ""]
    lines += [f"{report.counts}.", ""]
    if opening:
        lines += _markdown_figures(opening.title, opening.first_row)
    lines += ["## Summary", ""]
    for finding in report.findings:
        sentences = " ".join(markdown_text(sentence) for sentence in finding.sentences)
        lines.append(f"- **{markdown_text(finding.label)}** ({markdown_text(finding.facts)}): {sentences}")
    lines += ["", *[f"{markdown_text(caveat)}\n" for caveat in report.caveats]]
    for section in report.sections:
        if section is opening:
            lines += _markdown_figures(f"{section.title}, continued", section.figures[len(section.first_row) :])
        else:
            lines += _markdown_figures(section.title, section.figures)
    lines += ["## Tables", ""]
    for table in report.tables:
        lines += [*_markdown_table(table), ""]
    if report.notes:
        notes = [f"{note.path.name}: {note.reason}" if note.path else note.reason for note in report.notes]
        lines += ["## Notes", "", *(f"- {markdown_text(note)}" for note in notes)]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_figures(title: str, figures: Sequence[Figure]) -> list[str]:
    """Returns a heading and all figures with their captions; no line if there is no figure."""
    lines = [f"## {markdown_text(title)}", ""] if figures else []
    for figure in figures:
        images = [link for link in figure.downloads if link.endswith((".png", ".svg"))]
        caption = figure.caption
        heading, *texts = map(markdown_text, (caption.title, caption.finding, caption.explanation))
        lines += [f"### {heading}", "", " ".join(filter(None, texts)), ""]
        if images:
            lines += [f"![{heading}. {texts[0]}]({images[0]})", ""]
    return lines


def _markdown_table(table: Table) -> list[str]:
    rows = [
        [f"**{markdown_text(cell.plain)}**" if cell.bold else markdown_text(cell.plain) for cell in cells]
        for cells in (table.header, *table.rows_in_files)
    ]
    return [
        f"**{markdown_text(table.caption_in_files)}**",
        "",
        f"| {' | '.join(rows[0])} |",
        f"| {' | '.join(['---', *['---:'] * (len(table.header) - 1)])} |",
        *[f"| {' | '.join(row)} |" for row in rows[1:]],
    ]


def latex_text(value: str) -> str:
    """Escapes LaTeX's special characters and drops control characters and Unicode direction marks.

    pdfLaTeX has no fonts for letters of other scripts than Latin and prints them as U+NUMBER; XeLaTeX and LuaLaTeX
    print the letters.
    """
    line = _NEGATIVE.sub("\N{MINUS SIGN}", "".join(letter for letter in value if letter.isprintable()))
    return _DASHES.sub("-{}", "".join(map(_latex_letter, line)))


def _latex_letter(letter: str) -> str:
    if letter in _LATEX_ESCAPES:
        return _LATEX_ESCAPES[letter]
    if ord(letter) < 0x180:
        return letter
    return rf"\ifdefined\Umathchar {letter}\else U+{ord(letter):04X}\fi{{}}"


def latex_table(table: Table, *, fitted: bool = False) -> str:
    """Returns a table as LaTeX, which needs the LaTeX package booktabs.

    A `fitted` table is a `table*` scaled down to the width of the page, and also needs graphicx.
    """
    texts = [[latex_text(cell.plain) for cell in row] for row in (table.header, *table.rows_in_files)]
    prose = [fitted and max(map(len, rest), default=0) > _PROSE for _, *rest in zip(*texts, strict=True)]
    columns = "".join("l" if is_prose or place == 0 else "r" for place, is_prose in enumerate(prose))
    lines = [
        "% needs \\usepackage{booktabs}",
        r"\begin{table*}[t]" if fitted else r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(table.caption_in_files)}}}",
        *([rf"\label{{tab:{table.stem}}}", _FITTED] if fitted else []),
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & ".join(_HEADING % text if fitted and _WRAPPED.fullmatch(text) else text for text in texts[0]) + r" \\",
        r"\midrule",
    ]
    for row, plain in zip(table.rows_in_files, texts[1:], strict=True):
        stacked = [_BEHIND_NUMBER.sub(_STACKED, text) if fitted else text for text in plain]
        cells = [rf"\textbf{{{text}}}" if cell.bold else text or "--" for text, cell in zip(stacked, row, strict=True)]
        lines.append(" & ".join(cells) + (r" \\ \addlinespace[2pt]" if fitted else r" \\"))
    end = [r"\end{tabular}}", r"\end{table*}", ""] if fitted else [r"\end{tabular}", r"\end{table}", ""]
    return "\n".join([*lines, r"\bottomrule", *end])


MANIFEST = "sbeval-report.sha256"
"""File name of the manifest: one line with SHA-256 and name for each file that a report wrote.

A name may have several lines with different hashes: if the process is killed while it replaces a report, the folder has
files of both reports. There are also lines for the results files that the report was made from; the name in such a line
is `_MADE_FROM` followed by the path.
"""
_MADE_FROM = "made from: "
_MOST_MANIFEST_BYTES = 2**24
_LINE = re.compile("([0-9a-f]{64})  (.+)")


def refuse_foreign_files(folder: Path, names: Iterable[str]) -> None:
    """Checks that a report with files of these names would replace only files that an earlier report wrote.

    Raises:
        UserError: one of the names is a file or folder that no report wrote, or that was changed since.
    """
    for file in _others(folder, names):
        remedy = "name another folder, move it away, or pass --replace to move it aside"
        raise UserError(f"{file} is in the way; no report wrote it, or it was changed since: {remedy}.")


def add_manifest(part: Path, folder: Path, *, replace: bool, results: Iterable[Path]) -> None:
    """Writes the manifest of the new files of a report, and moves files of the same names aside.

    If a file of the same name was not written by a report, the function raises an error, or, with `replace`, renames
    that file. An earlier report in the folder is moved to another folder if it was made from results files that the new
    report does not read; a message says where it is now.

    Args:
        part: temporary folder that holds the new files and gets the manifest.
        folder: folder of the report.
        replace: whether files of the same names that no report wrote are moved aside.
        results: the results files that the report was made from.

    Raises:
        UserError: a file of the same name was not written by a report, or cannot be moved.
    """
    files = {str(file.relative_to(part)): _sha256(file) for file in sorted(part.rglob("*")) if file.is_file()}
    written = _written(folder)
    if replace:
        for file in _others(folder, files):
            set_aside(file)
    refuse_foreign_files(folder, files)
    sources = {f"{_MADE_FROM}{visible(str(file))}": _sha256(file) for file in results}
    if written and not _made_from(sources, written):
        earlier = sorted(name for name, known in written.items() if _is_one_of(folder / name, known))
        # move the manifest last: if the process is killed, it still lists the files that were not moved yet
        aside = set_files_aside(folder, [*earlier, MANIFEST])
        print(f"The report of other results that was in {folder} is now in {aside}", flush=True)
        written = {}
    lines = {f"{sha256}  {name}" for name, sha256 in (files | sources).items()}
    unchanged = [name for name, known in written.items() if _is_one_of(folder / name, known)]
    lines |= {f"{_sha256(folder / name)}  {name}" for name in unchanged}
    (part / MANIFEST).write_text("".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")


def _made_from(sources: Mapping[str, str], written: Mapping[str, set[str]]) -> bool:
    """Whether every results file that the earlier report was made from is in `sources`: its path or its content."""
    earlier = {name: known for name, known in written.items() if name.startswith(_MADE_FROM)}
    known_here = {*sources.values()}
    return bool(earlier) and all(name in sources or known & known_here for name, known in earlier.items())


def _others(folder: Path, names: Iterable[str]) -> list[Path]:
    """Returns those files of these names in a folder that no report wrote, or that were changed after it wrote them."""
    written = _written(folder)
    names = list(names) if written else [MANIFEST, *names]
    parents = {folder / parent for name in names for parent in Path(name).parents[:-1]}
    existing_names = [name for name in names if os.path.lexists(folder / name)]
    return [
        *sorted(parent for parent in parents if os.path.lexists(parent) and not parent.is_dir()),
        *(folder / name for name in existing_names if not _is_one_of(folder / name, written.get(name, set()))),
    ]


def _is_one_of(file: Path, known: Set[str]) -> bool:
    return bool(known) and file.is_file() and not file.is_symlink() and _sha256(file) in known


def _written(folder: Path) -> Mapping[str, set[str]]:
    """Reads the manifest in a folder: file name to the hashes of the files that reports wrote under this name.

    Empty if no report was written to the folder.
    """
    try:
        lines = read_bytes(folder / MANIFEST, _MOST_MANIFEST_BYTES).decode().splitlines()
    except ValueError:
        return {}
    hashes: dict[str, set[str]] = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:  # not a manifest, but another file with this name
            return {}
        hashes.setdefault(match[2], set()).add(match[1])
    return hashes


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
