"""The one exception whose message is meant for the user as it stands, and what its messages are made of.

Names and words from files of others reach a terminal through `visible` alone: those of a message here, those of what a
command prints and of every line of the log where `told_in_one_sentence` and the adapter say so.
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
    "Expected a tokenizer that can encode the text, found one whose library gives up ({}): mend its tokenizer.json, "
    "whose regular expressions may try without end, or pass another as tokenizer=... in --model_args."
)
"""What `panics_as_errors` says where text is encoded."""
_MOST_SHOWN_CHARACTERS = 200
_LONGEST_CHARACTERS = 2000
# other format characters, such as joiners, are a part of many scripts and of emoji
_DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_COLOURS = re.compile(r"(\r|\x1b\[[\d;]*m)")


class UserError(ValueError):
    """Something the user can mend.

    The message is one clear sentence: what was expected, what was found, what to do. `sbeval` commands print the
    message alone and exit with code 1; under plain `lm_eval` the registration plugin does the same.
    """

    @classmethod
    def expected(cls, expected: str, *, found: object, remedy: str) -> Self:
        """Makes the error `Expected <expected>, found <found>: <remedy>.`."""
        return cls(f"Expected {expected}, found {found}: {remedy}.")

    def __str__(self) -> str:
        return _cut(super().__str__(), _LONGEST_CHARACTERS)


def unseen(letter: str) -> bool:
    """Whether a character is none that one sees.

    Those are control characters, direction marks, halves of surrogate pairs, line and paragraph separators, which end
    a string in JavaScript, and noncharacters such as U+FFFE, which no XML file may hold.
    """
    noncharacter = ord(letter) & 0xFFFE == 0xFFFE or 0xFDD0 <= ord(letter) <= 0xFDEF
    acts = unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")
    return acts or noncharacter or _DIRECTIONS.match(letter) is not None


def visible(text: str) -> str:
    """Returns text of a file as a terminal may get it: what would act on it is shown by its number."""
    acting = [letter for letter in {*text} - {*"\n\t"} if unseen(letter)]
    return text.translate({ord(letter): letter.encode("unicode_escape").decode() for letter in acting})


def visible_in_colour(text: str) -> str:
    """Returns text as `visible` does, with the colours and the carriage returns of who prints it."""
    return "".join(piece if index % 2 else visible(piece) for index, piece in enumerate(_COLOURS.split(text)))


def log_visibly() -> None:
    """Has no line of the log, and no warning, act on a terminal from here on; a second call does nothing."""
    make = logging.getLogRecordFactory()
    show = warnings.formatwarning

    def made(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        with contextlib.suppress(Exception):  # logging says what is wrong with a message
            record.msg = visible(record.getMessage())
            record.args = ()
            if record.exc_info:
                record.exc_text = visible("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
        return record

    def shown_warning(*args: Any, **kwargs: Any) -> str:
        return visible(show(*args, **kwargs))

    if getattr(make, "__module__", None) != __name__:
        logging.setLogRecordFactory(made)
    if getattr(show, "__module__", None) != __name__:
        warnings.formatwarning = shown_warning


def first_line(error: BaseException) -> str:
    """Returns what an error says first, without a full stop, or its class where it says nothing.

    A line that ends in a colon, such as the one in which a configuration's error names the field, is joined with the
    next.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    said = " ".join(line.strip() for line in lines[: 2 if lines[0].rstrip().endswith(":") else 1]).rstrip(".")
    return _cut(said, 2 * _MOST_SHOWN_CHARACTERS)


def shown(value: Any) -> str:
    """Returns a value as a message shows it: on one line, and only its beginning where it is long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # a whole number of thousands of digits
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return _cut(text, _MOST_SHOWN_CHARACTERS)


def time_text(seconds: float) -> str:
    """Writes a time such as "4.2 s", "57 s", "3.4 min" or "1.5 h"."""
    if seconds < 90:
        return f"{seconds:.{1 if seconds < 10 else 0}f} s"
    return f"{seconds / 60:.1f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def raised_here(error: BaseException) -> bool:
    """Whether this project's own code raised an error: a defect of ours, whatever a user's files hold."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] == "sbeval"


@contextlib.contextmanager
def panics_as_errors(sentence: str = "") -> Iterator[None]:
    """Raises as an error what a library written in Rust, such as tokenizers, panics with: no `Exception`.

    It is a `UserError` of the `sentence`, whose "{}" is what the library says, or without one a `RuntimeError`.
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
