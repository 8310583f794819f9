"""`sbeval sweep`: one suite of lm-eval runs over several checkpoints and context lengths.

- `command` reads the command line, `settings` is what a sweep file says, `suites` the sets of runs that have a name.
- `plan` turns both into runs, each a folder and a configuration of `sbeval run`.
- `results` says whether a folder already holds the results of its run, whole.
- `execute` starts the runs one after another, each in a process of its own, and names those that failed.
"""

from sbeval.sweep.command import sweep_from_command
from sbeval.sweep.execute import run_sweep
from sbeval.sweep.settings import CheckpointSettings, RunSettings, SweepSettings, load_sweep
from sbeval.sweep.suites import SUITES, suite_runs

__all__ = [
    "SUITES",
    "CheckpointSettings",
    "RunSettings",
    "SweepSettings",
    "load_sweep",
    "run_sweep",
    "suite_runs",
    "sweep_from_command",
]
