"""Rebuilds a report whenever a result file appears or changes, for runs that take days."""

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sbeval.commands.ending import AskedToEnd
from sbeval.errors import UserError

Fingerprint = dict[Path, tuple[int, int]]


def watch(
    paths: Iterable[Path | str],
    build: Callable[[], Path | None],
    *,
    interval_seconds: float = 5.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Path | None]:
    """Yields the page's path after every build; waits while there is no result file yet.

    Args:
        paths: folders or files to look at.
        build: builds the report, such as a call of `build_report` with all its options.
        interval_seconds: time between looks.
        sleep: waits that long.
    """
    given = [Path(path) for path in paths]
    last: Fingerprint = {}
    while True:
        now = fingerprint(given)
        if now and now != last:
            last = now
            yield build()
        sleep(interval_seconds)


def fingerprint(paths: Iterable[Path]) -> Fingerprint:
    """Returns every result file below the paths with its size and time of change."""
    found: Fingerprint = {}
    for path in paths:
        files = [path] if path.is_file() else path.rglob("*.json") if path.is_dir() else []
        for file in files:
            try:
                status = file.stat()
            except OSError:
                continue
            found[file] = (status.st_size, status.st_mtime_ns)
    return found


def keep_building(paths: list[Path], build: Callable[[], Path]) -> None:
    """Builds a page whenever a results file appears, until Ctrl-C.

    Args:
        paths: results files, or folders that hold some.
        build: builds the page.
    """
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
