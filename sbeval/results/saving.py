"""Results and samples files of lm-eval appear whole: written in a folder of their own, looked at, and then moved.

lm-eval writes a results file before its samples, in place, and only warns where writing fails.
"""

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sbeval.errors import UserError
from sbeval.foreign_files import MOST_RESULTS_BYTES, fits, read_json_object, usable_number
from sbeval.hub_names import local_path
from sbeval.keeping.writing import move_into, told, unfinished

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}(\.\d+)?$")


@contextlib.contextmanager
def saved_whole(output_path: str) -> Iterator[str]:
    """Yields what to give lm-eval as its output path; its files lie at `output_path` once the block has ended.

    That is a folder, or as lm-eval has it a path that ends in .json. Samples are moved before the results that name
    them. What is whole is moved too where something else is not.

    Raises:
        UserError: the folder cannot be written to, or lm-eval could not write something.
    """
    path = local_path(output_path)
    folder, named = (path.parent, path.name) if path.suffix == ".json" else (path, "")
    with contextlib.ExitStack() as stack:
        with told(folder):
            folder.mkdir(parents=True, exist_ok=True)
            new = stack.enter_context(unfinished(folder / "lm_eval"))
            new.mkdir()
        with _named_in_logs(new, folder):
            yield str(new / named)
        results = sorted(new.rglob("*.json"))
        missing = [reason for file in results if (reason := what_is_cut_off(file)) is not None]
        for file in results:
            if _results(file) is None:
                file.unlink()
        with told(folder):
            move_into(folder, new, first="samples_*")
        if missing or not results:
            raise UserError.expected(
                f"lm-eval to write its results to {folder}",
                found=f"that {missing[0] if missing else 'it wrote none'}",
                remedy="make room there and run again; with --use_cache no answer is computed twice",
            )


@contextlib.contextmanager
def _named_in_logs(new: Path, folder: Path) -> Iterator[None]:
    """Within it, lines of the log name the folder where files will lie in place of the one that they pass through."""

    def name(record: logging.LogRecord) -> bool:
        if str(new) in (message := record.getMessage()):
            record.msg = message.replace(str(new), str(folder))
            record.args = None
        return True

    # lm-eval's logger has a handler of its own, and hands nothing on to the root's
    handlers = [handler for logger in ("", "lm_eval") for handler in logging.getLogger(logger).handlers]
    for handler in handlers:
        handler.addFilter(name)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(name)


def what_is_cut_off(file: Path) -> str | None:
    """Returns what a results file lacks to be whole with all its samples, None where it lacks nothing."""
    if (results := _results(file)) is None:
        return f"the results file {file.name} is not whole"
    scored: dict[str, dict[str, Any]] = results["n-samples"]
    if not (tasks := list(results["configs"])):
        return f"the results file {file.name} holds no task"
    date = date_of(file)
    for task in tasks:
        documents = usable_number(scored.get(task, {}).get("effective"))
        if (counted := _samples(file.parent / f"samples_{task}_{date}.jsonl")) is None:
            return f"the samples file of {task} is missing or cut off"
        if documents is not None and counted < documents:
            return f"the samples file of {task} holds {counted} of {documents:.0f} documents"
    return None


def date_of(file: Path) -> str:
    """Returns the date in the name of a results or samples file, an empty text where there is none."""
    return date[0] if (date := _DATE.search(file.stem)) else ""


def _results(file: Path) -> dict[str, Any] | None:
    try:
        results = read_json_object(file, "results of lm-eval", most=MOST_RESULTS_BYTES)
        if not fits(results.get("n-samples"), dict[str, dict[str, Any]]) or not fits(results.get("configs"), dict):
            return None
        "".join(results["configs"]).encode()  # what is printed of them
    except (UserError, UnicodeEncodeError):
        return None
    return results


def _samples(path: Path) -> int | None:
    """Counts a samples file's documents; None where it is missing or its last line was cut off."""
    documents = set()
    line = b"\n"
    try:
        if not path.is_file():  # a FIFO would be waited for
            return None
        with path.open("rb") as lines:
            for line in lines:
                # several filters give a document several lines
                documents.add(json.loads(line)["doc_id"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return len(documents) if line.endswith(b"\n") else None
