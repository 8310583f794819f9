"""Processes of one evaluation, on one machine or several: they end together, and one that does not come is named.

accelerate gives collectives a year, since ranks of an evaluation may wait long for each other, so neither a rank that
fails elsewhere nor one that hangs would end the others. Each therefore has a thread that looks at a board, a key of
the store they meet at: a sentence on it ends all of them.
"""

import atexit
import contextlib
import datetime
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from sbeval.errors import UserError, first_line, shown

LAUNCHED = "SBEVAL_LAUNCHED"
"""Set where `sbeval launch` says for all processes what one of them has found wrong."""
WAIT_SECONDS = "SBEVAL_WAIT_SECONDS"
"""Environment variable: how long processes wait for one that does not come."""
_TRUTHS = ("y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0")
_MEETING = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
_NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_WAIT_SECONDS = 1800.0
_LOOK_SECONDS = 0.5
# until every other process has looked at the board, and left
_TOLD_SECONDS = 3 * _LOOK_SECONDS
_LOST_SECONDS = 10.0
_TO_END_SECONDS = 5.0
_ENDS_WELL = 0
_FAILED = "sbeval/failed"
_GONE = "Expected the first machine's launcher to answer, found it gone: see what it said."
_watch: "_Watch | None" = None
_failing = False


def several() -> bool:
    """Whether this process is one of several that were launched together."""
    return os.environ.get("WORLD_SIZE", "1").isdecimal() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first_process() -> bool:
    """Whether this process writes what all processes share."""
    return int(os.environ.get("RANK", "0")) == 0


def check_environment(*, meeting: bool = False) -> None:
    """Refuses what was set by hand, or by another program, and does not say which of several processes this is.

    What is set to nothing is unset.

    Raises:
        UserError: a number that is none, or where processes are to meet, one that is missing or out of range.
    """
    remedy = "unset it, or start processes with `sbeval launch`"
    # one process alone may stand beside a service of Kubernetes that is called master
    numbers = (*_NUMBERS, "MASTER_PORT") if several() else _NUMBERS
    given = {name: os.environ[name] for name in numbers if name in os.environ}
    for name in [name for name, value in given.items() if not value]:
        del os.environ[name], given[name]
    for name, value in given.items():
        if not value.removeprefix("-").isdecimal():
            raise UserError(f"Expected a whole number in the environment's {name}, found {shown(value)}: {remedy}.")
    if (value := os.environ.get("ACCELERATE_USE_CPU", "no")).lower() not in _TRUTHS:
        raise UserError.expected(
            "true or false in the environment's ACCELERATE_USE_CPU", found=shown(value), remedy="unset it"
        )
    # accelerate takes any LOCAL_RANK for one of several processes
    if meeting and (several() or int(given.get("LOCAL_RANK", -1)) >= 0):
        if missing := [name for name in _MEETING if not os.environ.get(name)]:
            there = next(name for name in ("WORLD_SIZE", "LOCAL_RANK") if name in given)
            raise UserError.expected(f"{', '.join(missing)} beside {there}", found="none", remedy=remedy)
        if not 0 <= int(given["RANK"]) < int(given["WORLD_SIZE"]):
            below = f"RANK from 0 to below WORLD_SIZE={given['WORLD_SIZE']}"
            raise UserError.expected(below, found=given["RANK"], remedy=remedy)


def find_processes() -> None:
    """Makes accelerate join processes launched together on a machine without an accelerator.

    Left to itself it takes each of them for the only one there, and every process evaluates everything.
    """
    check_environment(meeting=True)
    if several() and not importlib.import_module("torch.accelerator").is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def say(text: str) -> None:
    """Prints a line in the first process alone."""
    if is_first_process():
        print(text, flush=True)


def watch() -> None:
    """Starts to look after the other processes, where a launcher started several and keeps a store for them."""
    global _watch
    if _watch is None and several() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _watch = _Watch()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Holds a step at which every process waits for the others."""
    with contextlib.nullcontext() if _watch is None else _watch.waiting():
        yield


def fails() -> None:
    """Notes that this process does not end well: it leaves at once what the others may still wait in."""
    global _failing
    _failing = True


def told(error: BaseException, sentence: str | None) -> bool:
    """Tells the other processes, and the launcher, that this one fails with an error; a sentence is for users.

    Returns:
        Whether all is said already: by the launcher, or by a process that failed before and took this one with it.
    """
    fails()
    if not several():
        return False
    if _watch is not None:
        elsewhere = None if isinstance(error, UserError) else _watch.failed_elsewhere(_TO_END_SECONDS)
        if elsewhere is not None:
            _say(elsewhere)
            return True
        said = f"{sentence or first_line(error)} ({_name()})"
        first = _watch.tell(said)
        time.sleep(_TOLD_SECONDS)
        sentence = sentence and (said if first else None)
        if sentence is None and not first:
            return True
    return sentence is not None and _leave(sentence)


def launched() -> bool:
    """Whether `sbeval launch` started this process, and says for all what there is to say."""
    return bool(os.environ.get(LAUNCHED)) and bool(os.environ.get("TORCHELASTIC_ERROR_FILE"))


def tell_machines(address: str, port: int, sentence: str) -> None:
    """Tells the processes of other machines, from a launcher, that one here has failed."""
    with contextlib.suppress(Exception):  # the first machine's launcher may be gone
        if _board(address, port, _TO_END_SECONDS).compare_set(_FAILED, "", sentence).decode() == sentence:
            time.sleep(_TOLD_SECONDS)


@atexit.register
def _end_threads() -> None:
    """Ends threads that take Python's lock: one that does while Python ends would end this process with SIGABRT.

    They are the watch's, in its store, and those of gloo, which may hold the last tensor that was gathered. Where this
    process fails, a collective may be under way that no other process will join.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    failed = _failing or getattr(sys, "last_value", None) is not None
    if distributed is not None and distributed.is_available() and distributed.is_initialized() and not failed:
        distributed.destroy_process_group()
    if _watch is not None:
        _watch.end()


def _board(address: str, port: int, seconds: float) -> Any:
    stores: Any = importlib.import_module("torch.distributed")
    timeout = datetime.timedelta(seconds=seconds)
    return stores.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)


def _say(sentence: str) -> None:
    """Says what is said elsewhere too: to the launcher, or else by one process of this machine."""
    if not _leave(sentence) and os.environ.get("LOCAL_RANK") == "0":
        print(sentence, file=sys.stderr, flush=True)


def _leave(sentence: str) -> bool:
    """Leaves a sentence for the launcher; False where there is none that would say it."""
    if not launched():
        return False
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as error_file:
        on_the_board = _watch is not None
        json.dump({"message": sentence, "timestamp": int(time.time()), "on_the_board": on_the_board}, error_file)
    return True


def _name() -> str:
    return f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, process {os.getpid()} on {socket.gethostname()}"


class _Watch:
    def __init__(self) -> None:
        self._store = _board(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), _LOST_SECONDS)
        self._using = threading.Lock()
        self._rank, self._count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._step = 0
        self._since: float | None = None
        self._wait_seconds = _seconds_to_wait()
        self._ended, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        if threading.current_thread() is threading.main_thread():
            # a signal reaches Python's own handlers only where no collective is waited for
            signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        self._write(f"sbeval/name/{self._rank}", _name())
        self._looks = threading.Thread(target=self._look, daemon=True)
        self._looks.start()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self._step += 1
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def tell(self, sentence: str) -> bool:
        """Writes a sentence on the board; whether it is the first one there."""
        fails()
        with contextlib.suppress(Exception), self._using:
            return bool(self._store.compare_set(_FAILED, "", sentence).decode() == sentence)
        return True

    def failed_elsewhere(self, seconds: float) -> str | None:
        """Returns what another process, whose end is this one's, writes on the board within some seconds."""
        last = time.monotonic() + seconds
        while time.monotonic() < last:
            try:
                failed = self._read(_FAILED)
            except Exception:  # whatever the store raises when its machine is gone
                return _GONE
            if failed is not None:
                return failed
            time.sleep(_LOOK_SECONDS)
        return None

    def _look(self) -> None:
        published = -1
        answered = time.monotonic()
        while True:
            ready, _, _ = select.select([self._ended], [], [], _LOOK_SECONDS)
            numbers = {*os.read(self._ended, 16)} if ready else set()
            if numbers & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
                time.sleep(_TO_END_SECONDS)
                os._exit(128 + signal.SIGTERM)
            if _ENDS_WELL in numbers:
                return
            try:
                failed = self._read(_FAILED)
                step, since = self._step, self._since
                if step != published:
                    self._write(f"sbeval/step/{self._rank}", str(step))
                    published = step
                answered = time.monotonic()
            except Exception:
                if time.monotonic() - answered > _LOST_SECONDS:
                    self._end(_GONE)
                continue
            if failed is not None and not _failing:
                self._end(failed)
            if since is not None and time.monotonic() - since > self._wait_seconds and (late := self._late(step)):
                sentence = (
                    f"Expected all processes within {self._wait_seconds:.0f} s of each other, found that "
                    f"{' and '.join(late)} did not come: see what holds it up, or set {WAIT_SECONDS} to more seconds."
                )
                self.tell(sentence)
                time.sleep(_TOLD_SECONDS)
                self._end(self._read(_FAILED) or sentence)

    def end(self) -> None:
        """Stops looking, and leaves the store."""
        os.write(self._wakes, bytes([_ENDS_WELL]))
        self._looks.join(_LOST_SECONDS)

    def _late(self, step: int) -> list[str]:
        """Returns the names of the processes that have not come to a step."""
        late = [rank for rank in range(self._count) if int(self._read(f"sbeval/step/{rank}") or 0) < step]
        return [self._read(f"sbeval/name/{rank}") or f"rank {rank}" for rank in late]

    def _end(self, sentence: str) -> None:
        """Ends this process, whatever it is doing; one of them says why where no launcher does."""
        with contextlib.suppress(OSError):
            _say(sentence)
        os._exit(1)

    def _read(self, key: str) -> str | None:
        with self._using:
            return self._store.get(key).decode() if self._store.check([key]) else None

    def _write(self, key: str, value: str) -> None:
        with self._using:
            self._store.set(key, value)


def _seconds_to_wait() -> float:
    given = os.environ.get(WAIT_SECONDS)
    with contextlib.suppress(ValueError):
        if given is None or float(given) > 0:
            return _WAIT_SECONDS if given is None else float(given)
    raise UserError(f"Expected {WAIT_SECONDS} to be a number of seconds above 0, found {given!r}: correct it.")
