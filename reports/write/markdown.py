"""The summary as Markdown that GitHub renders."""

from sbeval.reports.sections.section import Figure, Report
from sbeval.reports.table import Table

_SPECIAL = "\\`*_{}[]<>#|!~$"
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}


def markdown_text(value: str) -> str:
    """Escapes Markdown, HTML, GitHub's formulas and mentions, and keeps the text on one line."""
    line = " ".join(value.split())
    return "".join(_ENTITIES.get(letter) or _escaped(letter) for letter in line)


def markdown_summary(title: str, report: Report) -> str:
    """Returns the whole file: findings, caveats, figures, tables, what was left out."""
    lines = [f"# {markdown_text(title)}", "", f"{report.counts}.", "", "## Summary", ""]
    for sentence in report.overview:
        lines += [markdown_text(sentence), ""]
    for finding in report.findings:
        sentences = " ".join(markdown_text(sentence) for sentence in finding.sentences)
        lines.append(f"- **{markdown_text(finding.label)}** ({markdown_text(finding.facts)}): {sentences}")
    lines += ["", *[f"{markdown_text(caveat)}\n" for caveat in report.caveats]]
    for section in report.sections:
        if not section.figures:
            continue
        lines += [f"## {markdown_text(section.title)}", ""]
        for figure in section.figures:
            images = [link for link in figure.downloads if link.endswith((".png", ".svg"))]
            lines += [f"### {markdown_text(figure.title)}", "", _words(figure), ""]
            if images:
                lines += [f"![{markdown_text(figure.title)}. {markdown_text(figure.finding)}]({images[0]})", ""]
    lines += ["## Tables", ""]
    for table in report.tables:
        lines += [*_table(table), ""]
    if report.notes:
        lines += ["## Left out", ""]
        lines += [
            f"- {markdown_text(f'{note.path.name}: {note.reason}' if note.path else note.reason)}"
            for note in report.notes
        ]
    return "\n".join(lines).rstrip() + "\n"


def _words(figure: Figure) -> str:
    return " ".join(markdown_text(part) for part in (figure.finding, figure.explanation) if part)


def _table(table: Table) -> list[str]:
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


def _escaped(letter: str) -> str:
    return f"\\{letter}" if letter in _SPECIAL else letter
