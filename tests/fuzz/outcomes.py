"""What becomes of one case: an equal number, a number named as changed, or one sentence; all else is a defect.

`run_case` gives a reader damaged input under a time limit and a memory limit, and sorts what comes of it:

- `equal`: the numbers of the undamaged input.
- `named`: other numbers, and something that is recorded or said tells them from the undamaged input's. What that is
  depends on the kind of input and stands in the docstring of its module.
- `sentence`: a `UserError` of one paragraph, which the command line prints before it exits with 1.
- defects: `traceback` (any other exception), `hang`, `memory`, `silent` (another number, and nothing tells), and
  `crash` (the process ended; only the long run, which has a process of its own, lives to count it).
"""

import contextlib
import faulthandler
import logging
import resource
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from sbeval.errors import UserError, unseen

SECONDS = 60
MEMORY_BYTES = 4 * 2**30
GOOD = ("equal", "named", "sentence")
DEFECTS = ("traceback", "hang", "memory", "silent", "crash")
_LONGEST_SENTENCE = 3000

Reader = Callable[[Random, Path], str]
"""Damages its input in a folder of its own, reads it, and returns "equal" or "named"; raises `Silent` for neither."""


class Silent(Exception):
    """A number changed, and nothing tells."""


class _OutOfTime(BaseException):
    """Beyond every `except Exception`."""


class Outcome(NamedTuple):
    """What became of a case, and what is to be known about it."""

    kind: str
    detail: str = ""


def run_case(reader: Reader, seed: str, *, seconds: int = SECONDS, memory_bytes: int = MEMORY_BYTES) -> Outcome:
    """Runs one case; the same reader and seed give the same case."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with _limits(seconds, memory_bytes), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return Outcome(reader(Random(seed), Path(folder)))
        except UserError as error:
            return _sentence(error)
        except Silent as error:
            return Outcome("silent", str(error))
        except _OutOfTime:
            return Outcome("hang", traceback.format_exc(limit=-12))
        except MemoryError:
            return Outcome("memory", traceback.format_exc(limit=-12))
        except (Exception, SystemExit) as error:
            kind = "memory" if "DefaultCPUAllocator" in str(error) else "traceback"
            return Outcome(kind, traceback.format_exc(limit=-12))


def _sentence(error: UserError) -> Outcome:
    text = str(error)
    if not text.strip() or len(text) > _LONGEST_SENTENCE or "Traceback" in text:
        return Outcome("traceback", f"no sentence: {text[:500]!r} of {len(text)} characters")
    if any(unseen(letter) for letter in {*text} - {"\n", "\t"}):
        return Outcome("traceback", f"a sentence that acts on a terminal: {text[:500]!r}")
    return Outcome("sentence", text)


@contextlib.contextmanager
def _limits(seconds: int, memory_bytes: int) -> Iterator[None]:
    """Holds a case to a time and to an address space that much larger than the process's now."""

    def out_of_time(number: int, frame: Any) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, out_of_time)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, hard))
    # where a signal cannot end it, in a call of C, the process ends itself and says where
    faulthandler.dump_traceback_later(4 * seconds, exit=True)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """Collects what is logged as a warning meanwhile."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collect(logging.WARNING)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield lines
    finally:
        root.removeHandler(handler)
