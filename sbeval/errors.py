"""`UserError`, whose message is printed to the user without a traceback, and functions that format its parts.

Text from files reaches a terminal only through `visible`, which escapes control characters. This module applies it to
error messages, and `log_visibly` and `processes.ending` to log lines and the output of commands.
"""

import contextlib
import logging
import re
import traceback
import unicodedata
import warnings
from collections.abc import Iterator
from typing import Any, Self

ENCODING = (
    "The tokenizers library crashed while encoding text ({}): correct the tokenizer's tokenizer.json, whose regular "
    "expressions may backtrack without end, or pass another tokenizer with tokenizer=... in --model_args."
)
"""Message of `panics_as_errors` for encoding text."""
_MOST_SHOWN_CHARACTERS = 200
_LONGEST_CHARACTERS = 2000
# only direction marks: other format characters, such as joiners, are needed in many scripts and in emoji
_DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_COLOURS = re.compile(r"(\r|\x1b\[[\d;]*m)")


class UserError(ValueError):
    """An error that the user can correct.

    The message is one sentence: what is wrong, with the value, and what to do. Commands of `sbeval` print only the
    message and exit with code 1; in a plain `lm_eval` command the plugin's excepthook does the same.
    """

    @classmethod
    def expected(cls, expected: str, *, found: object, remedy: str) -> Self:
        """Makes the error `Expected <expected>, found <found>: <remedy>.`."""
        return cls(f"Expected {expected}, found {found}: {remedy}.")

    def __str__(self) -> str:
        return _cut(super().__str__(), _LONGEST_CHARACTERS)


def unseen(letter: str) -> bool:
    """Whether a character must be escaped before it is printed or written into a page.

    Such characters are control characters, direction marks, halves of surrogate pairs, line and paragraph separators
    (which end a string in JavaScript), and noncharacters such as U+FFFE (which XML forbids).
    """
    noncharacter = ord(letter) & 0xFFFE == 0xFFFE or 0xFDD0 <= ord(letter) <= 0xFDEF
    acts = unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")
    return acts or noncharacter or _DIRECTIONS.match(letter) is not None


def visible(text: str) -> str:
    r"""Escapes characters that could act on a terminal, such as `\x1b`; keeps newlines and tabs."""
    unsafe = [letter for letter in {*text} - {*"\n\t"} if unseen(letter)]
    return text.translate({ord(letter): letter.encode("unicode_escape").decode() for letter in unsafe})


def visible_in_colour(text: str) -> str:
    """Escapes text as `visible` does, but keeps colour sequences and carriage returns, which progress bars print."""
    return "".join(piece if index % 2 else visible(piece) for index, piece in enumerate(_COLOURS.split(text)))


def log_visibly() -> None:
    """Escapes all log lines and warnings of this process with `visible`; idempotent."""
    make = logging.getLogRecordFactory()
    show = warnings.formatwarning

    def make_visible_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        with contextlib.suppress(Exception):  # logging itself reports a message that cannot be formatted
            record.msg = visible(record.getMessage())
            record.args = ()
            if record.exc_info:
                record.exc_text = visible("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
        return record

    def format_visible_warning(*args: Any, **kwargs: Any) -> str:
        return visible(show(*args, **kwargs))

    if getattr(make, "__module__", None) != __name__:
        logging.setLogRecordFactory(make_visible_record)
    if getattr(show, "__module__", None) != __name__:
        warnings.formatwarning = format_visible_warning


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message without its full stop, or the error's class if it has no message.

    If the line ends in a colon, as in transformers' configuration errors, the next line is added.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    count = 2 if lines[0].rstrip().endswith(":") else 1
    text = " ".join(line.strip() for line in lines[:count]).rstrip(".")
    return _cut(text, 2 * _MOST_SHOWN_CHARACTERS)


def brief(value: Any) -> str:
    """Returns a value's repr for a message: on one line, shortened if it is long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python refuses to print integers of thousands of digits
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return _cut(text, _MOST_SHOWN_CHARACTERS)


def time_text(seconds: float) -> str:
    """Formats a duration, such as "4.2 s", "57 s", "3.4 min" or "1.5 h"."""
    if seconds < 90:
        return f"{seconds:.{1 if seconds < 10 else 0}f} s"
    return f"{seconds / 60:.1f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def raised_here(error: BaseException) -> bool:
    """Whether code of this package raised an error; the error is then a bug of the package, not a fault of a file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] == "sbeval"


@contextlib.contextmanager
def panics_as_errors(sentence: str = "") -> Iterator[None]:
    """Inside this context, a panic of a Rust library such as tokenizers, which is no `Exception`, becomes an error.

    With a `sentence` it becomes a `UserError`, in which "{}" is replaced by the panic's message; else a `RuntimeError`.
    """
    try:
        yield
    except BaseException as panic:
        if type(panic).__name__ != "PanicException":
            raise
        error = UserError(sentence.format(first_line(panic))) if sentence else RuntimeError(str(panic))
        raise error.with_traceback(panic.__traceback__) from panic


def _cut(text: str, most: int) -> str:
    return visible(text if len(text) <= most else f"{text[:most]} ...")
