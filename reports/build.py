"""Builds a report from result files: reads them, assembles the sections, and writes page, figures and tables.

`load_results` reads the files, `assemble` builds the sections without writing a page, and `build_report` does all of
this and writes the page. A new kind of measurement needs one line in `KINDS`.
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
from sbeval.reports.analyse.findings import model_findings
from sbeval.reports.analyse.one_number import curve_numbers, tabulate_numbers
from sbeval.reports.analyse.overview import BRACKETS, caveats, dropped_lengths, headings, side_by_side
from sbeval.reports.analyse.ruler import apart, effective_sentences, filled_by, missing_tasks, rate_ruler
from sbeval.reports.analyse.selection import check_labels, choose_baseline, pool_seeds, restrict
from sbeval.reports.figures.images import ImageWriter
from sbeval.reports.figures.lengths import on_axis
from sbeval.reports.figures.theme import choose_looks
from sbeval.reports.kinds import (
    answers,
    caches,
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
from sbeval.reports.kinds.answered import absent, fitting, levels, mrcr, tallies
from sbeval.reports.read.files import Labels, Notes, Paths, Place, find_result_files
from sbeval.reports.read.models import group_models, note_runs, text_names, with_one_set_of_targets
from sbeval.reports.read.results import Results, tabulate_measurements
from sbeval.reports.read.runs import read_run
from sbeval.reports.read.samples import DOCUMENT_SUMS, SAMPLE_SCORES
from sbeval.reports.section import Cell, Material, Publish, Report, Table
from sbeval.reports.write.exports import MANIFEST, TABLE_FILES, add_manifest, refuse_foreign_files, write_tables
from sbeval.reports.write.html import write_page
from sbeval.reports.write.paper import FIGURES, TABLES, write_paper

KINDS = (
    curves.CURVES,
    differences.GAINS,
    caches.CACHES,
    needed.NEEDED,
    positions.POSITIONS,
    maps.MAPS,
    needles.NEEDLES,
    absent.ABSENT,
    tallies.TALLIES,
    ruler.RULER,
    levels.LEVELS,
    mrcr.MRCR,
    recall.RECALL,
    spans.SPANS,
    curves.STEPS,
    claimed.NUMBERS,
    claimed.CLAIMED,
    suite.INPUTS,
    fitting.FITTING,
    answers.SAMPLES,
    suite.TABLES,
    runs.SPEED,
    runs.PROVENANCE,
    runs.LEFT_OUT,
)
"""All kinds of measurement and other sections, in the order of the page."""
_CARDS_AT_MOST = 6


def assemble(
    results: Results,
    *,
    baseline: str | None,
    publish: Publish,
    folder: Path,
    within_nats: float = needed.WITHIN_NATS,
) -> Report:
    """Builds the summary and every section for which there are results.

    Args:
        results: all results, with the training seeds of a recipe already merged into one model (`pool_seeds`).
        baseline: label of the model whose numbers are subtracted from those of all others; None to choose one
            (`choose_baseline`).
        publish: a function that writes the image files of a figure.
        folder: folder of the page, for relative links to result files.
        within_nats: a context length suffices if its NLL is at most this much above that of the longest context.
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
        findings=tuple(model_findings(models, claims, effective_sentences(rated))),
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
        heading if any("[" in cell for cell in cells) else heading.removesuffix(BRACKETS)
        for heading, cells in zip(headings(rows), columns, strict=True)
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
    """Reads all runs below `paths` into the tidy table (one row for each number), and the data of all `Reader`s.

    Raises:
        UserError: a path does not exist, or no file holds usable results.
    """
    notes = Notes()
    files = find_result_files(paths, notes)
    evaluated = [run for file in files if (run := read_run(file, notes)) is not None]
    if not evaluated:
        reasons = "; ".join(f"{note.path}: {note.reason.rstrip('.')}" for note in notes if note.path)
        raise UserError(f"No result file of lm-eval can be used: {reasons}.")
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
    """Writes `index.html`, `figures/`, the tables and `summary.md`, and returns the path of the page.

    Prints how many results files were read and how many were left out.

    An earlier report in the folder is replaced if all results files that it was made from are read again, and otherwise
    moved aside.

    Args:
        paths: result files, or folders that are searched for them.
        output_dir: folder to write to; created if missing.
        title: heading of the page.
        labels: name of a model or text to the name shown instead.
        baseline: model whose numbers are subtracted from those of all others; if None, the first RoPE model, or the
            first model if there is none.
        only: names or patterns of models and tasks to show; all if empty.
        image_formats: formats of the image files beside the page: png, svg or pdf.
        axis: unit of the length axis in image files, and on the page until the reader switches it: "tokens" or a key of
            `lengths.UNITS`.
        within_nats: a context length suffices if its NLL is at most this much above that of the longest context.
        paper: folder for figures and tables for a paper; None to write none.
        figures: patterns of file names of the figures for the paper; all if empty.
        replace: whether files that have the name of a new file and that no report wrote are moved aside.

    Raises:
        UserError: there are no results, a name matches no model or task, a folder cannot be written to, or a file in it
            has the name of a new file and was not written by a report.
    """
    paper_folder = None if paper is None else local_path(paper).resolve()
    if paper_folder == local_path(output_dir).resolve():
        raise UserError(f"Page and paper cannot share the folder {paper_folder}: name another folder for one of them.")
    if not replace:
        check_output_folder(output_dir)
        if paper_folder is not None:
            refuse_foreign_files(paper_folder, (FIGURES, TABLES))
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
    if paper_folder is not None:
        digests = [digest[:6] for digest in results.measurements["corpus_sha256"].dropna().unique()]
        with _written(paper_folder, replace=replace, results=made_from) as unfinished:
            write_paper(report, unfinished, axis=axis, only=tuple(figures), digests=digests)
    print(loaded.files_text, flush=True)
    return folder / PAGE


def draw(results: Results, path: Place, *, only: Iterable[str] = ()) -> Path:
    """Draws the first figure of a report of these results into an image file, and returns the path of the file.

    Args:
        results: the return value of `load_results`, or the results of an evaluation in memory.
        path: file to write; its extension is .svg, .png or .pdf.
        only: names or patterns of models and tasks to show; all if empty.

    Raises:
        UserError: the extension is not one of these, there is nothing to draw, or the folder cannot be written to.
    """
    place = local_path(path)
    if (ending := place.suffix.removeprefix(".")) not in IMAGE_FORMATS:
        endings = f".{', .'.join(IMAGE_FORMATS)}"
        raise UserError(f"{place.name} is no name for a figure: choose one that ends in {endings}.")
    shown = pool_seeds(restrict(results, only), None)
    report = assemble(shown, baseline=None, publish=lambda spec, stem: (stem, ()), folder=place.parent)
    if report.opening is None:
        raise UserError("The results hold no numbers at context lengths to draw: evaluate sb_ tasks.")
    figure = next(iter(report.opening.first_row[0].variants.values()))
    with tempfile.TemporaryDirectory() as folder, ImageWriter(Path(folder), [ending]) as writer:
        writer.publish(figure, "figure")
        writer.svgs()
        with whole_file(place, "figures", remedy="name another") as new:
            new.write_bytes(Path(folder, f"figure.{ending}").read_bytes())
    return place


@contextlib.contextmanager
def _written(folder: Path, *, replace: bool, results: Iterable[Path]) -> Iterator[Path]:
    """Yields a temporary folder. On exit, under a lock, its files replace those of an earlier report in `folder`.

    If a file of the same name was not written by a report, an error is raised, or, with `replace`, that file is moved
    aside.
    """
    alone = alone_in(folder) if folder.is_dir() else contextlib.nullcontext()
    with alone, written_beside(folder, first=MANIFEST) as unfinished:
        yield unfinished
        add_manifest(unfinished, folder, replace=replace, results=results)


def check_output_folder(folder: Place) -> None:
    """Checks that a report in this folder would replace only files that an earlier report wrote.

    Raises:
        UserError: a file with the name of a new file was not written by a report, or was changed since.
    """
    refuse_foreign_files(local_path(folder), (*TABLE_FILES, PAGE))
