"""`sbeval sweep`: one suite of lm-eval runs over several checkpoints and context lengths.

- `definition` is what a sweep consists of, `suites` the sets of runs that have a name.
- `command` reads a sweep file or the command line.
- `plan` turns the sweep into runs, each a folder and a configuration of `sbeval run`.
- `results` says whether a folder already holds the results of its run, whole.
- `execute` starts the runs one after another, each in a process of its own, and names those that failed.
"""

from sbeval.sweep.command import load_sweep, sweep_from_command
from sbeval.sweep.definition import Sweep, SweepCheckpoint, SweepRun
from sbeval.sweep.execute import run_sweep
from sbeval.sweep.suites import SUITES, suite_runs

__all__ = [
    "SUITES",
    "Sweep",
    "SweepCheckpoint",
    "SweepRun",
    "load_sweep",
    "run_sweep",
    "suite_runs",
    "sweep_from_command",
]
