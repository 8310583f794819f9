"""Builds a report: result files in, a page, figures and tables out."""

import contextlib
import datetime
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from uuid import uuid4

from sbeval.errors import UserError
from sbeval.reports.analyse.selection import check_labels, pool_seeds, restrict
from sbeval.reports.assemble import assemble
from sbeval.reports.figures.images import ImageWriter
from sbeval.reports.read.files import Notes, find_result_files
from sbeval.reports.read.results import Results, tabulate
from sbeval.reports.read.runs import read_run
from sbeval.reports.write.exports import TABLE_FILES, write_tables
from sbeval.reports.write.html import write_page

IMAGE_FORMATS = ("png", "svg", "pdf")
PAGE = "index.html"
_GENERATOR = b'<meta name="generator" content="sbeval">'
_HEAD_BYTES = 4096


def load_results(paths: Iterable[Path | str], *, labels: Mapping[str, str] | None = None) -> Results:
    """Reads every run below `paths` into one tidy table.

    Raises:
        UserError: a path does not exist, or no file holds results.
    """
    notes = Notes()
    files = find_result_files(paths, notes)
    runs = [run for file in files if (run := read_run(file, notes)) is not None]
    if not runs:
        reasons = "; ".join(f"{note.path}: {note.reason.rstrip('.')}" for note in notes if note.path)
        raise UserError(f"Expected a result file of lm-eval with results, found none that can be used: {reasons}.")
    return tabulate(runs, notes, labels=labels)


def build_report(
    paths: Iterable[Path | str],
    output_dir: Path | str,
    *,
    title: str | None = None,
    labels: Mapping[str, str] | None = None,
    baseline: str | None = None,
    only: Iterable[str] = (),
    image_formats: Iterable[str] = IMAGE_FORMATS,
) -> Path:
    """Writes `index.html`, `figures/`, the tables and `summary.md`, and returns the page's path.

    Args:
        paths: folders walked for result files, or result files.
        output_dir: folder to write to; made if missing.
        title: heading of the page.
        labels: names to show in place of the checkpoints' own.
        baseline: model that differences are taken against; the first RoPE model if None.
        only: names or patterns of models and tasks to show; everything if empty.
        image_formats: which image files to write beside the page, of png, svg and pdf.

    Raises:
        UserError: nothing to report on, a name that no model or task has, or a folder that cannot be written to or
            holds files of a report's names which no report wrote.
    """
    check_output_folder(output_dir)
    loaded = load_results(paths, labels=labels)
    check_labels(loaded, labels or {})
    every_seed = restrict(loaded, only)
    results = pool_seeds(every_seed, labels)
    folder = Path(output_dir).resolve()
    heading = title or "Beyond the training length"
    with _new_files(folder) as part:
        with ImageWriter(part / "figures", image_formats) as writer:
            report = assemble(results, baseline=baseline, publish=writer.publish, folder=folder)
            write_tables(every_seed, report, part, title=heading)
            images = writer.svgs()
        page = write_page(report, title=heading, built=datetime.datetime.now(tz=datetime.UTC), images=images)
        (part / PAGE).write_text(page, encoding="utf-8")
        check_output_folder(folder, [str(file.relative_to(part)) for file in part.rglob("*") if file.is_file()])
    return folder / PAGE


def check_output_folder(folder: Path | str, names: Iterable[str] = (*TABLE_FILES, PAGE)) -> None:
    """Refuses a folder that holds files of a report's names which no report wrote.

    Args:
        folder: where a report is to go. Files in it that have other names stay as they are.
        names: what would be written, as paths below it.

    Raises:
        UserError: something of such a name is there, and no page of an earlier report beside it.
    """
    ours = _is_page(Path(folder) / PAGE)
    for name in sorted(names):
        file = Path(folder) / name
        if file.is_dir() or (os.path.lexists(file) and not ours):
            raise UserError(
                f"Expected a folder for the report without files of other origin, found {file}, which no report wrote: "
                "name another folder, or move that file away."
            )


def _is_page(file: Path) -> bool:
    try:
        with file.open("rb") as page:
            return _GENERATOR in page.read(_HEAD_BYTES)
    except OSError:
        return False


@contextlib.contextmanager
def _new_files(folder: Path) -> Iterator[Path]:
    """Yields a folder to write a report to, which is moved to `folder` file by file, the page first.

    Once the page is there, the folder is known as a report's, whatever ends the process.
    """
    part = _made(_made(folder) / f"report.{uuid4().hex[:12]}.partial")
    try:
        yield part
        for file in sorted((file for file in part.rglob("*") if file.is_file()), key=lambda file: file.name != PAGE):
            file.replace(folder / file.relative_to(part))
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _made(folder: Path) -> Path:
    """Makes the report's folders."""
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        (folder / "latex").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(
            f"Expected a folder to write the report to, but {folder} cannot be one ({error.strerror}); name another."
        ) from error
    return folder
