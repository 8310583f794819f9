"""Finds result files of lm-eval below given paths, streams samples files, and collects notes on data left out.

`watch` polls for result and samples files that appear or change, to rebuild a page while runs are in progress.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from sbeval.errors import UserError, visible
from sbeval.foreign_files import MOST_BYTES, parse_visible_json
from sbeval.hub_names import local_path
from sbeval.keeping.writing import is_set_aside, is_unfinished

Place = Path | str
Paths = Iterable[Place]
Labels = Mapping[str, str] | None
"""Name of a model or text to the name that the report shows instead."""
Build = Callable[[], Path | None]
_Fingerprint = dict[Path, tuple[int, int]]
_DATED_JSON = re.compile(r".*_\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}[^/]*\.json")
_PROMPTS_START, _PROMPTS_STOP = b', "arguments": ', b', "filter": "'
_MOST_LINE_BYTES = 2**27  # a line of a samples file with its prompts; without them the limit is `MOST_BYTES`
_TOO_LONG = f"longer than {_MOST_LINE_BYTES >> 20} MiB ({MOST_BYTES >> 20} MiB without its prompts)"
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}(?:\.\d+)?")


class Note(NamedTuple):
    """A sentence on data that the report leaves out, and the file; `path` is None if it is not about a single file."""

    path: Path | None
    reason: str


class Notes(list[Note]):
    """Notes on data that a report leaves out, without duplicates, in the order in which they were added."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[Note] = set()

    def add(self, path: Path | None, reason: str) -> None:
        """Appends a note unless it is there already."""
        note = Note(path=path, reason=reason)
        if note not in self._known:
            self._known.add(note)
            self.append(note)


def find_result_files(paths: Place | Paths, notes: Notes) -> list[Path]:
    """Returns the result files below `paths` in a stable order, without duplicates.

    lm-eval writes `<output>/<model>/results_<date>.json`, or `<stem>_<date>.json` if the output path is a file. If a
    path is a file, it is returned whatever its name. Folders that sbeval moved aside are skipped. For samples files
    without a results file a note is added.

    Raises:
        UserError: a path does not exist, or no result file was found.
    """
    local_paths = [local_path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    result_files: dict[Path, None] = {}
    for path in local_paths:
        if not path.exists():
            raise UserError(f"{path} does not exist: name a folder of lm-eval results or a result file.")
        if not path.is_dir():  # for a FIFO or a device, the reader of the file adds a note
            result_files[Path(os.path.realpath(path))] = None
            continue
        for file in _walk(path):
            if _holds_results(file):
                # `resolve` would raise an error for a link to itself
                result_files[Path(os.path.realpath(file))] = None
        _note_orphaned_samples(path, notes)
    if not result_files:
        places = ", ".join(map(str, local_paths)) or "the given paths"
        remedy = "run an evaluation with --output_path first, or name the folder it wrote to"
        raise UserError(f"There are no result files of lm-eval (results_*.json) below {places}: {remedy}.")
    return list(result_files)


def samples_file(results_path: Path, task: str, notes: Notes) -> Path | None:
    """Returns the samples file that lm-eval wrote for a task beside a result file; None if there is none."""
    date = _DATE.search(results_path.name)
    if date is None or "/" in task or os.sep in task:
        return None
    name = f"samples_{task}_{date.group()}.jsonl"
    candidate = results_path.parent / name
    try:
        if "\\" in task:  # `visible` replaced a control character in the task's name by an escape
            files = sorted(results_path.parent.iterdir())
            return next((file for file in files if visible(file.name) == name and file.is_file()), None)
        if not candidate.is_file() and os.path.lexists(candidate):
            notes.add(candidate, "samples are left out: it is no regular file.")
        return candidate if candidate.is_file() else None
    except (OSError, ValueError):  # the task's name is not valid in a file name
        return None


def _holds_results(file: Path) -> bool:
    """Whether lm-eval gives this name, which ends in `.json`, to a results file."""
    return file.name.startswith("results_") or _DATED_JSON.fullmatch(file.name) is not None


def _walk(folder: Path, ending: str = ".json") -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not (is_set_aside(name) or is_unfinished(name)))
        # a folder with such a name is yielded too: the reader of the file adds a note
        yield from (Path(parent, name) for name in sorted([*folders, *names]) if name.endswith(ending))


def _note_orphaned_samples(folder: Path, notes: Notes) -> None:
    for file in _walk(folder, ".jsonl"):
        date = _DATE.search(file.name)
        if not file.name.startswith("samples_") or date is None:
            continue
        if not any(sibling.suffix == ".json" for sibling in file.parent.glob(f"*{date.group()}*.json")):
            notes.add(file, "samples are left out: no result file beside them says what they measured.")


def read_lines(path: Path, notes: Notes, *, samples: float | None = None) -> Iterator[dict[str, Any]]:
    """Yields the samples of a samples file, without prompts and answers; one line is in memory at a time.

    A note is added for unreadable lines, for repeated samples (only the first is yielded) and for missing samples.

    Args:
        path: the samples file.
        notes: the list that notes are added to.
        samples: number of samples according to the results file; None if the file does not give it.
    """
    unreadable = repeated = 0
    seen: set[tuple[str, str]] = set()
    try:
        with path.open("rb") as lines:
            for line in _beginnings(lines):
                if not line.strip():
                    continue
                sample = _parsed(line)
                if not isinstance(sample, dict):
                    unreadable += 1
                    continue
                # for a task with several filters, lm-eval writes a line for each document and filter
                name = (str(sample.get("doc_id")), str(sample.get("filter")))
                if "doc_id" in sample and name in seen:
                    repeated += 1
                    continue
                seen.add(name)
                yield sample
    except OSError as error:
        notes.add(path, f"could not be read to its end ({error.strerror or error}).")
    if unreadable:
        lines_text = "1 line that is" if unreadable == 1 else f"{unreadable} lines that are"
        reason = f"not complete JSON, or {_TOO_LONG}, left out; paired differences use the other lines."
        notes.add(path, f"{lines_text} {reason}")
    if repeated:
        notes.add(path, f"{repeated} samples are repeated: the first of each counts.")
    documents = len({document for document, _ in seen})
    if samples is not None and documents < samples:
        notes.add(path, f"holds {documents} of {samples:.0f} samples: paired differences use only these.")


def _beginnings(stream: BinaryIO) -> Iterator[bytes]:
    """Yields every line of a file. A line longer than the limit is truncated, so that it cannot be parsed as JSON."""
    at_start = True
    for piece in iter(lambda: stream.readline(_MOST_LINE_BYTES), b""):
        if at_start:
            yield piece
        at_start = piece.endswith(b"\n")


def _parsed(line: bytes) -> object:
    """Parses a line of a samples file without its prompts and answers; returns None if the line is not JSON.

    Prompts and answers are nearly the whole line. lm-eval writes the keys `arguments`, `resps`, `filtered_resps` and
    `filter` one after another, so the text from the first key to the last is cut out before parsing. Quotes within
    strings are escaped, so a search for these keys cannot match within a string. If it matches keys of a nested object,
    the remaining text is not JSON, and the whole line is parsed instead.
    """
    start, stop = line.find(_PROMPTS_START), line.rfind(_PROMPTS_STOP)
    for text in (line[:start] + line[stop:] if 0 < start < stop else b"", line):
        if len(text) <= MOST_BYTES:
            with contextlib.suppress(UserError):
                return parse_visible_json(text)
    return None


def watch(
    paths: Paths, build: Build, *, interval_seconds: float = 5.0, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Path | None]:
    """Calls `build` whenever a result or samples file below `paths` appears or changes, and yields what it returns.

    Other files, such as a page's own, do not count. It never ends, and builds nothing before there is a result file.

    Args:
        paths: folders and files to poll.
        build: a function that builds the report.
        interval_seconds: time between two polls.
        sleep: a function that waits for a number of seconds.
    """
    local_paths = [local_path(path) for path in paths]
    last: _Fingerprint = {}
    while True:
        now = _fingerprint(local_paths)
        if now and now != last:
            last = now
            yield build()
        sleep(interval_seconds)


def _fingerprint(paths: Sequence[Path]) -> _Fingerprint:
    """Returns path of every result and samples file below `paths` to (size in bytes, modification time in ns).

    It is empty if there is no result file.
    """
    # `_walk` yields nothing if the path is not a folder
    results = [file for path in paths for file in ([path] if path.is_file() else filter(_holds_results, _walk(path)))]
    samples = [file for path in paths for file in _walk(path, ".jsonl") if file.name.startswith("samples_")]
    sizes: _Fingerprint = {}
    for file in (*results, *samples) if results else ():
        with contextlib.suppress(OSError):
            status = file.stat()
            sizes[file] = (status.st_size, status.st_mtime_ns)
    return sizes
