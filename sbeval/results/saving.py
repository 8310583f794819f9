"""Saves lm-eval's results and samples files atomically: lm-eval writes to a temporary folder; complete files are moved.

lm-eval itself writes a results file in place before the samples files, and only logs a warning if writing fails. Here
the samples files are moved before the results file that names them, so no results file lacks its samples.
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
from sbeval.keeping.writing import move_into, unfinished, write_errors_explained

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}(\.\d+)?$")


@contextlib.contextmanager
def saved_whole(output_path: str) -> Iterator[str]:
    """Yields a temporary output path for lm-eval; its complete files are moved to `output_path` after the block.

    `output_path` is a folder, or a path that ends in .json, as in lm-eval. Complete files are moved even if others are
    incomplete.

    Raises:
        UserError: the folder cannot be written to, or lm-eval could not write a file.
    """
    path = local_path(output_path)
    folder, file_name = (path.parent, path.name) if path.suffix == ".json" else (path, "")
    with contextlib.ExitStack() as stack:
        with write_errors_explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            new = stack.enter_context(unfinished(folder / "lm_eval"))
            new.mkdir()
        with _named_in_logs(new, folder):
            yield str(new / file_name)
        results = sorted(new.rglob("*.json"))
        missing = [reason for file in results if (reason := what_is_cut_off(file)) is not None]
        for file in results:
            if _results(file) is None:
                file.unlink()
        with write_errors_explained(folder):
            move_into(folder, new, first="samples_*")
        if missing or not results:
            raise UserError.expected(
                f"lm-eval to write its results to {folder}",
                found=f"that {missing[0] if missing else 'it wrote none'}",
                remedy="make room there and run again; with --use_cache no answer is computed twice",
            )


@contextlib.contextmanager
def _named_in_logs(new: Path, folder: Path) -> Iterator[None]:
    """Inside this context, log lines name the final folder in place of the temporary folder."""

    def name(record: logging.LogRecord) -> bool:
        if str(new) in (message := record.getMessage()):
            record.msg = message.replace(str(new), str(folder))
            record.args = None
        return True

    # lm-eval's logger has its own handler and does not propagate to the root logger
    handlers = [handler for logger in ("", "lm_eval") for handler in logging.getLogger(logger).handlers]
    for handler in handlers:
        handler.addFilter(name)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(name)


def what_is_cut_off(file: Path) -> str | None:
    """Returns why a results file or its samples files are incomplete, None if they are complete."""
    if (results := _results(file)) is None:
        return f"the results file {file.name} is incomplete"
    scored: dict[str, dict[str, Any]] = results["n-samples"]
    if not (tasks := list(results["configs"])):
        return f"the results file {file.name} holds no task"
    date = date_of(file)
    for task in tasks:
        documents = usable_number(scored.get(task, {}).get("effective"))
        if (sampled := _sampled_documents(file.parent / f"samples_{task}_{date}.jsonl")) is None:
            return f"the samples file of {task} is missing or cut off"
        if documents is not None and sampled < documents:
            return f"the samples file of {task} holds {sampled} of {documents:.0f} documents"
    return None


def date_of(file: Path) -> str:
    """Returns the date in the name of a results or samples file, "" if there is none."""
    return date[0] if (date := _DATE.search(file.stem)) else ""


def _results(file: Path) -> dict[str, Any] | None:
    try:
        results = read_json_object(file, "results of lm-eval", most=MOST_RESULTS_BYTES)
        if not fits(results.get("n-samples"), dict[str, dict[str, Any]]) or not fits(results.get("configs"), dict):
            return None
        "".join(results["configs"]).encode()  # task names are printed, which lone surrogates would break
    except (UserError, UnicodeEncodeError):
        return None
    return results


def _sampled_documents(path: Path) -> int | None:
    """Returns the number of documents in a samples file, None if it is missing or its last line is cut off."""
    documents = set()
    line = b"\n"
    try:
        if not path.is_file():  # opening a FIFO would block
            return None
        with path.open("rb") as lines:
            for line in lines:
                # several filters give a document several lines
                documents.add(json.loads(line)["doc_id"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return len(documents) if line.endswith(b"\n") else None
