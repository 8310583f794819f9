"""The ranks of one evaluation, on one or more machines: all end when one fails, and a rank that hangs is named.

The timeout of collectives is a year, since ranks of an evaluation may wait long for each other. So a rank that fails or
hangs would not end the others. Each rank therefore has a thread that polls the board, a key of the TCPStore at which
the ranks met. An error message on the board ends all ranks.
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

from sbeval.errors import UserError, brief, first_line

LAUNCHED = "SBEVAL_LAUNCHED"
"""Environment variable that `sbeval launch` sets for its processes: the launcher prints their error."""
WAIT_SECONDS = "SBEVAL_WAIT_SECONDS"
"""Environment variable: how many seconds ranks wait at a meeting point (`waiting`) for a rank that does not arrive."""
_TRUTHS = ("y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0")
_MEETING = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
_NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_WAIT_SECONDS = 1800.0
_LOOK_SECONDS = 0.5
# time within which every other rank has polled the board and ended
_READ_SECONDS = 3 * _LOOK_SECONDS
_LOST_SECONDS = 10.0
_TO_END_SECONDS = 5.0
_ENDS_WELL = 0
_FAILED = "sbeval/failed"
# prefixes of keys that end in the number of a machine:
# a rank of the machine polls the board
_POLLS = "sbeval/polls"
# the launcher of the machine has the error
_REPORTED = "sbeval/reported"
# the number of the machine's ranks that have ended well
_ENDED = "sbeval/ended"
GONE = "The launcher of the first machine does not answer any more: look at its last output."
"""The error of ranks that lost the store: another rank of their machine may know why."""
_watch: "_Watch | None" = None
_failing = False


def several() -> bool:
    """Whether this process is one of several ranks (WORLD_SIZE above 1)."""
    return os.environ.get("WORLD_SIZE", "1").isdecimal() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first_process() -> bool:
    """Whether this process is rank 0, which prints and writes for all ranks."""
    return int(os.environ.get("RANK", "0")) == 0


def check_environment(*, meeting: bool = False) -> None:
    """Checks the environment variables that tell a process its rank, which may have been set by hand.

    Removes those of these variables from the environment that are set to "".

    Args:
        meeting: whether the ranks are about to connect to each other, so that all variables must be set.

    Raises:
        UserError: a value is not a number; or with `meeting`, a variable is missing or out of range.
    """
    remedy = "unset it, or start processes with `sbeval launch`"
    # Kubernetes sets MASTER_PORT to an address if there is a service called master: a single process ignores it
    numbers = (*_NUMBERS, "MASTER_PORT") if several() else _NUMBERS
    values = {name: os.environ[name] for name in numbers if name in os.environ}
    for name in [name for name, value in values.items() if not value]:
        del os.environ[name], values[name]
    for name, value in values.items():
        if not value.removeprefix("-").isdecimal():
            raise UserError(
                f"Expected a whole number in the environment variable {name}, found {brief(value)}: {remedy}."
            )
    if (value := os.environ.get("ACCELERATE_USE_CPU", "no")).lower() not in _TRUTHS:
        raise UserError.expected(
            "true or false in the environment variable ACCELERATE_USE_CPU", found=brief(value), remedy="unset it"
        )
    # accelerate treats any process with LOCAL_RANK as one of several
    if meeting and (several() or int(values.get("LOCAL_RANK", -1)) >= 0):
        if missing := [name for name in _MEETING if not os.environ.get(name)]:
            present = next(name for name in ("WORLD_SIZE", "LOCAL_RANK") if name in values)
            raise UserError(f"The environment has {present} but not {', '.join(missing)}: {remedy}.")
        if not 0 <= int(values["RANK"]) < int(values["WORLD_SIZE"]):
            valid_rank = f"RANK from 0 to below WORLD_SIZE={values['WORLD_SIZE']}"
            raise UserError.expected(valid_rank, found=values["RANK"], remedy=remedy)


def find_processes() -> None:
    """Makes accelerate form a process group of the launched processes on a machine without an accelerator.

    By default accelerate would treat each of them as a single process, and every process would evaluate everything.
    """
    check_environment(meeting=True)
    if several() and not importlib.import_module("torch.accelerator").is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def print_on_rank_0(text: str) -> None:
    """Prints a line on rank 0 only."""
    if is_first_process():
        print(text, flush=True)


def watch() -> None:
    """Starts the thread that polls the board, if a launcher started several ranks and has a store for them."""
    global _watch
    if _watch is None and several() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _watch = _Watch()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Marks a block, such as a collective, in which every rank waits for the others; a rank that is late is named."""
    with contextlib.nullcontext() if _watch is None else _watch.waiting():
        yield


def set_failing() -> None:
    """Records that this process ends with an error, so that it leaves without waiting in collectives."""
    global _failing
    _failing = True


def report_failure(error: BaseException, sentence: str | None) -> bool:
    """Tells the other ranks and the launcher that this rank fails.

    Args:
        error: the error.
        sentence: the message for the user, None for a bug of this package.

    Returns:
        Whether the user gets the message from elsewhere: from the launcher, or from a rank that failed before this one.
    """
    set_failing()
    if not several():
        return False
    if _watch is None:
        return sentence is not None and _write_error_file(sentence)
    message = f"{sentence or f'{type(error).__name__}: {first_line(error)}'} ({_name()})"
    elsewhere = None if isinstance(error, UserError) else _watch.failed_elsewhere(_TO_END_SECONDS)
    if elsewhere is not None:
        _report(elsewhere)
        return True
    first = _watch.post(message)
    if first != message:
        _write_error_file(first)
        return True
    return _write_error_file(message) and sentence is not None  # the traceback of a bug is printed here


def wait_for_readers() -> None:
    """Waits until other ranks have read the error of this rank, which is on the board and was printed."""
    if _watch is not None:
        time.sleep(_READ_SECONDS)


def launched() -> bool:
    """Whether `sbeval launch` started this process and prints the error of all ranks."""
    return bool(os.environ.get(LAUNCHED)) and bool(os.environ.get("TORCHELASTIC_ERROR_FILE"))


def notify_machines(address: str, port: int, sentence: str, *, machine: int, machines: int) -> None:
    """Tells the other machines, from the launcher of one machine, that the ranks have failed.

    The first machine's launcher has the store with the error. So it waits until the other launchers have the error. It
    waits 10 s at most, and 1.5 s for a machine without a rank that polls the board.

    Args:
        address: address of the first machine.
        port: port of the store on the first machine.
        sentence: the error; the ranks of other machines report it, unless the store has an earlier one.
        machine: number of this machine, from 0.
        machines: how many machines there are.
    """
    with contextlib.suppress(Exception):  # the store of the first machine's launcher may be gone
        store = _board(address, port, _TO_END_SECONDS)
        store.compare_set(_FAILED, "", sentence)
        store.set(f"{_REPORTED}/{machine}", "")
        began = time.monotonic()
        while machine == 0 and (waited := time.monotonic() - began) < _LOST_SECONDS:
            unreported = [other for other in range(machines) if not store.check([f"{_REPORTED}/{other}"])]
            if waited > _READ_SECONDS:
                unreported = [other for other in unreported if store.check([f"{_POLLS}/{other}"])]
            if not unreported:
                break
            time.sleep(_LOOK_SECONDS / 10)


@atexit.register
def _end_threads() -> None:
    """Ends the polling thread and gloo's threads: one that takes the GIL while Python exits would raise SIGABRT.

    The process group is not destroyed if this process fails: a collective may be running that no other rank will join.
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


def _report(sentence: str) -> None:
    """Passes an error of another rank to the launcher; without a launcher, local rank 0 prints it."""
    if not _write_error_file(sentence) and os.environ.get("LOCAL_RANK") == "0":
        print(sentence, file=sys.stderr, flush=True)


def _write_error_file(sentence: str) -> bool:
    """Writes an error to the launcher's error file.

    Returns:
        Whether the file was written: not if `sbeval launch` did not start this process, or the disk is full.
    """
    if not launched():
        return False
    path = os.environ["TORCHELASTIC_ERROR_FILE"]
    content = {"message": sentence, "timestamp": time.time(), "on_the_board": _watch is not None}
    part = f"{path}.{threading.get_ident()}"  # the main thread and the polling thread may both report an error
    try:
        with open(part, "w", encoding="utf-8") as error_file:
            json.dump(content, error_file)
        os.replace(part, path)  # the launcher cannot read half a file
    except OSError:
        return False
    if _watch is not None:
        _watch.acknowledge()
    return True


def _name() -> str:
    return f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, process {os.getpid()} on {socket.gethostname()}"


class _Watch:
    """The thread that polls the board, and this rank's store entries: its name, and its number of waits so far."""

    def __init__(self) -> None:
        try:
            self._store = _board(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), _LOST_SECONDS)
        except RuntimeError as error:  # the class of torch's errors of the network
            raise UserError(GONE) from error
        self._using = threading.Lock()
        self._rank, self._count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._step = 0
        self._since: float | None = None
        self._wait_seconds = _seconds_to_wait()
        self._ended, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        if threading.current_thread() is threading.main_thread():
            # Python's signal handlers do not run while the main thread waits in a collective, but even then the
            # signal's number is written to this descriptor
            signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        self._machine = os.environ.get("GROUP_RANK", "0")
        self._ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", self._count))
        self._write(f"sbeval/name/{self._rank}", _name())
        self._write(f"{_POLLS}/{self._machine}", "")
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

    def post(self, sentence: str) -> str:
        """Writes an error message on the board if the board is empty; returns the message on the board."""
        set_failing()
        with contextlib.suppress(Exception), self._using:
            return str(self._store.compare_set(_FAILED, "", sentence).decode())
        return sentence

    def acknowledge(self) -> None:
        """Tells the first machine's launcher that the launcher of this rank's machine has the error."""
        if self._using.acquire(timeout=_LOOK_SECONDS):  # another thread may wait for a store that does not answer
            with contextlib.suppress(Exception):  # the store may be gone
                self._store.set(f"{_REPORTED}/{self._machine}", "")
            self._using.release()

    def failed_elsewhere(self, seconds: float) -> str | None:
        """Waits up to `seconds` for an error of another rank on the board, which may have caused this rank's error."""
        last = time.monotonic() + seconds
        while time.monotonic() < last:
            try:
                failed = self._read(_FAILED)
            except Exception:  # the store may raise any error after its machine is gone
                return GONE
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
                self._leave()  # in this thread, since a store that does not answer blocks it
                return
            if _failing:  # the main thread ends this process
                continue
            try:
                failed = self._read(_FAILED)
                step, since = self._step, self._since
                if step != published:
                    self._write(f"sbeval/step/{self._rank}", str(step))
                    published = step
                answered = time.monotonic()
            except Exception:
                if time.monotonic() - answered > _LOST_SECONDS:
                    self._end(GONE)
                continue
            if failed is not None:
                self._end(failed)
            late: list[str] = []
            if since is not None and time.monotonic() - since > self._wait_seconds:
                with contextlib.suppress(Exception):  # the store is gone: the next look says so
                    late = self._late(step)
            if late:
                sentence = (
                    f"Ranks waited {self._wait_seconds:.0f} s for {' and '.join(late)}, which did not come: look at "
                    f"what delays it, or set {WAIT_SECONDS} to more seconds."
                )
                sentence = self.post(sentence)
                time.sleep(_READ_SECONDS)
                self._end(sentence)

    def end(self) -> None:
        """Ends the polling thread."""
        os.write(self._wakes, bytes([_ENDS_WELL]))
        self._looks.join(_LOST_SECONDS)

    def _leave(self) -> None:
        """Counts this rank as ended well. After the last rank of a machine, no launcher waits for the machine."""
        with contextlib.suppress(Exception), self._using:  # the store may be gone
            if not _failing and self._store.add(f"{_ENDED}/{self._machine}", 1) == self._ranks_here:
                self._store.set(f"{_REPORTED}/{self._machine}", "")

    def _late(self, step: int) -> list[str]:
        """Returns the names of the ranks that have not reached the wait with this number."""
        late = [rank for rank in range(self._count) if int(self._read(f"sbeval/step/{rank}") or 0) < step]
        return [self._read(f"sbeval/name/{rank}") or f"rank {rank}" for rank in late]

    def _end(self, sentence: str) -> None:
        """Ends this process, whatever it is doing, after reporting the error."""
        with contextlib.suppress(OSError):
            _report(sentence)
        # when this rank ends, the launcher ends the failed rank, which may still print its error
        time.sleep(_LOOK_SECONDS)
        os._exit(1)

    def _read(self, key: str) -> str | None:
        with self._using:
            return self._store.get(key).decode() if self._store.check([key]) else None

    def _write(self, key: str, value: str) -> None:
        with self._using:
            self._store.set(key, value)


def _seconds_to_wait() -> float:
    value = os.environ.get(WAIT_SECONDS)
    with contextlib.suppress(ValueError):
        if value is None or float(value) > 0:
            return _WAIT_SECONDS if value is None else float(value)
    raise UserError(f"Expected {WAIT_SECONDS} to be a number of seconds above 0, found {value!r}: correct it.")
