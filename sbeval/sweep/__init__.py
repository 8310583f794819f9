"""`sbeval sweep`: one suite of lm-eval runs over several checkpoints and context lengths.

- `command`: what do a sweep file and the command line ask for?
- `suites`: which sets of runs have a name?
- `definition`: what does a sweep consist of, and which folder and settings does each run get?
- `results`: does a folder hold the results of its run, whole?
- `execute`: what runs, and what failed?
- `attempt`: how does one run end, and what it started with it?
- `ray_engine`: how do several run at a time?
- `follow`: which checkpoints has a training left?
"""
