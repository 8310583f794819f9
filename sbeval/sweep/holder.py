"""Who is at work in a run's folder, on this machine or another, and whether they still live."""

import contextlib
import dataclasses
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from sbeval.keeping.locks import LOCK, locked
from sbeval.keeping.writing import unfinished

HEARTBEAT_SECONDS = 20.0
# a holder on another machine that has not been heard of for so long is dead
DEAD_AFTER_SECONDS = 6 * HEARTBEAT_SECONDS
# waited after taking a dead holder's lock, before looking whether another machine took it too
_SETTLING_SECONDS = 2.0
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_JOBS = (("SLURM_JOB_ID", "Slurm job"), ("PBS_JOBID", "PBS job"), ("LSB_JOBID", "LSF job"), ("RAY_JOB_ID", "Ray job"))


class HeldError(Exception):
    """A run's folder is somebody else's at the moment.

    Attributes:
        holder: who, None where the lock does not say.
        silent_seconds: time since the holder was last heard of.
    """

    def __init__(self, holder: "Holder | None", silent_seconds: float) -> None:
        super().__init__(str(holder or "another process"))
        self.holder, self.silent_seconds = holder, silent_seconds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that holds a run's folder, as its lock names it.

    Attributes:
        host: its machine's name.
        machine: what tells its processes from those of other machines and containers.
        process: its number there.
        started: when it was started, in clock ticks since the machine was.
        job: the batch system's job it belongs to, None outside of one.
        claim: a name of this one claim.
    """

    host: str
    machine: str
    process: int
    started: int | None
    job: str | None
    claim: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}" + (f" ({self.job})" if self.job else "")

    @classmethod
    def this_process(cls) -> Self:
        """Returns this process's record."""
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            process=os.getpid(),
            started=_started(os.getpid()),
            job=_job(),
            claim=uuid4().hex,
        )

    def lives(self, silent_seconds: float) -> bool:
        """Whether it lives: on this machine its process is looked up, on another its last sign of life counts."""
        if self.machine != _machine():
            return silent_seconds < DEAD_AFTER_SECONDS
        if self.started is not None:
            return _started(self.process) == self.started
        try:
            os.kill(self.process, 0)
        except OSError as error:
            return error.errno == errno.EPERM
        return True


def read_holder(lock: Path) -> Holder | None:
    """Returns whom a lock names, None where there is none or it names nobody."""
    try:
        found = json.loads(lock.read_bytes())
        return Holder(**found) if isinstance(found, dict) and isinstance(found.get("process"), int) else None
    except (OSError, ValueError, TypeError):
        return None


@contextlib.contextmanager
def holding(folder: Path, lost: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """Holds a run's folder while the block runs and this process lives.

    The lock appears whole, by a link, which only one machine can make on any shared file system. Wherever a kernel's
    lock on it reaches, that decides between processes. A dead holder's lock is taken over.

    Args:
        folder: what is held; made where it is missing.
        lost: called where another machine took the folder over, as from a process that was stopped for too long.

    Raises:
        HeldError: a living process holds it.
        OSError: it cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock, own = folder / LOCK, Holder.this_process()
    done = threading.Event()
    with unfinished(lock) as part:
        part.write_text(json.dumps(dataclasses.asdict(own)), encoding="utf-8")
        _claim(part, lock, own)
    with lock.open("rb") as held:
        locked(held.fileno())
        threading.Thread(target=_beat, args=(held.fileno(), lock, own, done, lost), daemon=True).start()
        try:
            yield
        finally:
            done.set()
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(held.fileno()), lock.stat()):
                    lock.unlink()


def _claim(part: Path, lock: Path, own: Holder) -> None:
    while True:
        with contextlib.suppress(FileExistsError):
            _make(part, lock)
            return
        try:
            found = os.open(lock, os.O_RDWR)
        except FileNotFoundError:  # given up this moment
            continue
        try:
            # both times are the file system's, whatever clocks the machines have
            silent_seconds = max(0.0, part.stat().st_mtime - os.fstat(found).st_mtime)
            holder = read_holder(lock)
            if not locked(found) or (holder is not None and holder.lives(silent_seconds)):
                raise HeldError(holder, silent_seconds)
            with contextlib.suppress(FileNotFoundError):
                if not os.path.samestat(os.fstat(found), lock.stat()):
                    continue  # another process was faster
            part.rename(lock)
        finally:
            os.close(found)
        if holder is not None and holder.machine != own.machine:
            time.sleep(_SETTLING_SECONDS)
            if (now := read_holder(lock)) is None or now.claim != own.claim:
                raise HeldError(now, 0.0)
        return


def _make(part: Path, lock: Path) -> None:
    try:
        os.link(part, lock)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with lock.open("xb") as file:  # a file system without links, which only one machine has mounted
            file.write(part.read_bytes())


def _beat(descriptor: int, lock: Path, own: Holder, done: threading.Event, lost: Callable[[], Any]) -> None:
    while not done.wait(HEARTBEAT_SECONDS):
        now = read_holder(lock)
        if now is not None and now.claim != own.claim:
            lost()
            return
        with contextlib.suppress(OSError):  # a file system that is away for a moment
            os.utime(descriptor)


def _job() -> str | None:
    job = next((f"{kind} {os.environ[name]}" for name, kind in _JOBS if os.environ.get(name)), None)
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}") for name in ("JOB_ID", "TASK_ID"))
    return f"Slurm job {array}_{task}" if array and task else job


def _machine() -> str:
    """Returns a name that processes share if they share process numbers: one boot and one container."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(process: int) -> int | None:
    """Returns when a process started, None if it is not found, or ended and is not yet reaped."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])
