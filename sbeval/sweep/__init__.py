"""`sbeval sweep`: one suite of lm-eval runs over several checkpoints and context lengths.

- `command`: what do a sweep file and the command line ask for?
- `definition`: what does a sweep consist of?
- `suites`: which sets of runs have a name?
- `plan`: which folder and configuration does each run get?
- `results`: does a folder hold the results of its run, whole?
- `execute`: what runs, and what failed?
- `follow`: which checkpoints has a training left?
- `schedule`: in which order, and how far are they?
- `engine`: where do they run?
- `ray_engine`: how do they run on a cluster?
- `gpus`: which GPUs can they be given?
- `attempt`: how did one run end?
- `holder`: who else is at it, and do they live?
- `child`: how do processes end when this one is ended?
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
