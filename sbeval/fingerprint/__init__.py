"""Fingerprints of runs: hashes and versions of everything that a result depends on, as named parts.

- `parts`: what is a fingerprint, and how are two of them compared?
- `checkpoint`: which files of a checkpoint are parts, and how are its weights hashed?
- `tasks`: which files and local data can the tasks of a run read?
- `evaluation`: the fingerprint of one lm-eval run: settings, checkpoints, tasks and data

A result is reused only if the fingerprint of its run has not changed. The response cache, sweeps, training, extension,
LongPPL's answers and results files all compare the same parts, so none of them can overlook a file.

- Every file in a checkpoint's folder is a part, except files known to be irrelevant (`checkpoint.NO_PART`): a file too
  many costs a run, a file too few gives a wrong number.
- All files below the folders of a task's code are parts too, through symbolic links, but not logs, caches and folders
  of results, checkpoints and pages. Of folders where the run works or writes, only files count whose name or suffix
  appears in the code.
- A part is compared by content, or by the commit of a hub id in the hub's cache; folder names and modification times do
  not count. A revision that becomes known only after a download is not a change.
- Results without a recorded fingerprint are kept but not reused. A training run without one continues, since its states
  cost days.
- Hashes of large files are cached (`sbeval.keeping.hashes`), so that weights are read once and not at every start:
  benchmarks/results/startup.md.
"""
