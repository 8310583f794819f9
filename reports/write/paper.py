"""Writes a report for a paper: figures as PDF, one column or a page wide, and captions and tables as LaTeX.

The figures are made from those of the page. Plots are widened until a figure, in pixels, is 1.75 times its width on
paper in points, and the image is scaled down by that factor, so that letters have 7 points in every figure. In tables
an interval is below its number: with seven lengths side by side and intervals beside the numbers, letters would have 4
points.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sbeval.reports.figures.images import ImageWriter
from sbeval.reports.figures.lengths import on_axis
from sbeval.reports.read.fields import unique_name
from sbeval.reports.section import Figure, Report
from sbeval.reports.write.exports import latex_table, latex_text

COLUMN_INCHES = 3.25
PAGE_INCHES = 6.75
_POINTS_PER_INCH = 72
_PIXELS_PER_POINT = 1.75
"""Factor from widths on paper in points to widths in pixels: letters of 12.5 or 13 pixels have about 7 points."""
_LEGEND = {"labelLimit": 190, "symbolLimit": 0, "symbolStrokeWidth": 2}
_MOST_ROWS = 40
FIGURES = "figures.tex"
TABLES = "tables.tex"
_ALONE = r"""% Compiles alone; in a paper, \input{FILE} after \usepackage{booktabs,graphicx} stands for what follows.
\ifcsname c@figure\endcsname\def\sbevalend{}\else
\documentclass[10pt,twocolumn]{article}
\usepackage[T1]{fontenc}
\usepackage{booktabs,graphicx}
\setlength\textwidth{6.75in}\setlength\columnsep{0.25in}\setlength\oddsidemargin{-0.125in}
\setlength\textheight{9in}\setlength\topmargin{-0.5in}
\begin{document}
\def\sbevalend{\end{document}}
\fi
"""
_END = "\\sbevalend\n"
_SENTENCE = re.compile(r"(?<=[.;]) ")


def write_paper(report: Report, folder: Path, *, axis: str, only: Sequence[str], digests: Sequence[str]) -> None:
    """Writes `figures/*.pdf`, `figures.tex` and `tables.tex`.

    Args:
        report: the report.
        folder: folder to write to; it must exist.
        axis: unit of the length axis in the figures, as in `build_report`.
        only: patterns of file names of figures; if empty, every figure is written with its first metric.
        digests: first characters of the hashes of texts; they are removed from file names and labels.
    """
    (folder / "figures").mkdir()
    lines = [_ALONE.replace("FILE", FIGURES)]
    with ImageWriter(folder / "figures", ("pdf",)) as writer:
        for figure in (figure for section in report.sections for figure in section.figures):
            for place, (metric, spec) in enumerate(figure.variants.items()):
                stem = _stem(figure, metric, digests)
                if any(fnmatch.fnmatchcase(stem, pattern) for pattern in only) if only else place == 0:
                    print_spec, wide = _for_print(on_axis(spec, axis))
                    inches = PAGE_INCHES if wide else COLUMN_INCHES
                    points = inches * _POINTS_PER_INCH
                    name, _ = writer.publish(print_spec, stem, (points * _PIXELS_PER_POINT, points))
                    lines += [*_figure_lines(name, _caption(figure, metric, spec), inches, wide=wide), ""]
        writer.svgs()
    (folder / FIGURES).write_text("\n".join([*lines, _END]), encoding="utf-8")
    tables = [table for table in report.tables if not table.prose and len(table.rows_in_files) <= _MOST_ROWS]
    texts = [_ALONE.replace("FILE", TABLES)]
    labels = set[str]()
    for table in tables:
        labels.add(label := unique_name(_without(table.stem, digests), labels, "{}-{}"))
        texts.append(latex_table(dataclasses.replace(table, stem=label), fitted=True))
    (folder / TABLES).write_text("\n".join([*texts, _END]), encoding="utf-8")


def _stem(figure: Figure, metric: str, digests: Sequence[str]) -> str:
    """Returns the file name of a figure: without hashes of texts, and ending in the metric if there are several."""
    stem = _without(figure.image, digests)
    if len(figure.variants) == 1:
        return stem
    return f"{stem.removesuffix(f'-{next(iter(figure.variants))}')}-{metric}"


def _without(text: str, digests: Sequence[str]) -> str:
    for digest in digests:
        text = text.replace(f"-{digest}", "")
    return text


def _for_print(spec: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Returns the specification of a figure for print, and whether the figure is as wide as a page (else a column).

    The printed figure has no title, since LaTeX sets the caption. It has a legend below instead of names at the lines.
    """
    wide = len(spec.get("concat", ())) > 1 and spec["columns"] > 1
    legend = {"title": None, "orient": "bottom", "columns": 4 if wide else 2} | _LEGEND

    def printed(value: Any) -> Any:
        if isinstance(value, list):
            return [printed(item) for item in value if not _names_lines(item)]
        if not isinstance(value, Mapping):
            return value
        changed = {key: printed(item) for key, item in value.items()}
        if value.get("field") == "setting" and "range" in value.get("scale", {}):
            changed["legend"] = legend if len(value["scale"]["range"]) > 1 else None
        return changed

    print_spec = printed({key: item for key, item in spec.items() if key not in ("title", "description", "datasets")})
    return print_spec | {"padding": 2}, wide


def _names_lines(layer: Any) -> bool:
    return isinstance(layer, Mapping) and isinstance(layer.get("data"), Mapping) and layer["data"].get("name") == "ends"


def _caption(figure: Figure, metric: str, spec: Mapping[str, Any]) -> str:
    """Returns the caption of a figure: result, how to read it, kind of interval, and number of documents if known."""
    caption = figure.caption
    finding = figure.findings.get(metric, caption.finding)
    sentences = [s for s in _SENTENCE.split(f"{finding} {caption.explanation}".strip()) if not s.startswith("No band")]
    caption_text = " ".join([f"{caption.title}.", *sentences])
    rows = list(_rows(spec))
    if any(row.get("low") is not None for row in rows) and "Band" not in caption_text:
        caption_text += " Bands: 95% intervals."
    written = {str(row.get("clusters_text", "")).replace(",", "") for row in rows}
    counts = sorted(int(text) for text in written if text.isdigit())
    if counts:
        span = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        caption_text += f" {span} document{'s' * (counts[-1] > 1)}."
    return caption_text


def _rows(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for image in spec.get("concat", [spec]):
        yield from image.get("data", {}).get("values", ())


def _figure_lines(name: str, caption: str, inches: float, *, wide: bool) -> list[str]:
    environment = "figure*" if wide else "figure"
    return [
        rf"\begin{{{environment}}}[t]",
        r"\centering",
        rf"\includegraphics[width={inches:g}in,height=0.8\textheight,keepaspectratio]{{figures/{name}.pdf}}",
        rf"\caption{{{latex_text(caption)}}}",
        rf"\label{{fig:{name}}}",
        rf"\end{{{environment}}}",
    ]
