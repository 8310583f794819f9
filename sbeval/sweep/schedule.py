"""Takes runs through an engine, longest first, and says how far they are."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sbeval.keeping.locks import LOCK
from sbeval.results.digits import time_text
from sbeval.settings import as_counts
from sbeval.sweep.attempt import Outcome
from sbeval.sweep.engine import Engine
from sbeval.sweep.holder import DEAD_AFTER_SECONDS, Holder, read_holder
from sbeval.sweep.plan import PlannedRun

_REPORT_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_LOG_TAIL_BYTES = 4096
_SHARE = re.compile(rb"(\d{1,3})%\|")
# what counts for a run without a limit, lengths or a folder of weights
_DOCUMENTS, _LENGTH_TOKENS, _WEIGHTS_BYTES = 1000, 2048, 1


def longest_first(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Returns runs in the order in which they should start: most GPUs first, so that they need not wait for several."""
    return sorted(runs, key=lambda run: (-(run.gpus or 0), -relative_work(run)))


def relative_work(run: PlannedRun) -> float:
    """Returns how much work a run is, next to others of its sweep: weights times tokens of its documents."""
    metadata, arguments = run.config["metadata"], run.config["model_args"]
    limit = run.config.get("limit") or _DOCUMENTS
    documents = limit if limit >= 1 else limit * _DOCUMENTS
    tokens = _LENGTH_TOKENS
    for given in (arguments.get("max_length"), metadata.get("context_lengths")):
        with contextlib.suppress(ValueError):  # the task says what is wrong with them
            tokens = sum(as_counts(given))
    return float(documents * tokens * _weights_bytes(Path(str(arguments["pretrained"])).expanduser()))


def _weights_bytes(folder: Path) -> int:
    try:
        sizes = (entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith((".safetensors", ".bin")))
        return max(_WEIGHTS_BYTES, sum(sizes))
    except OSError:  # a hub id
        return _WEIGHTS_BYTES


def go_through(
    runs: Sequence[PlannedRun], engine: Engine, say: Callable[[PlannedRun, str], None]
) -> Iterator[tuple[PlannedRun, Outcome]]:
    """Takes every run through an engine and yields how it ended.

    What somebody else holds is looked at again at the end: by then it is complete, or given up, or its holder shows
    that it lives.

    Args:
        runs: in the order in which they should start.
        engine: what runs them; ended where this is left early.
        say: prints a line about a run.
    """
    progress = _Progress(runs, engine)
    again: list[PlannedRun] = []
    try:
        for run, outcome in _once(list(runs), engine, say, progress):
            if outcome.state == "held":
                say(run, f"held by {outcome.reason}; looked at again at the end")
                again.append(run)
            else:
                yield run, outcome
        for run, outcome in _once(again, engine, say, progress) if again else ():
            if outcome.state == "held" and _given_up(run):
                yield from _once([run], engine, say, progress)
            else:
                yield run, outcome
    finally:
        engine.end()


def _once(
    waiting: list[PlannedRun], engine: Engine, say: Callable[[PlannedRun, str], None], progress: "_Progress"
) -> Iterator[tuple[PlannedRun, Outcome]]:
    running = 0
    while waiting or running:
        for run in list(waiting):
            if engine.has_room(run):
                waiting.remove(run)
                running += 1
                say(run, f"{engine.begins}, log in {run.log_file}")
                engine.start(run)
        ended = engine.ended(_REPORT_SECONDS)
        running -= len(ended)
        for run, outcome in ended:
            progress.end(run, outcome)
            if outcome.state != "held":
                say(run, f"{_ENDED[outcome.state]} after {outcome.seconds:.0f} s{progress.left()}")
            yield run, outcome
        if not ended:
            progress.show()


_ENDED = {"done": "done", "complete": "complete", "failed": "failed", "interrupted": "failed"}


class _Progress:
    """How far the runs of a sweep are, and how long they will take.

    Args:
        runs: all of them.
        engine: how many of them run at a time.
    """

    def __init__(self, runs: Sequence[PlannedRun], engine: Engine) -> None:
        self._engine = engine
        self._work = {str(run): relative_work(run) for run in runs}
        self._left = {str(run): run for run in runs}
        self._done = (0.0, 0.0)

    def end(self, run: PlannedRun, outcome: Outcome) -> None:
        self._left.pop(str(run), None)
        if outcome.state == "done":
            work, seconds = self._done
            self._done = (work + self._work[str(run)], seconds + outcome.seconds)

    def left(self) -> str:
        """Returns ", about 3 min left"; nothing where none ended yet, or none is left."""
        work, seconds = self._done
        if not self._left or not work:
            return ""
        whole = {name: self._work[name] / work * seconds for name in self._left}
        left = [max(0.0, whole[name] - (_seconds_at_it(run) or 0.0)) for name, run in self._left.items()]
        # no sooner than the longest of them alone
        return f", about {time_text(max(sum(left) / max(1, min(self._engine.at_a_time, len(left))), *left))} left"

    def show(self) -> None:
        running = [run for run in self._left.values() if _seconds_at_it(run) is not None]
        named = f" ({', '.join(map(_how_far, running))})" if running else ""
        waiting = len(self._left) - len(running)
        print(f"    {len(running)} running{named}, {waiting} waiting{self.left()}", flush=True)


def _seconds_at_it(run: PlannedRun) -> float | None:
    """Returns how long somebody has been at a run, on whatever machine; None where nobody is."""
    if read_holder(run.folder / LOCK) is None:
        return None
    try:
        return max(0.0, time.time() - run.config_file.stat().st_mtime)
    except OSError:
        return 0.0


def _how_far(run: PlannedRun) -> str:
    """Returns a run with the share of its last progress bar, and its machine if that is another one."""
    try:
        with run.log_file.open("rb") as log:
            log.seek(max(0, run.log_file.stat().st_size - _LOG_TAIL_BYTES))
            shares = _SHARE.findall(log.read())
    except OSError:
        shares = []
    holder = read_holder(run.folder / LOCK)
    elsewhere = holder is not None and holder.machine != Holder.this_process().machine
    place = [f"on {holder.host}"] if holder and elsewhere else []
    return " ".join([str(run), *place, *(f"{share.decode()}%" for share in shares[-1:])])


def _given_up(run: PlannedRun) -> bool:
    """Waits until a run's holder gives a sign of life or is dead; returns whether the run is free now."""
    lock = run.folder / LOCK
    first, last = _sign_of_life(lock), time.monotonic() + DEAD_AFTER_SECONDS
    while (now := _sign_of_life(lock)) == first and first is not None:
        holder = read_holder(lock)
        if holder is None or holder.machine == Holder.this_process().machine:
            return holder is not None and not holder.lives(0.0)
        if time.monotonic() > last:
            return True
        time.sleep(_LOOK_SECONDS)
    return now is None


def _sign_of_life(lock: Path) -> int | None:
    try:
        return lock.stat().st_mtime_ns
    except OSError:
        return None
