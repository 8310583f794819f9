"""How the body of a command ends: one sentence for a user's mistake, a signal's exit code, silence on a closed pipe."""

import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from sbeval.errors import UserError, first_line, log_visibly, shown, visible, visible_in_colour
from sbeval.processes import ranks
from sbeval.processes.signals import AskedToEnd, raising_when_asked_to_end

# the operating system's words, SQLite's, and those of torch's writer, which a short write surprises at a file's end
_NO_ROOM = (
    "No space left",
    "Disk quota exceeded",
    "File too large",
    "database or disk is full",
    "inline_container.cc",
    "PytorchStreamWriter failed",
)
# of the allocators of the machine and of a GPU, of the loader of a library, and of a thread
_NO_MEMORY = (
    " out of memory.",
    "annot allocate memory",
    "an't allocate memory",
    "failed to map segment",
    "can't start new thread",
)
_NETWORK_PACKAGES = ("socket", "urllib", "httpx", "httpcore", "requests", "urllib3", "aiohttp")


@contextlib.contextmanager
def told_in_one_sentence() -> Iterator[None]:
    """Holds the body of a command.

    Raises:
        SystemExit: with 1 and a sentence on standard error where a user, a disk or a path was at fault, with 128 and
            the signal's number where this process was asked to end, with 1 and silence where nobody reads its output.
    """
    try:
        try:
            with raising_when_asked_to_end(), _showing_what_is_visible():
                _silence_threads_of_databases()
                _check_surroundings()
                yield
        except AskedToEnd as ended:
            ranks.fails()
            if not ranks.launched():
                print(ended, file=sys.stderr)
            raise
        except Exception as error:
            sentence = _sentence(error)
            if not ranks.told(error, sentence):
                if sentence is None:
                    sys.excepthook = _show_traceback
                    raise
                print(sentence, file=sys.stderr)
            raise SystemExit(1) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
    finally:
        _silence_closed_pipes()


@contextlib.contextmanager
def _showing_what_is_visible() -> Iterator[None]:
    """Within it, nothing that a file of others holds acts on the terminal that standard output or a log goes to."""
    log_visibly()
    os.environ.setdefault("PYTHON_COLORS", "0")  # argparse's, from Python 3.14 on
    if (stream := sys.stdout) is None:
        yield
        return
    write = stream.write
    strict = stream.encoding if getattr(stream, "errors", None) == "strict" else None

    def write_visibly(text: str) -> int:
        text = visible_in_colour(text)
        # what the encoding lacks is shown as on standard error
        return write(text.encode(strict, "backslashreplace").decode(strict) if strict else text)

    with contextlib.suppress(AttributeError):  # of another program's stream, which may be read-only
        stream.write = write_visibly  # type: ignore[method-assign]
    try:
        yield
    finally:
        with contextlib.suppress(AttributeError):
            stream.write = write  # type: ignore[method-assign]


def _silence_threads_of_databases() -> None:
    """Has a thread of sqlitedict end without a word for good: who waits for it raises the same error, and tells it."""
    logger = logging.getLogger("sqlitedict")
    hook = threading.excepthook
    logger.setLevel(logging.CRITICAL + 1)

    def others(ended: threading.ExceptHookArgs) -> None:
        if type(ended.thread).__module__ != logger.name:
            hook(ended)

    if hook.__module__ != __name__:
        threading.excepthook = others


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(visible("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def no_room(error: BaseException | None) -> bool:
    """Whether an error says that nothing more could be written; libraries wrap the operating system's in their own."""
    return _says(error, _NO_ROOM)


def _says(error: BaseException | None, any_of: Sequence[str]) -> bool:
    while error is not None:
        if any(words in str(error) for words in any_of):
            return True
        error = error.__cause__ or error.__context__
    return False


def _sentence(error: Exception) -> str | None:
    """Returns what to tell a user; None for an error that is a mistake of this package, which keeps its traceback."""
    if isinstance(error, UserError):
        return str(error)
    if no_room(error):
        return (
            f"Expected room for what this command writes, found a full disk ({first_line(error)}): make room and run "
            "the same command again; what was there before is as it was."
        )
    if isinstance(error, MemoryError) or _says(error, _NO_MEMORY):
        return (
            f"Expected more memory for this command, found none left ({first_line(error)}): raise its limit or end "
            "other programs, and run the same command again."
        )
    if isinstance(error, BrokenPipeError):
        return None
    if _is_of_the_network(error):
        reason = getattr(error, "strerror", None) or first_line(error)
        return (
            f"Expected an answer over the network, found: {reason}: check the name and the network, and try it again."
        )
    if isinstance(error, OSError) and error.strerror:
        at = f" at {str(error.filename)!r}" if error.filename is not None else ""
        return f"Expected files and folders that can be read and written, found: {error.strerror}{at}: correct that."
    if type(error).__module__ == "sqlite3":
        return (
            f"Expected a database of answers that can be read and written, found: {first_line(error)}: make room, or "
            "name another file with --use_cache."
        )
    if isinstance(error, UnicodeEncodeError) and "surrogates" in error.reason:
        return _not_utf8(error.object)
    return None


def _is_of_the_network(error: Exception) -> bool:
    of_the_network = type(error).__module__.partition(".")[0] in _NETWORK_PACKAGES
    return of_the_network or isinstance(error, ConnectionError | TimeoutError)


def _check_surroundings() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("Expected to stand in a folder, found that it was deleted: change to another (cd).") from None
    ranks.check_environment()
    if (level := os.environ.get("LOGLEVEL")) is not None:
        os.environ["LOGLEVEL"] = level.upper()  # torch knows no other
        if level.upper() not in logging.getLevelNamesMapping():
            raise UserError(f"Expected a level such as INFO in LOGLEVEL, which torch reads, found {level!r}: unset it.")
    for argument in sys.argv[1:]:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UserError(_not_utf8(argument)) from None


def _not_utf8(text: str) -> str:
    try:
        name = text.encode(errors="surrogateescape")  # how Python reads a name of a file that is not UTF-8
    except UnicodeEncodeError:
        return f"Expected text that UTF-8 can hold, found half a surrogate pair in {shown(text)}: correct that text."
    return f"Expected names of files in UTF-8, found {name[:500]!r}: rename that."


def _silence_closed_pipes() -> None:
    """Lets what Python itself writes at its end go nowhere where nobody reads."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is None:
            continue
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
