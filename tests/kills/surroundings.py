"""Runs every command that writes in odd surroundings, and counts what was lost.

    python tests/kills/surroundings.py [COMMAND...]

A disk full from a write on, early, in the middle and late; a disk that takes no large file; no home; no folder for
temporary files; little memory; few open files; a working folder that was deleted; variables of the environment that
say nothing; a clock an hour back; a disk of 20 MB; a standard output that nobody reads after its first line; another
process of the same command at the same time. In each a command does its work or ends with one sentence and exit code 1;
what is there then is the old or the new, and the same command run again leaves what an undisturbed run leaves. One line
a command, as `kills.py` has it.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from killed_commands import COMMANDS
from kills import TROUBLES, Kills

NOWHERE = f"{os.devnull}/none"
_HOMES = ("SBEVAL_CACHE", "HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "TRITON_CACHE_DIR")
_SECONDS = 900
_LEFT = "SBEVAL_KILLS_LEFT"
_ODD = (
    *("SBEVAL_CACHE=~nobodyxx/a", f"SBEVAL_CACHE={NOWHERE}", f"TMPDIR={NOWHERE}", f"HF_HOME={NOWHERE}", "TZ=nope"),
    *("WORLD_SIZE=2", "WORLD_SIZE=abc", "RANK=x", "LOCAL_RANK=x", "ACCELERATE_USE_CPU=2", "OMP_NUM_THREADS=x"),
    *("LOGLEVEL=nope", "PYTHONIOENCODING=ascii", "COLUMNS=1"),
)
_TRACEBACK = re.compile("Traceback|Exception ignored|Fatal Python error")
_SENTENCE = re.compile(r"[^\n]: [^\n]+[.]$")  # ends with what to do


class Surroundings(Kills):
    """Odd surroundings of one command; see `Kills`."""

    def visit(self, only: str) -> Iterator[str]:
        """Runs the command in each whose name holds `only`, and yields that name."""
        for name, moment, changed in self._places():
            if only in name:
                self.visit_one(name, moment, changed)
                yield name
        if only in "another process":
            self.visit_one("another process", "-", {}, processes=2)
            yield "another process"
        if only in "nobody reads":
            self.visit_one("nobody reads", "-", {}, read=False)
            yield "nobody reads"

    def _places(self) -> Iterator[tuple[str, str, dict[str, str]]]:
        for write in sorted({1, *(max(1, self.writes * sixth // 6) for sixth in range(1, 7))}):
            yield f"full from write {write}", f"{write}:full", {}
        for size_bytes in (0, 500, 20_000, 500_000):
            yield f"no file beyond {size_bytes} bytes", f"{size_bytes}:size", {}
        yield "no home", "-", {"HOME": NOWHERE, **dict.fromkeys(_HOMES, "")}
        yield "no temporary folder", "0:temporary", {}
        yield "a folder that was deleted", "0:deleted", {}
        yield "64 open files", "64:files", {}
        for mebibytes in (600, 1500, 3000):  # with less, Python itself and OpenBLAS end in words of their own
            yield f"{mebibytes} MiB of memory", f"{mebibytes}:memory", {}
        for variable, _, value in map(lambda pair: pair.partition("="), _ODD):
            yield f"{variable}={value}", "-", {variable: value}

        for library in Path("/usr/lib").glob("*/faketime/libfaketime.so.1"):  # Debian's package faketime
            clock = {"LD_PRELOAD": str(library), "FAKETIME": "-1h", "DONT_FAKE_MONOTONIC": "1"}
            yield "a clock an hour back, after a kill", "-", clock
        for kibibytes in (0, 100, 5_000, 10_000) if os.geteuid() == 0 else ():
            yield f"a disk of 20 MB with {kibibytes} KiB left", "-", {_LEFT: str(kibibytes)}

    @contextlib.contextmanager
    def _small_disk(self, left: str | None) -> Iterator[None]:
        """Has all work lie on a tmpfs of 20 MB meanwhile, of which so many KiB are left."""
        if left is None:
            yield
            return
        aside, ballast = self.work.rename(self.folder / "aside"), self.work / "ballast"
        self.work.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", self.work], check=True)
        try:
            shutil.copytree(aside, self.work, dirs_exist_ok=True)
            ballast.write_bytes(bytes(max(0, shutil.disk_usage(self.work).free - 1024 * int(left))))
            yield
            ballast.unlink()
            shutil.rmtree(aside)
            shutil.copytree(self.work, aside)
        finally:
            subprocess.run(["umount", self.work], check=True)
            self.work.rmdir()
            aside.rename(self.work)

    def _started(self, moment: str, changed: dict[str, str]) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in (self._environment() | changed).items() if value}
        return subprocess.Popen(
            self._words(moment),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if moment != "-" or changed else subprocess.PIPE,
            process_group=0,
            cwd=self.folder,
        )

    def visit_one(
        self, name: str, moment: str, changed: dict[str, str], *, processes: int = 1, read: bool = True
    ) -> None:
        """Runs the command in one of them, and once more where it could not do its work."""
        self._begin()
        self.counts["surroundings"] += 1
        if "after a kill" in name:
            self._started(f"{self.writes // 2}:9", {}).communicate()
        with self._small_disk(changed.get(_LEFT)):
            started = [self._started(moment, changed) for _ in range(processes)]
            for process in started:
                if not read and process.stdout is not None:
                    process.stdout.readline()
                    process.stdout.close()
                    process.stdout = None
            for process in started:
                self._check(name, process, silent=not read)
            self._end_orphans(name)
        found = self.command.left(self.work)
        if missing := self.before.keys() - found.keys():
            self._trouble("lost", f"{name}: {sorted(missing)}")
        for key, value in found.items():
            if value not in (self.before.get(key), self.expected.get(key)):
                self._trouble("changed", f"{name}: {key}")
        if found != self.expected:
            self._finish(self.expected)
        shutil.rmtree(self.work)

    def _check(self, name: str, process: subprocess.Popen[bytes], *, silent: bool) -> None:
        try:
            said = b"".join(filter(None, process.communicate(timeout=_SECONDS))).decode(errors="replace")
        except subprocess.TimeoutExpired:
            self._trouble("hang", name)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return
        if _TRACEBACK.search(said):
            self._trouble("traceback", f"{name}: {said[-3000:]}")
        if process.returncode not in (0, 1):
            self._trouble("exit code", f"{name}: {process.returncode}: {said[-2000:]}")
        if process.returncode == 1 and not silent and not _SENTENCE.search(said.rstrip()):
            self._trouble("exit code", f"{name}: no sentence: {said[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)}; all by default")
    parser.add_argument("--only", default="", help="those surroundings alone whose names hold this")
    options = parser.parse_args()
    troubles = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in options.commands or COMMANDS:
            visited = Surroundings(COMMANDS[name], Path(folder, name), 0)
            for surrounding in visited.visit(options.only):
                print("\n".join([*visited.said, f"{name} in {surrounding}"]), file=sys.stderr)
                visited.said.clear()
            shown = ", ".join(f"{visited.counts[kind]} {kind}" for kind in TROUBLES)
            print(f"{name}: {visited.counts['surroundings']} surroundings: {shown}", flush=True)
            troubles += visited.counts.total() - visited.counts["surroundings"]
    sys.exit(troubles > 0)


if __name__ == "__main__":
    main()
