"""The end of a command: one sentence for a user's mistake, a signal's exit code, and no output on a closed pipe."""

import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from sbeval.errors import UserError, brief, first_line, log_visibly, visible, visible_in_colour
from sbeval.processes import ranks
from sbeval.processes.signals import EndedBySignal, raising_on_signals

# messages of the operating system, of SQLite, and of torch's file writer after a short write
_NO_ROOM = (
    "No space left",
    "Disk quota exceeded",
    "File too large",
    "database or disk is full",
    "inline_container.cc",
    "PytorchStreamWriter failed",
)
# messages of the memory allocators of CPU and GPU, of the loader of a library, and of the start of a thread
_NO_MEMORY = (
    " out of memory.",
    "annot allocate memory",
    "an't allocate memory",
    "failed to map segment",
    "can't start new thread",
)
_NETWORK_PACKAGES = ("socket", "urllib", "httpx", "httpcore", "requests", "urllib3", "aiohttp")


@contextlib.contextmanager
def reporting_errors() -> Iterator[None]:
    """Runs the body of a command: prints errors as one sentence on standard error and sets the exit code.

    An exception that comes from a bug of this package is raised again, with its traceback. One of several ranks prints
    the traceback and exits with code 1.

    Raises:
        SystemExit: with code 1 and a printed sentence for an error of the user, a disk, a path, the network or memory;
            with code 128 plus the signal's number if a signal asked the process to end; with code 1 and no output if
            standard output is a closed pipe.
    """
    try:
        try:
            with raising_on_signals(), _showing_what_is_visible():
                _silence_threads_of_databases()
                _check_surroundings()
                yield
        except EndedBySignal as ended:
            ranks.set_failing()
            if not ranks.launched():
                print(ended, file=sys.stderr)
            raise
        except Exception as error:
            sentence = _sentence(error)
            if not ranks.report_failure(error, sentence):
                if sentence is not None:
                    print(sentence, file=sys.stderr)
                elif ranks.several() and not isinstance(error, BrokenPipeError):
                    # printed before the wait, in which the launcher may end this process
                    _show_traceback(type(error), error, error.__traceback__)
                else:
                    sys.excepthook = _show_traceback
                    raise
            ranks.wait_for_readers()
            raise SystemExit(1) from None
    except BrokenPipeError:
        raise SystemExit(1) from None
    finally:
        _silence_closed_pipes()


@contextlib.contextmanager
def _showing_what_is_visible() -> Iterator[None]:
    """Inside this context, control characters from files are printed escaped, so that they cannot act on a terminal."""
    log_visibly()
    os.environ.setdefault("PYTHON_COLORS", "0")  # switches off argparse's colours, from Python 3.14 on
    if (stream := sys.stdout) is None:
        yield
        return
    write = stream.write
    strict = stream.encoding if getattr(stream, "errors", None) == "strict" else None

    def write_visibly(text: str) -> int:
        text = visible_in_colour(text)
        # characters that the encoding lacks are escaped, as Python does on standard error
        return write(text.encode(strict, "backslashreplace").decode(strict) if strict else text)

    with contextlib.suppress(AttributeError):  # another program's stream may have a read-only attribute
        stream.write = write_visibly  # type: ignore[method-assign]
    try:
        yield
    finally:
        with contextlib.suppress(AttributeError):
            stream.write = write  # type: ignore[method-assign]


def _silence_threads_of_databases() -> None:
    """Silences the log and the tracebacks of sqlitedict's threads: the thread that waits for them raises the error."""
    logger = logging.getLogger("sqlitedict")
    hook = threading.excepthook
    logger.setLevel(logging.CRITICAL + 1)

    def hook_of_other_threads(ended: threading.ExceptHookArgs) -> None:
        if type(ended.thread).__module__ != logger.name:
            hook(ended)

    if hook.__module__ != __name__:
        threading.excepthook = hook_of_other_threads


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(visible("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def no_room(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, says that a disk is full or a quota is reached."""
    return _has_message(error, _NO_ROOM)


def _has_message(error: BaseException | None, any_of: Sequence[str], *, handled: bool = True) -> bool:
    """Whether the message of an error, or of one of its causes, contains one of these texts.

    With `handled`, an error that was being handled when the other one was raised counts as a cause.
    """
    while error is not None:
        if any(text in str(error) for text in any_of):
            return True
        error = error.__cause__ or (error.__context__ if handled else None)
    return False


def _sentence(error: Exception) -> str | None:
    """Returns the sentence that is printed for an error; None for a bug of this package, which gets a traceback."""
    if isinstance(error, UserError):
        return str(error)
    if no_room(error):
        return (
            f"The disk is full ({first_line(error)}): free some space and run the same command again. Existing files "
            "were not changed."
        )
    if isinstance(error, MemoryError) or _has_message(error, _NO_MEMORY, handled=False):
        return (
            f"There is not enough memory for this command ({first_line(error)}): raise its limit or end other "
            "programs, and run the same command again."
        )
    if isinstance(error, BrokenPipeError):
        return None
    if _is_of_the_network(error):
        reason = getattr(error, "strerror", None) or first_line(error)
        return f"A network request failed ({reason}): check the name and the network, and run the same command again."
    if isinstance(error, OSError) and error.strerror:
        at = f" at {str(error.filename)!r}" if error.filename is not None else ""
        return f"A file or folder cannot be read or written ({error.strerror}{at}): check the path and its permissions."
    if type(error).__module__ == "sqlite3":
        return (
            f"The response cache cannot be read or written ({first_line(error)}): free some space, or name another "
            "file with --use_cache."
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
        raise UserError("The current folder was deleted: change to another folder (cd).") from None
    ranks.check_environment()
    if (level := os.environ.get("LOGLEVEL")) is not None:
        os.environ["LOGLEVEL"] = level.upper()  # torch accepts upper case only
        if level.upper() not in logging.getLevelNamesMapping():
            raise UserError(f"Expected a level such as INFO in LOGLEVEL, which torch reads, found {level!r}: unset it.")
    for argument in sys.argv[1:]:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UserError(_not_utf8(argument)) from None


def _not_utf8(text: str) -> str:
    try:
        name = text.encode(errors="surrogateescape")  # Python decodes file names that are not UTF-8 with this handler
    except UnicodeEncodeError:
        return f"Expected text that UTF-8 can encode, found half a surrogate pair in {brief(text)}: correct that text."
    return f"Expected file names in UTF-8, found {name[:500]!r}: rename that file."


def _silence_closed_pipes() -> None:
    """Redirects a closed pipe to /dev/null, since Python flushes its streams once more at exit."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is None:
            continue
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
