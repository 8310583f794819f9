"""Kills every command that writes, at random moments, and counts what was lost.

    python tests/kills/kills.py [--kills 50] [--seed 0] [COMMAND...]

Half of the kills come at a random moment of the time the command takes, half right before a random one of the files
and folders it makes, renames or removes. Between two kills the same command is run again; after five it is let run to
its end, and what it leaves is compared with what an undisturbed run leaves. Moments are counted from the import of
sbeval on; what Python says that is ended before that is its own. One line a command: kills, and how many
of them lost something, changed something, showed a traceback, hung, left a process, or ended with a wrong exit code.
"""

import argparse
import collections
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from killed_commands import COMMANDS, Command

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
SECONDS_TO_END = 60.0
KILLS_OF_A_FOLDER = 5
TROUBLES = ("lost", "changed", "traceback", "hang", "orphan", "exit code")
_AS_SBEVAL = Path(__file__).with_name("as_sbeval.py")


class Kills:
    """Kills of one command, with all work in a folder, at moments by a seed."""

    def __init__(self, command: Command, folder: Path, seed: int) -> None:
        self.command, self.folder, self.random = command, folder, random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.said: list[str] = []
        folder.mkdir()
        self._begin()
        began = time.monotonic()
        self._finish(expected=None)
        self.seconds = time.monotonic() - began
        self.expected = command.left(self.work)
        self.writes = int((folder / "writes").read_text())
        assert self.expected, "an undisturbed run leaves nothing"
        shutil.rmtree(self.work)

    def kill(self, times: int) -> None:
        while self.counts["kills"] < times:
            self._begin()
            for _ in range(min(KILLS_OF_A_FOLDER, times - self.counts["kills"])):
                if not self._kill():
                    break
            else:
                self._finish(self.expected)
            shutil.rmtree(self.work)

    def _begin(self) -> None:
        self.work = self.folder / "work"  # one path, since it stands in what is compared
        self.work.mkdir()
        self.command.prepare(self.work)
        self.before = self.command.left(self.work)

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        return environment | {"SBEVAL_CACHE": str(self.work / "cache"), "SBEVAL_KILLS": str(self.folder)}

    def _words(self, moment: str) -> list[str]:
        return [sys.executable, str(_AS_SBEVAL), moment, *self.command.arguments(self.work)]

    def _start(self, moment: str) -> subprocess.Popen[bytes]:
        environment, words = self._environment(), self._words(moment)
        began = self.folder / "began"
        began.unlink(missing_ok=True)
        with (self.folder / "output").open("wb") as output:
            process = subprocess.Popen(
                words, env=environment, stdout=output, stderr=subprocess.STDOUT, process_group=0, cwd=self.folder
            )
        while not began.exists() and process.poll() is None:
            time.sleep(0.001)
        return process

    def _finish(self, expected: dict[str, str] | None) -> None:
        process = self._start("-")
        try:
            code = process.wait(20 * SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._trouble("hang", "the run after the kills")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return
        printed = (self.folder / "output").read_text(errors="replace")
        if code != 0:
            assert expected is not None, printed
            self._trouble("lost", f"the run after the kills ended with {code}: {printed[-2000:]}")
        if expected is not None and (found := self.command.left(self.work)) != expected:
            kind = "lost" if expected.keys() - found.keys() else "changed"
            self._trouble(kind, f"in the end {differing(found, expected)}")

    def _kill(self) -> bool:
        """Returns whether the command was killed and has more to do; one that ended is only compared."""
        number = self.random.choice(SIGNALS)
        by_time = self.random.random() < 0.5 or self.command.workers
        write, seconds = self.random.randint(1, max(1, self.writes)), self.random.uniform(0, self.seconds)
        process = self._start("-" if by_time else f"{write}:{int(number)}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds if by_time else 20 * SECONDS_TO_END)
        workers = [other for other in self._others() if other != process.pid] if self.command.workers else []
        if self.command.workers and not workers:
            process.wait()
            return False
        for target in workers if self.command.workers else [process.pid] if by_time else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, number)
        moment = f"{number.name} after {seconds:.2f} s" if by_time else f"{number.name} at write {write}"
        try:
            code = process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._trouble("hang", moment)
        self._end_orphans(moment)
        code = process.wait()
        found = self.command.left(self.work)
        if code == 0:
            if found != self.expected:
                self._trouble("changed", f"not killed, {differing(found, self.expected)}")
            return False
        self.counts["kills"] += 1
        printed = (self.folder / "output").read_text(errors="replace")
        if "Traceback" in printed or "Exception ignored" in printed:
            self._trouble("traceback", f"{moment}: {printed[-3000:]}")
        # a process that is ended before it heeds signals has the same code in a shell
        if code not in ((1,) if workers else (-number, 128 + number)):
            self._trouble("exit code", f"{moment}: {code}: {printed[-2000:]}")
        if missing := self.before.keys() - found.keys():
            self._trouble("lost", f"{moment}: {sorted(missing)}")
        for name, value in found.items():
            if value not in (self.before.get(name), self.expected.get(name)):
                self._trouble("changed", f"{moment}: {name}")
        return found != self.expected

    def _end_orphans(self, moment: str) -> None:
        left, end = self._others(), time.monotonic() + 5
        while left and time.monotonic() < end:
            time.sleep(0.1)
            left = self._others()
        for process in left:
            self._trouble("orphan", f"{moment}: {process}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _others(self) -> list[int]:
        """Processes that the command has started, itself among them, by a variable of their environment."""
        mark = f"SBEVAL_KILLS={self.folder}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in entry.read_bytes().split(b"\0"):
                    found.append(int(entry.parent.name))
        return found

    def _trouble(self, kind: str, words: str) -> None:
        self.counts[kind] += 1
        self.said.append(f"{self.command.name}: {kind}: {words}")


def differing(found: dict[str, str], expected: dict[str, str]) -> str:
    names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    return ", ".join(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)}; all by default")
    parser.add_argument("--kills", type=int, default=50, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # a shell that starts this in the background has it, and every command it starts, ignore a signal
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    troubles = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in options.commands or COMMANDS:
            kills = Kills(COMMANDS[name], Path(folder, name), options.seed)
            for times in range(KILLS_OF_A_FOLDER, options.kills + KILLS_OF_A_FOLDER, KILLS_OF_A_FOLDER):
                kills.kill(min(times, options.kills))
                shown = ", ".join(f"{kills.counts[kind]} {kind}" for kind in TROUBLES)
                print("\n".join(kills.said), file=sys.stderr)
                print(f"{name}: {kills.counts['kills']} kills: {shown}", flush=True)
                kills.said.clear()
            troubles += kills.counts.total() - kills.counts["kills"]
    sys.exit(troubles > 0)


if __name__ == "__main__":
    main()
