"""The folder of a sweep's run, damaged and looked at by a sweep over it and another.

A run is complete (equal), or it is to be run or refused with a word of why (named); the other run is complete whatever
becomes of the first. What a results file says that is whole, the report shows.
"""

import contextlib
import functools
import io
import shutil
import sys
import tempfile
from pathlib import Path
from random import Random

from sbeval.sweep.definition import Sweep, SweepCheckpoint, SweepRun
from sbeval.sweep.execute import run_sweep
from tests.fuzz.mutations import changed_bytes, damage, put_in_place_of
from tests.fuzz.outcomes import Silent
from tests.support import sweep_launcher

NAMES = ["results", "samples", "inputs.json", "run.yaml", "log.txt"]


def _sweep(folder: Path) -> Sweep:
    return Sweep(
        checkpoints=(SweepCheckpoint(pretrained="one"), SweepCheckpoint(pretrained="two")),
        runs=(SweepRun(name="t", tasks=("t",)),),
        output=str(folder),
        launcher=(sys.executable, str(sweep_launcher.__file__), "write"),
    )


def _said(folder: Path, *, dry_run: bool) -> str:
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")) as printed:
        run_sweep(_sweep(folder), dry_run=dry_run)
        printed.seek(0)
        return printed.read()


@functools.cache
def undamaged() -> Path:
    """Runs a sweep of two runs once."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-")) / "results"
    _said(folder, dry_run=False)
    return folder


def fuzz(what: str, rng: Random, folder: Path) -> str:
    """One damaged file of one run."""
    copy = shutil.copytree(undamaged(), folder / "results")
    (file,) = (copy / "one").rglob(f"{what}*")
    if file.suffix == ".json":
        damage(file, rng)
    elif rng.random() < 0.7:
        file.write_bytes(changed_bytes(file.read_bytes(), rng))
    else:
        put_in_place_of(file, rng)
    said = _said(copy, dry_run=True)
    if "[2/2] two/t: complete" not in said:
        raise Silent(f"the other run is not complete: {said}")
    return "equal" if "[1/2] one/t: complete" in said else "named"
