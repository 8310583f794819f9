"""Builds a report: result files in, a page, figures and tables out."""

import datetime
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sbeval.errors import UserError
from sbeval.reports.claims import LengthClaims, length_claims
from sbeval.reports.figures.render import still, write_images
from sbeval.reports.figures.theme import looks as choose_looks
from sbeval.reports.files import find_result_files
from sbeval.reports.findings import find
from sbeval.reports.notes import Notes
from sbeval.reports.page import write_page
from sbeval.reports.panels import perplexity_panels, safe_stem
from sbeval.reports.runs import read_run
from sbeval.reports.section_curves import curves_section
from sbeval.reports.section_provenance import notes_section, provenance_section
from sbeval.reports.table import Results, tabulate

IMAGE_FORMATS = ("png", "svg", "pdf")


def load_results(paths: Iterable[Path | str], *, labels: Mapping[str, str] | None = None) -> Results:
    """Reads every run below `paths` into one tidy table.

    Raises:
        UserError: a path does not exist, or no file holds results.
    """
    notes = Notes()
    files = find_result_files(paths, notes)
    runs = [run for file in files if (run := read_run(file, notes)) is not None]
    if not runs:
        reasons = "; ".join(f"{note.path}: {note.reason}" for note in notes if note.path)
        raise UserError(
            f"Expected at least one result file of lm-eval with results, found none that can be used: {reasons}"
        )
    return tabulate(runs, notes, labels=labels)


def build_report(
    paths: Iterable[Path | str],
    output_dir: Path | str,
    *,
    title: str | None = None,
    labels: Mapping[str, str] | None = None,
    image_formats: Iterable[str] = IMAGE_FORMATS,
) -> Path:
    """Writes `index.html`, `figures/` and `results.csv` and returns the page's path.

    Args:
        paths: folders walked for result files, or result files.
        output_dir: folder to write to; made if missing.
        title: heading of the page.
        labels: names to show in place of the checkpoints' own.
        image_formats: which image files to write beside the page.

    Raises:
        UserError: nothing to report on.
    """
    results = load_results(paths, labels=labels)
    folder = Path(output_dir).resolve()
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    results.measurements.to_csv(folder / "results.csv", index=False)
    formats = tuple(image_formats)

    def publish(spec: Mapping[str, Any], stem: str) -> tuple[str, tuple[str, ...]]:
        svg = still(spec)
        images = write_images(svg, folder / "figures" / safe_stem(stem), formats)
        return svg, tuple(f"figures/{image.name}" for image in images)

    looks = choose_looks(results.settings)
    training_lengths = {
        setting.label: setting.model.training_length_tokens
        for setting in results.settings
        if setting.model.training_length_tokens
    }
    claims = all_claims(results)
    panels = perplexity_panels(results.measurements, results.settings)
    sections = [
        curves_section(panels, looks=looks, training_lengths=training_lengths, claims=claims, publish=publish),
        provenance_section(results.settings, folder),
        notes_section(results.notes, folder),
    ]
    runs = sum(len(setting.runs) for setting in results.settings)
    page = write_page(
        title=title or "Beyond the training length",
        built=datetime.datetime.now(tz=datetime.UTC),
        findings=find(results.settings, claims, {}),
        caveats=[],
        sections=[section for section in sections if section is not None],
        looks=looks,
        counts=f"{_count(len(results.settings), 'model')}, {_count(runs, 'run')}",
    )
    index = folder / "index.html"
    index.write_text(page, encoding="utf-8")
    return index


def all_claims(results: Results) -> dict[tuple[str, str, str], LengthClaims]:
    """Returns what the lengths show for every (setting label, corpus, protocol)."""
    claims: dict[tuple[str, str, str], LengthClaims] = {}
    rows = results.measurements[results.measurements["family"] == "perplexity"]
    for (label, task, corpus, protocol), _ in rows.groupby(["setting", "task", "corpus", "protocol"]):
        if protocol == "position":
            continue
        sums = results.documents.get((label, task))
        trained = results.setting(label).model.training_length_tokens
        claims[str(label), str(corpus), str(protocol)] = length_claims(sums, trained)
    return claims


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
