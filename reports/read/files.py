"""Finds the files of lm-eval runs below the given paths, streams samples files, and notes what is left out, and why.

Says when result files appear or change, for pages that follow them.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from sbeval.errors import UserError, visible
from sbeval.foreign_files import MOST_BYTES, parse_visible_json
from sbeval.hub_names import local_path
from sbeval.keeping.writing import is_set_aside, is_unfinished

Place = Path | str
Paths = Iterable[Place]
Labels = Mapping[str, str] | None
"""Names to show in place of others."""
Build = Callable[[], Path | None]
_Fingerprint = dict[Path, tuple[int, int]]
_DATED_JSON = re.compile(r".*_\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}[^/]*\.json")
_PROMPTS_START, _PROMPTS_STOP = b', "arguments": ', b', "filter": "'
_MOST_LINE_BYTES = 2**27  # of a samples file; without prompts, `MOST_BYTES`
_TOO_LONG = f"longer than {_MOST_LINE_BYTES >> 20} MiB ({MOST_BYTES >> 20} MiB without its prompts)"
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}(?:\.\d+)?")


class Note(NamedTuple):
    """One thing left out of a report, for a reason in one sentence; `path` is None where it is about no single file."""

    path: Path | None
    reason: str


class Notes(list[Note]):
    """Notes in the order they were met."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[Note] = set()

    def add(self, path: Path | None, reason: str) -> None:
        """Appends a note unless the same one is there already."""
        note = Note(path=path, reason=reason)
        if note not in self._known:
            self._known.add(note)
            self.append(note)


def find_result_files(paths: Place | Paths, notes: Notes) -> list[Path]:
    """Returns the result files below `paths`, each once, in a stable order.

    lm-eval writes `<output>/<model>/results_<date>.json`, or `<stem>_<date>.json` when the output path names a file. A
    file given by name is taken whatever it is called; what a sweep has moved aside is not walked. Samples files whose
    results are missing become notes.

    Raises:
        UserError: a path does not exist, or no result file was found.
    """
    given = [local_path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    found: dict[Path, None] = {}
    for path in given:
        if not path.exists():
            raise UserError(f"Expected a folder of lm-eval results or a result file, but {path} does not exist.")
        if not path.is_dir():  # a FIFO or a device is a note when it is read
            found[Path(os.path.realpath(path))] = None
            continue
        for file in _walk(path):
            if file.name.startswith("results_") or _DATED_JSON.fullmatch(file.name):
                found[Path(os.path.realpath(file))] = None  # unlike `resolve`, without an error for a link to itself
        _note_orphaned_samples(path, notes)
    if not found:
        places = ", ".join(map(str, given)) or "the given paths"
        remedy = "run an evaluation with --output_path first, or name the folder it wrote to"
        raise UserError(f"Expected result files of lm-eval (results_*.json) below {places}, found none; {remedy}.")
    return list(found)


def samples_file(results_path: Path, task: str, notes: Notes) -> Path | None:
    """Returns the samples file lm-eval wrote with a result file for a task, None where there is no such file."""
    date = _DATE.search(results_path.name)
    if date is None or "/" in task or os.sep in task:
        return None
    name = f"samples_{task}_{date.group()}.jsonl"
    candidate = results_path.parent / name
    try:
        if "\\" in task:  # as `visible` shows a control character; of no folder, whatever the system
            files = sorted(results_path.parent.iterdir())
            return next((file for file in files if visible(file.name) == name and file.is_file()), None)
        if not candidate.is_file() and os.path.lexists(candidate):
            notes.add(candidate, "samples are left out: it is no regular file.")
        return candidate if candidate.is_file() else None
    except (OSError, ValueError):  # a name no file system can hold
        return None


def _walk(folder: Path, ending: str = ".json") -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not (is_set_aside(name) or is_unfinished(name)))
        # a folder of such a name is a note when it is read
        yield from (Path(parent, name) for name in sorted([*folders, *names]) if name.endswith(ending))


def _note_orphaned_samples(folder: Path, notes: Notes) -> None:
    for file in _walk(folder, ".jsonl"):
        date = _DATE.search(file.name)
        if not file.name.startswith("samples_") or date is None:
            continue
        if not any(sibling.suffix == ".json" for sibling in file.parent.glob(f"*{date.group()}*.json")):
            reason = "left out, since nothing says what they measured"
            notes.add(file, f"samples without a result file beside them: {reason}.")


def read_lines(path: Path, notes: Notes, *, samples: float | None = None) -> Iterator[dict[str, Any]]:
    """Yields the samples of a samples file, one line in memory at a time, each once and without prompts and answers.

    Lines that cannot be read, samples given twice and missing ones become notes; `samples` is how many the results
    file counts.
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
                # several filters give a document several lines
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
        reason = f"not complete JSON, or {_TOO_LONG}, left out; paired differences rest on the rest."
        notes.add(path, f"{lines_text} {reason}")
    if repeated:
        notes.add(path, f"{repeated} samples stand there more than once: the first of each counts.")
    documents = len({document for document, _ in seen})
    if samples is not None and documents < samples:
        notes.add(path, f"holds {documents} of {samples:.0f} samples: paired differences rest on these.")


def _beginnings(stream: BinaryIO) -> Iterator[bytes]:
    """Yields every line, of one beyond the limit its beginning, which is no JSON."""
    at_start = True
    for piece in iter(lambda: stream.readline(_MOST_LINE_BYTES), b""):
        if at_start:
            yield piece
        at_start = piece.endswith(b"\n")


def _parsed(line: bytes) -> object:
    """Parses a line; prompts, which are nearly all of it, are skipped unread.

    lm-eval writes `arguments`, `resps`, `filtered_resps`, `filter` one after another. A quote within a text is escaped,
    so the markers found are keys; where they belong to another object, what is left is no JSON and all is parsed.
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
    """Yields what `build` returns, whenever a result file below `paths` appears or changes."""
    given = [local_path(path) for path in paths]
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
        # rglob of a path that is no folder yields nothing
        for file in [path] if path.is_file() else path.rglob("*.json"):
            with contextlib.suppress(OSError):
                status = file.stat()
                sizes[file] = (status.st_size, status.st_mtime_ns)
    return sizes
