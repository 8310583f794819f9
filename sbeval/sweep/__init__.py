"""`sbeval sweep`: one suite of lm-eval runs over several checkpoints and context lengths.

- `command`: reads a sweep file, or the command line's suite and checkpoints
- `suites`: the named sets of runs
- `definition`: the settings of a sweep, and the folder and the configuration of each run
- `results`: whether a run's folder holds complete results for the run's settings
- `execute`: goes through the runs, prints progress, and returns the failures
- `attempt`: one run as a process, which ends with everything that it started
- `ray_engine`: several runs at a time, on a Ray cluster
- `follow`: checkpoints that a training writes while the sweep waits for them

Decisions:

- A sweep is a list of `sbeval run --config` commands. Each command is a process of its own, because only the end of a
  process is certain to free GPU memory. `run.yaml` and `inputs.json` in a run's folder hold its settings and inputs, so
  files show whether a run is complete. A results file is not sufficient: lm-eval writes it before the samples, and only
  logs a warning if writing the samples fails.
- There is no scheduler. Runs go one after another, or are Ray tasks; a job array (Slurm) names its runs with `--run`.
  All three call `attempt`. How a run ended is a returned `Outcome`, not an exception: Ray repeats a task that raises,
  so it repeats only runs whose node was lost. All state is in the output folder, so the driver may die.
- A whole sweep locks its output folder, and each attempt the folder of its run, with file locks (filelock). The kernel
  frees a lock when the process that holds it dies. So `--run` can execute several runs of one sweep at the same time,
  and two processes never execute the same run.
- A run replaces only the files that an interrupted attempt at the same run left: a folder whose `run.yaml` and
  `inputs.json` have the same settings and inputs, with at most one results file. These files are moved aside, neither
  continued nor deleted. Any other folder is refused: a refusal costs a minute, a lost result a night. A record and a
  log without results are overwritten, so that ten failed starts do not leave ten folders.
"""
