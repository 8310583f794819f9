"""LaTeX tables in booktabs style."""

import re

from sbeval.reports.table import Table

_ESCAPES = {
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
}
_NEGATIVE = re.compile(r"(?<![\w.-])-(?=\d)")


_DASHES = re.compile("-(?=-)")


def latex_text(value: str) -> str:
    """Escapes LaTeX's special characters; control and direction marks are dropped.

    Letters that pdfLaTeX has no font for are shown by their number there, and as they are by XeLaTeX and LuaLaTeX.
    """
    line = _NEGATIVE.sub("\N{MINUS SIGN}", "".join(letter for letter in value if letter.isprintable()))
    return _DASHES.sub("-{}", "".join(map(_letter, line)))


def _letter(letter: str) -> str:
    if letter in _ESCAPES:
        return _ESCAPES[letter]
    if ord(letter) < 0x180:
        return letter
    return rf"\ifdefined\Umathchar {letter}\else U+{ord(letter):04X}\fi{{}}"


def latex_table(table: Table) -> str:
    """Returns a `table` environment; it needs the package booktabs."""
    columns = "l" + "r" * (len(table.header) - 1)
    lines = [
        "% needs \\usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(table.caption_in_files)}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & ".join(latex_text(cell.plain) for cell in table.header) + r" \\",
        r"\midrule",
    ]
    for row in table.rows_in_files:
        cells = [
            rf"\textbf{{{latex_text(cell.plain)}}}" if cell.bold else latex_text(cell.plain) or "--" for cell in row
        ]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])
