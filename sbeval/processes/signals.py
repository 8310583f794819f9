"""Turns signals that end a process into an exception, so that `finally` blocks remove temporary files."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class EndedBySignal(SystemExit):
    """A signal asked this process to end; the exit code is 128 plus the signal's number, as in a shell."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)

    def __str__(self) -> str:
        return f"Ended by {self.signal.name}; the same command can be run again."


@contextlib.contextmanager
def raising_on_signals() -> Iterator[None]:
    """Inside this context, SIGTERM, SIGHUP and SIGINT raise `EndedBySignal`; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_ended_by_signal(number: int, frame: FrameType | None) -> None:
        raise EndedBySignal(number)

    # a signal that is ignored, as under nohup, stays ignored
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    handlers = {number: handler for number, handler in handlers.items() if handler in _DEFAULTS}
    for number in handlers:
        signal.signal(number, raise_ended_by_signal)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
