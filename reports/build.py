"""Builds a report: result files in, a page, figures and tables out; again whenever results appear."""

import contextlib
import datetime
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from sbeval.commands.ending import AskedToEnd
from sbeval.errors import UserError
from sbeval.keeping.locks import alone_in
from sbeval.keeping.writing import written_beside
from sbeval.reports.analyse.selection import check_labels, pool_seeds, restrict
from sbeval.reports.assemble import KINDS, assemble
from sbeval.reports.figures.images import ImageWriter
from sbeval.reports.read.files import Notes, find_result_files
from sbeval.reports.read.measurements import tabulate_measurements
from sbeval.reports.read.models import group_models, note_other_inputs, with_one_set_of_targets
from sbeval.reports.read.results import Results
from sbeval.reports.read.runs import read_run
from sbeval.reports.read.samples import DOCUMENT_SUMS, SAMPLE_SCORES
from sbeval.reports.write.exports import TABLE_FILES, write_tables
from sbeval.reports.write.html import write_page
from sbeval.reports.write.manifest import MANIFEST, add_manifest, refuse_others

IMAGE_FORMATS = ("png", "svg", "pdf")
PAGE = "index.html"
_Fingerprint = dict[Path, tuple[int, int]]
READERS = (SAMPLE_SCORES, DOCUMENT_SUMS, *(reader for kind in KINDS for reader in kind.readers))


def load_results(paths: Iterable[Path | str], *, labels: Mapping[str, str] | None = None) -> Results:
    """Reads every run below `paths` into one tidy table, and what the readers bring beside it.

    Raises:
        UserError: a path does not exist, or no file holds results.
    """
    notes = Notes()
    files = find_result_files(paths, notes)
    runs = [run for file in files if (run := read_run(file, notes)) is not None]
    if not runs:
        reasons = "; ".join(f"{note.path}: {note.reason.rstrip('.')}" for note in notes if note.path)
        raise UserError(f"Expected a result file of lm-eval with results, found none that can be used: {reasons}.")
    models = with_one_set_of_targets(group_models(runs, labels), notes)
    note_other_inputs(models, notes)
    return Results(
        models=models,
        measurements=tabulate_measurements(models, notes),
        by_reader={reader: reader.read(models, notes) for reader in READERS},
        notes=notes,
    )


def build_report(
    paths: Iterable[Path | str],
    output_dir: Path | str,
    *,
    title: str | None = None,
    labels: Mapping[str, str] | None = None,
    baseline: str | None = None,
    only: Iterable[str] = (),
    image_formats: Iterable[str] = IMAGE_FORMATS,
    replace: bool = False,
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
        replace: move files that lie in the way, and that no report wrote, aside.

    Raises:
        UserError: nothing to report on, a name that no model or task has, or a folder that cannot be written to or
            holds files of a report's names which no report wrote.
    """
    if not replace:
        check_output_folder(output_dir)
    loaded = load_results(paths, labels=labels)
    check_labels(loaded, labels or {})
    every_seed = restrict(loaded, only)
    results = pool_seeds(every_seed, labels)
    folder = Path(output_dir).resolve()
    heading = title or "Beyond the training length"
    with _alone(folder), written_beside(folder, first=MANIFEST) as part:
        for name in ("figures", "latex"):
            (part / name).mkdir()
        with ImageWriter(part / "figures", image_formats) as writer:
            report = assemble(results, baseline=baseline, publish=writer.publish, folder=folder)
            write_tables(every_seed, report, part, title=heading)
            images = writer.svgs()
        page = write_page(report, title=heading, built=datetime.datetime.now(tz=datetime.UTC), images=images)
        (part / PAGE).write_text(page, encoding="utf-8")
        add_manifest(part, folder, replace=replace)
    return folder / PAGE


def _alone(folder: Path) -> contextlib.AbstractContextManager[None]:
    return alone_in(folder) if folder.is_dir() else contextlib.nullcontext()


def check_output_folder(folder: Path | str) -> None:
    """Refuses a folder where a page or table would take the place of something that no report wrote.

    Raises:
        UserError: something of such a name is there, or was changed since a report wrote it.
    """
    refuse_others(Path(folder), (*TABLE_FILES, PAGE))


def watch(
    paths: Iterable[Path | str],
    build: Callable[[], Path | None],
    *,
    interval_seconds: float = 5.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Path | None]:
    """Yields what `build` returns, whenever a result file below `paths` appears or changes."""
    given = [Path(path) for path in paths]
    last: _Fingerprint = {}
    while True:
        now = _fingerprint(given)
        if now and now != last:
            last = now
            yield build()
        sleep(interval_seconds)


def _fingerprint(paths: Iterable[Path]) -> _Fingerprint:
    """Returns every result file below the paths with its size and time of change."""
    sizes: _Fingerprint = {}
    for path in paths:
        files = [path] if path.is_file() else path.rglob("*.json") if path.is_dir() else []
        for file in files:
            try:
                status = file.stat()
            except OSError:
                continue
            sizes[file] = (status.st_size, status.st_mtime_ns)
    return sizes


def keep_building(paths: list[Path], build: Callable[[], Path]) -> None:
    """Builds a page whenever a results file below the paths appears, until Ctrl-C."""
    print("Watching for results files; Ctrl-C ends it.", flush=True)

    def build_or_say_why_not() -> Path | None:
        try:
            return build()
        except UserError as error:  # a results file may be half written
            print(error, file=sys.stderr, flush=True)
            return None

    try:
        for _ in watch(paths, build_or_say_why_not):
            pass
    except AskedToEnd as ended:
        if ended.signal is not signal.SIGINT:
            raise
        print("Watching ended.")
