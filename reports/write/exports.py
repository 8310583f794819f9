"""The files beside the page: the tidy table as CSV and Parquet, the summary as Markdown, tables as LaTeX (booktabs).

The manifest holds names and hashes of what a report wrote, so that a file of somebody else's is never replaced.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

import pandas as pd
from pandas.api.extensions import ExtensionDtype

from sbeval.errors import UserError, visible
from sbeval.foreign_files import read_bytes
from sbeval.keeping.writing import set_aside, set_files_aside
from sbeval.reports.read.fields import unique_name
from sbeval.reports.read.results import Results
from sbeval.reports.section import Report, Table

_OTHER_TYPES: dict[str, ExtensionDtype] = {"higher_is_better": pd.BooleanDtype(), "targets_per_window": pd.Int64Dtype()}
TABLE_FILES = ("results.csv", "results.parquet", "numbers.csv", "summary.md")
_BREAKS = str.maketrans({"\n": r"\n", "\t": r"\t"})
_FORMULA = re.compile("(^\\s*|[,;|'\"]\\s*)(?=[=+\\-@\uff1d\uff0b\uff0d\uff20])")
"""Where a spreadsheet may begin a cell with a formula: OWASP's signs, full-width ones too, also behind what it may take
for the end of a cell.
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
    # after the end of a row these would be read as its arguments
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
"""An interval stands below its number, and long headings in lines, where a table is to fit a page."""
_FITTED = r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%"
_NEGATIVE = re.compile(r"(?<![\w.-])-(?=\d)")
_DASHES = re.compile("-(?=-)")


def write_tables(every_seed: Results, report: Report, folder: Path, *, title: str) -> None:
    """Writes `results.csv`, `results.parquet`, `numbers.csv`, `summary.md` and `latex/*.tex` into the folder.

    The tidy table holds every training seed by itself; the title is the heading of the Markdown file.
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
    """Gives columns that hold nothing their type too, so that the files of several reports can be joined."""
    typed = table.copy()
    for column in typed.select_dtypes(include=["object", "string"]):
        typed[column] = typed[column].astype(_OTHER_TYPES.get(str(column), pd.StringDtype()))
    return typed


def _spreadsheet_safe(table: pd.DataFrame) -> pd.DataFrame:
    """Puts an apostrophe before texts that a spreadsheet would run as a formula; numbers stay numbers."""
    safe = table.copy()
    for column in safe.select_dtypes(include=["object", "string"]):
        safe[column] = [csv_text(value) if isinstance(value, str) else value for value in safe[column]]
    return safe


def csv_text(value: str) -> str:
    """Returns a text as a cell of a CSV file: on one line, with an apostrophe wherever a formula could begin."""
    return _FORMULA.sub(r"\1'", visible(value).translate(_BREAKS))


def markdown_text(value: str) -> str:
    """Escapes Markdown, HTML, GitHub's formulas and mentions, and keeps the text on one line."""
    return visible(" ".join(value.split())).translate(_MARKDOWN_ESCAPES)


def markdown_summary(title: str, report: Report) -> str:
    """Returns the whole file: findings, caveats, figures, tables, what was left out."""
    lines = [f"# {markdown_text(title)}", "", f"{report.counts}.", "", "## Summary", ""]
    for sentence in report.overview:
        lines += [markdown_text(sentence), ""]
    for finding in report.findings:
        sentences = " ".join(markdown_text(sentence) for sentence in finding.sentences)
        lines.append(f"- **{markdown_text(finding.label)}** ({markdown_text(finding.facts)}): {sentences}")
    lines += ["", *[f"{markdown_text(caveat)}\n" for caveat in report.caveats]]
    for section in (section for section in report.sections if section.figures):
        lines += [f"## {markdown_text(section.title)}", ""]
        for figure in section.figures:
            images = [link for link in figure.downloads if link.endswith((".png", ".svg"))]
            caption = figure.caption
            title, *words = map(markdown_text, (caption.title, caption.finding, caption.explanation))
            lines += [f"### {title}", "", " ".join(filter(None, words)), ""]
            if images:
                lines += [f"![{title}. {words[0]}]({images[0]})", ""]
    lines += ["## Tables", ""]
    for table in report.tables:
        lines += [*_markdown_table(table), ""]
    if report.notes:
        notes = [f"{note.path.name}: {note.reason}" if note.path else note.reason for note in report.notes]
        lines += ["## Notes", "", *(f"- {markdown_text(note)}" for note in notes)]
    return "\n".join(lines).rstrip() + "\n"


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
    """Escapes LaTeX's special characters; control and direction marks are dropped.

    Letters that pdfLaTeX has no font for are shown by their number there, and as they are by XeLaTeX and LuaLaTeX.
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
    """Returns a `table` environment; it needs the package booktabs, and graphicx where it is `fitted` to the page."""
    texts = [[latex_text(cell.plain) for cell in row] for row in (table.header, *table.rows_in_files)]
    prose = [fitted and max(map(len, rest), default=0) > _PROSE for _, *rest in zip(*texts, strict=True)]
    columns = "".join("l" if words or place == 0 else "r" for place, words in enumerate(prose))
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
"""Lines of a sha256 and a name. A name may have several: a kill leaves files of this report and of the one before.

The results files that a report was made from stand there too, by their path behind `_MADE_FROM`.
"""
_MADE_FROM = "made from: "
_MOST_MANIFEST_BYTES = 2**24
_LINE = re.compile("([0-9a-f]{64})  (.+)")


def refuse_others(folder: Path, names: Iterable[str]) -> None:
    """Raises a `UserError` that names the first file or folder of these names which no report left as it is."""
    for file in _others(folder, names):
        expected = f"Expected a folder for the report without files of other origin, found {file}"
        remedy = "name another folder, move that away, or have it moved aside with --replace"
        raise UserError(f"{expected}, which no report wrote, or which was changed since: {remedy}.")


def add_manifest(part: Path, folder: Path, *, replace: bool, results: Iterable[Path]) -> None:
    """Writes the manifest of a report's new files, which lie in `part` and belong in `folder`.

    What lies in their way and is somebody else's is refused, or with `replace` moved aside. A report that was made from
    a results file which is not among the new one's `results` is moved aside, and the user is told where to.

    Raises:
        UserError: something lies in their way, or it cannot be moved.
    """
    files = {str(file.relative_to(part)): _sha256(file) for file in sorted(part.rglob("*")) if file.is_file()}
    written = _written(folder)
    if replace:
        for file in _others(folder, files):
            set_aside(file)
    refuse_others(folder, files)
    sources = {f"{_MADE_FROM}{visible(str(file))}": _sha256(file) for file in results}
    if written and not _made_from(sources, written):
        earlier = sorted(name for name, known in written.items() if _is_one_of(folder / name, known))
        # the manifest last: what a kill leaves behind is still known as a report's
        aside = set_files_aside(folder, [*earlier, MANIFEST])
        print(f"The report of other results that was in {folder} is now in {aside}", flush=True)
        written = {}
    lines = {f"{sha256}  {name}" for name, sha256 in (files | sources).items()}
    kept = [name for name, known in written.items() if _is_one_of(folder / name, known)]
    lines |= {f"{_sha256(folder / name)}  {name}" for name in kept}
    (part / MANIFEST).write_text("".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")


def _made_from(sources: Mapping[str, str], written: Mapping[str, set[str]]) -> bool:
    """Whether every results file of an earlier report is among these, by its path or by its content."""
    earlier = {name: known for name, known in written.items() if name.startswith(_MADE_FROM)}
    known_here = {*sources.values()}
    return bool(earlier) and all(name in sources or known & known_here for name, known in earlier.items())


def _others(folder: Path, names: Iterable[str]) -> list[Path]:
    written = _written(folder)
    names = list(names) if written else [MANIFEST, *names]
    parents = {folder / parent for name in names for parent in Path(name).parents[:-1]}
    there = [name for name in names if os.path.lexists(folder / name)]
    return [
        *sorted(parent for parent in parents if os.path.lexists(parent) and not parent.is_dir()),
        *(folder / name for name in there if not _is_one_of(folder / name, written.get(name, set()))),
    ]


def _is_one_of(file: Path, known: Set[str]) -> bool:
    return bool(known) and file.is_file() and not file.is_symlink() and _sha256(file) in known


def _written(folder: Path) -> Mapping[str, set[str]]:
    """Returns the hashes of what reports wrote to a folder, by name; nothing where no report did."""
    try:
        lines = read_bytes(folder / MANIFEST, _MOST_MANIFEST_BYTES).decode().splitlines()
    except ValueError:
        return {}
    found: dict[str, set[str]] = {}
    for line in lines:
        if (parts := _LINE.fullmatch(line)) is None:  # somebody else's file
            return {}
        found.setdefault(parts[2], set()).add(parts[1])
    return found


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
