"""Builds a report: result files in, a page, figures and tables out.

What a report is made of is assembled before any page exists; a new kind of measurement is a line of `KINDS`.
"""

import contextlib
import datetime
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sbeval.errors import UserError, visible
from sbeval.hub_names import local_path
from sbeval.keeping.writing import alone_in, whole_file, written_beside
from sbeval.reports.analyse.claims import all_claims
from sbeval.reports.analyse.findings import find
from sbeval.reports.analyse.one_number import curve_numbers, tabulate_numbers
from sbeval.reports.analyse.overview import BRACKETS, caveats, dropped_lengths, headings, side_by_side
from sbeval.reports.analyse.ruler import apart, effective_sentences, filled_by, missing_tasks, rate_ruler
from sbeval.reports.analyse.selection import check_labels, choose_baseline, pool_seeds, restrict
from sbeval.reports.figures.images import ImageWriter
from sbeval.reports.figures.lengths import on_axis
from sbeval.reports.figures.theme import choose_looks
from sbeval.reports.kinds import (
    answers,
    claimed,
    curves,
    differences,
    maps,
    needed,
    needles,
    positions,
    recall,
    ruler,
    runs,
    spans,
    suite,
)
from sbeval.reports.read.files import Labels, Notes, Paths, Place, find_result_files
from sbeval.reports.read.models import group_models, note_runs, text_names, with_one_set_of_targets
from sbeval.reports.read.results import Results, tabulate_measurements
from sbeval.reports.read.runs import read_run
from sbeval.reports.read.samples import DOCUMENT_SUMS, SAMPLE_SCORES
from sbeval.reports.section import Cell, Material, Publish, Report, Table
from sbeval.reports.write.exports import MANIFEST, TABLE_FILES, add_manifest, refuse_others, write_tables
from sbeval.reports.write.html import write_page
from sbeval.reports.write.paper import FIGURES, TABLES, write_paper

KINDS = (
    curves.CURVES,
    differences.GAINS,
    needed.NEEDED,
    positions.POSITIONS,
    maps.MAPS,
    needles.NEEDLES,
    ruler.RULER,
    recall.RECALL,
    spans.SPANS,
    curves.STEPS,
    claimed.NUMBERS,
    claimed.CLAIMED,
    suite.INPUTS,
    answers.SAMPLES,
    suite.TABLES,
    runs.SPEED,
    runs.PROVENANCE,
    runs.LEFT_OUT,
)
"""Every kind of measurement, in the order of the page."""
_CARDS_AT_MOST = 6


def assemble(
    results: Results,
    *,
    baseline: str | None,
    publish: Publish,
    folder: Path,
    within_nats: float = needed.WITHIN_NATS,
) -> Report:
    """Builds the summary and every section that the results allow.

    `baseline` is chosen where it is None; `folder` is where the page will stand, for links to the result files.
    """
    models = results.models
    claims = all_claims(results)
    trained = {model.label: model.record.training_length_tokens for model in models}
    training_lengths = {label: length for label, length in trained.items() if length}
    rated = rate_ruler(results.measurements, training_lengths)
    numbers = curve_numbers(results, claims, rated)
    material = Material(
        results=results,
        looks=choose_looks(models),
        training_lengths=training_lengths,
        baseline=choose_baseline(models, baseline),
        claims=claims,
        ruler=rated,
        numbers=numbers,
        folder=folder,
        publish=publish,
        within_nats=within_nats,
    )
    sections = [kind.section(material) for kind in KINDS if kind.needs is None or len(results[kind.needs])]
    sentences, side_by_side_rows = side_by_side(models, claims, numbers)
    missing = {label: missing_tasks(rated.scores, label) for label in material.looks_of(rated.scores["setting"])}
    many = len(models) > _CARDS_AT_MOST
    return Report(
        overview=tuple(sentences),
        findings=tuple(find(models, claims, effective_sentences(rated))),
        caveats=tuple(caveats(claims, missing, apart(rated.scores), filled_by(models), dropped_lengths(models))),
        overview_table=_overview_table(side_by_side_rows, on_page=many) if side_by_side_rows else None,
        sections=tuple(section for section in sections if section is not None),
        looks=material.looks,
        counts=f"{_count(len(models), 'model')}, {_count(sum(len(model.runs) for model in models), 'run')}",
        cards_folded=many,
        numbers=tabulate_numbers(numbers),
        notes=results.notes,
    )


def _overview_table(rows: Sequence[tuple[str, ...]], *, on_page: bool) -> Table:
    columns = zip(*rows, strict=True)
    header = [
        words if any("[" in cell for cell in cells) else words.removesuffix(BRACKETS)
        for words, cells in zip(headings(rows), columns, strict=True)
    ]
    return Table.of(
        header,
        [(Cell(name=label), *cells) for label, *cells in rows],
        stem="overview",
        caption="On identical targets, side by side",
        interval="simultaneous 95% band",
        compact=True,
        on_page=on_page,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


IMAGE_FORMATS = ("png", "svg", "pdf")
PAGE = "index.html"
READERS = (SAMPLE_SCORES, DOCUMENT_SUMS, *(reader for kind in KINDS for reader in kind.readers))


def load_results(paths: Place | Paths, *, labels: Labels = None) -> Results:
    """Reads every run below `paths` into one tidy table, and what the readers bring beside it.

    Raises:
        UserError: a path does not exist, or no file holds results.
    """
    notes = Notes()
    files = find_result_files(paths, notes)
    evaluated = [run for file in files if (run := read_run(file, notes)) is not None]
    if not evaluated:
        reasons = "; ".join(f"{note.path}: {note.reason.rstrip('.')}" for note in notes if note.path)
        raise UserError.expected("a result file of lm-eval with results", found="none that can be used", remedy=reasons)
    models = with_one_set_of_targets(group_models(evaluated, labels), notes)
    note_runs(models, notes)
    return Results(
        texts=text_names(group_models(evaluated)),
        models=models,
        measurements=tabulate_measurements(models, notes),
        by_reader={reader: reader.read(models, notes) for reader in READERS},
        notes=notes,
        files_left_out=len(files) - len(evaluated),
    )


def build_report(
    paths: Paths,
    output_dir: Place,
    *,
    title: str | None = None,
    labels: Labels = None,
    baseline: str | None = None,
    only: Iterable[str] = (),
    image_formats: Iterable[str] = IMAGE_FORMATS,
    axis: str = "tokens",
    within_nats: float = needed.WITHIN_NATS,
    paper: Place | None = None,
    figures: Iterable[str] = (),
    replace: bool = False,
) -> Path:
    """Writes `index.html`, `figures/`, the tables and `summary.md`, and returns the page's path.

    Prints how many results files were read and how many were left out.

    A report of the same results, or of some of them, is replaced; one that was made from others is moved aside.

    Args:
        paths: folders walked for result files, or result files.
        output_dir: folder to write to; made if missing.
        title: heading of the page.
        labels: names to show in place of the checkpoints' own.
        baseline: model that differences are taken against; the first RoPE model if None.
        only: names or patterns of models and tasks to show; everything if empty.
        image_formats: which image files to write beside the page, of png, svg and pdf.
        axis: of lengths in image files, and the one the page begins with: "tokens", or one of `lengths.UNITS`.
        within_nats: how much worse than with the longest context NLL may be where no more context is needed.
        paper: folder to write figures and tables for a paper to as well; None for none.
        figures: patterns of names of the figures of a paper.
        replace: move files that lie in the way, and that no report wrote, aside.

    Raises:
        UserError: nothing to report on, a name that no model or task has, or a folder that cannot be written to or
            holds files of a report's names which no report wrote.
    """
    printed = None if paper is None else local_path(paper).resolve()
    if printed == local_path(output_dir).resolve():
        raise UserError(f"Expected another folder for the paper than for the page, found {printed} for both.")
    if not replace:
        check_output_folder(output_dir)
        if printed is not None:
            refuse_others(printed, (FIGURES, TABLES))
    loaded = load_results(paths, labels=labels)
    check_labels(loaded, labels or {})
    every_seed = restrict(loaded, only)
    results = pool_seeds(every_seed, labels)
    folder = local_path(output_dir).resolve()
    heading = visible(title or "Beyond the training length")
    made_from = [run.path for model in loaded.models for run in model.runs]
    with _written(folder, replace=replace, results=made_from) as unfinished:
        for name in ("figures", "latex"):
            (unfinished / name).mkdir()
        with ImageWriter(unfinished / "figures", image_formats) as writer:

            def publish(spec: Mapping[str, Any], stem: str) -> tuple[str, tuple[str, ...]]:
                return writer.publish(on_axis(spec, axis), stem)

            report = assemble(results, baseline=baseline, publish=publish, folder=folder, within_nats=within_nats)
            write_tables(every_seed, report, unfinished, title=heading)
            images = writer.svgs()
        page = write_page(report, title=heading, built=datetime.datetime.now(tz=datetime.UTC), images=images, axis=axis)
        (unfinished / PAGE).write_text(page, encoding="utf-8")
    if printed is not None:
        digests = [digest[:6] for digest in results.measurements["corpus_sha256"].dropna().unique()]
        with _written(printed, replace=replace, results=made_from) as beside:
            write_paper(report, beside, axis=axis, only=tuple(figures), digests=digests)
    print(loaded.files_text, flush=True)
    return folder / PAGE


def draw(results: Results, path: Place, *, only: Iterable[str] = ()) -> Path:
    """Draws the figure that a report of these results begins with into a file, and returns its path.

    Args:
        results: from `load_results`, or of an evaluation in memory.
        path: file to write, which ends in .svg, .png or .pdf.
        only: names or patterns of models and tasks to show; everything if empty.

    Raises:
        UserError: another ending, nothing to draw, or a folder that cannot be written to.
    """
    place = local_path(path)
    if (ending := place.suffix.removeprefix(".")) not in IMAGE_FORMATS:
        expected = f"Expected a file that ends in .{', .'.join(IMAGE_FORMATS)} for a figure"
        raise UserError(f"{expected}, found {place.name}: name one of these.")
    shown = pool_seeds(restrict(results, only), None)
    report = assemble(shown, baseline=None, publish=lambda spec, stem: (stem, ()), folder=place.parent)
    if report.opening is None:
        raise UserError.expected("numbers at context lengths to draw", found="none", remedy="evaluate sb_ tasks")
    figure = next(iter(report.opening.first_row[0].variants.values()))
    with tempfile.TemporaryDirectory() as folder, ImageWriter(Path(folder), [ending]) as writer:
        writer.publish(figure, "figure")
        writer.svgs()
        with whole_file(place, "figures", remedy="name another") as new:
            new.write_bytes(Path(folder, f"figure.{ending}").read_bytes())
    return place


@contextlib.contextmanager
def _written(folder: Path, *, replace: bool, results: Iterable[Path]) -> Iterator[Path]:
    """Gives a folder to write to, whose files then take their places all at once, and no one else's."""
    alone = alone_in(folder) if folder.is_dir() else contextlib.nullcontext()
    with alone, written_beside(folder, first=MANIFEST) as unfinished:
        yield unfinished
        add_manifest(unfinished, folder, replace=replace, results=results)


def check_output_folder(folder: Place) -> None:
    """Refuses a folder where a page or table would take the place of something that no report wrote.

    Raises:
        UserError: something of such a name is there, or was changed since a report wrote it.
    """
    refuse_others(local_path(folder), (*TABLE_FILES, PAGE))
