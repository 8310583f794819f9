"""Signals that end a process become an exception, so that unfinished files are removed on the way out."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class AskedToEnd(SystemExit):
    """This process was asked to end; the exit code is the one a shell gives for the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)

    def __str__(self) -> str:
        return f"Ended by {self.signal.name}; the same command can be run again."


@contextlib.contextmanager
def raising_when_asked_to_end() -> Iterator[None]:
    """Turns signals whose default ends this process at once into `AskedToEnd`; only a main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def asked(number: int, frame: FrameType | None) -> None:
        raise AskedToEnd(number)

    # a signal that is ignored, as under nohup, stays ignored
    before = {number: signal.getsignal(number) for number in _ENDING}
    before = {number: handler for number, handler in before.items() if handler in _DEFAULTS}
    for number in before:
        signal.signal(number, asked)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
