"""The summary as Markdown that GitHub renders."""

from collections.abc import Sequence

from sbeval.reports.assemble import Report
from sbeval.reports.read.notes import Notes
from sbeval.reports.sections.section import Figure
from sbeval.reports.write.plain_tables import PlainTable

_SPECIAL = "\\`*_{}[]<>#|!~$"
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}


def markdown_text(value: str) -> str:
    """Escapes Markdown, HTML, GitHub's formulas and mentions, and keeps the text on one line."""
    line = " ".join(value.split())
    return "".join(_ENTITIES.get(letter) or _escaped(letter) for letter in line)


def markdown_summary(title: str, report: Report, tables: Sequence[PlainTable], notes: Notes) -> str:
    """Returns the whole file: findings, caveats, figures, tables, what was left out."""
    lines = [f"# {markdown_text(title)}", "", f"{report.counts}.", "", "## Summary", ""]
    for sentence in report.overview.sentences:
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
    for table in tables:
        lines += [*_table(table), ""]
    if notes:
        lines += ["## Left out", ""]
        lines += [
            f"- {markdown_text(f'{note.path.name}: {note.reason}' if note.path else note.reason)}" for note in notes
        ]
    return "\n".join(lines).rstrip() + "\n"


def _words(figure: Figure) -> str:
    return " ".join(markdown_text(part) for part in (figure.finding, figure.explanation) if part)


def _table(table: PlainTable) -> list[str]:
    rows = [
        [
            f"**{markdown_text(cell)}**" if (index, column) in table.bold else markdown_text(cell)
            for column, cell in enumerate(row)
        ]
        for index, row in enumerate(table.rows)
    ]
    return [
        f"**{markdown_text(table.caption)}**",
        "",
        f"| {' | '.join(map(markdown_text, table.header))} |",
        f"| {' | '.join(['---', *['---:'] * (len(table.header) - 1)])} |",
        *[f"| {' | '.join(row)} |" for row in rows],
    ]


def _escaped(letter: str) -> str:
    return f"\\{letter}" if letter in _SPECIAL else letter
