"""LaTeX tables in booktabs style."""

from sbeval.reports.plain_tables import PlainTable

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
}


def latex_text(value: str) -> str:
    """Escapes LaTeX's special characters; control and direction marks are dropped."""
    kept = "".join(letter for letter in value if letter.isprintable())
    return "".join(_ESCAPES.get(letter, letter) for letter in kept)


def latex_table(table: PlainTable) -> str:
    """Returns a `table` environment; it needs the package booktabs."""
    columns = "l" + "r" * (len(table.header) - 1)
    lines = [
        "% needs \\usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(table.caption)}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & ".join(map(latex_text, table.header)) + r" \\",
        r"\midrule",
    ]
    for row_index, row in enumerate(table.rows):
        cells = [
            rf"\textbf{{{latex_text(cell)}}}" if (row_index, column) in table.bold else latex_text(cell) or "--"
            for column, cell in enumerate(row)
        ]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])
