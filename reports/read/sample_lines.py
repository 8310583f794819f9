"""Streams lm-eval's samples files, one line in memory at a time, and notes what they lack."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sbeval.errors import UserError
from sbeval.foreign_files import parse_json
from sbeval.reports.read.files import Notes

_PROMPTS_START, _PROMPTS_STOP = b', "arguments": ', b', "filter": "'


def read_lines(path: Path, notes: Notes, *, samples: float | None = None) -> Iterator[dict[str, Any]]:
    """Yields the samples of a file, each once and without its prompts and answers.

    Args:
        path: the file.
        notes: gets one each for lines that cannot be read, samples given twice, and samples that are missing.
        samples: how many the results file counts, None where it does not.
    """
    unreadable = repeated = 0
    seen: set[tuple[str, str]] = set()
    try:
        with path.open("rb") as lines:
            for line in lines:
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
        notes.add(path, f"{lines_text} not complete JSON left out; paired differences rest on the rest.")
    if repeated:
        notes.add(path, f"{repeated} samples stand there more than once: the first of each counts.")
    found = len({document for document, _ in seen})
    if samples is not None and found < samples:
        notes.add(path, f"holds {found} of {samples:.0f} samples: paired differences rest on these.")


def _parsed(line: bytes) -> object:
    """Parses a line; prompts, which are nearly all of it, are skipped unread.

    lm-eval writes `arguments`, `resps`, `filtered_resps`, `filter` one after another. A quote within a text is escaped,
    so the markers found are keys; where they belong to another object, what is left is no JSON and all is parsed.
    """
    start, stop = line.find(_PROMPTS_START), line.rfind(_PROMPTS_STOP)
    if 0 < start < stop:
        with contextlib.suppress(UserError):
            return parse_json(line[:start] + line[stop:])
    try:
        return parse_json(line)
    except UserError:
        return None
