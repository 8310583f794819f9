"""Fingerprints of runs: hashes and versions of everything that a result depends on, as named parts.

- `parts`: what is a fingerprint, and how are two of them compared?
- `checkpoint`: which files of a checkpoint are parts, and how are its weights hashed?
- `tasks`: which files and local data can the tasks of a run read?
- `evaluation`: the fingerprint of one lm-eval run: settings, checkpoints, tasks and data

A result is reused only if the fingerprint of its run has not changed. The response cache, sweeps, training, context
extension, the cached answers of LongPPL's evaluator model, and results files all compare the same parts. So none of
them can overlook a file.

- Every file in a checkpoint's folder is a part, except files known to be irrelevant (`checkpoint.NO_PART`). Hashing an
  irrelevant file costs an unnecessary run; overlooking a relevant one gives a wrong number.
- All files below the folders of a task's code are parts too, and symbolic links are followed. Logs, caches, and folders
  of results, checkpoints and report pages are left out. In a folder in which the run itself works or writes, a file
  that is not Python code is a part only if the code mentions its name or suffix.
- A part is compared by its content hash, or, for a hub id, by the commit in the hub's local cache. Folder names and
  modification times do not count. If a commit becomes known only after a download, that is not a change.
- Results without a recorded fingerprint are kept but not reused. A training run without a recorded fingerprint
  continues, since its saved training states cost days.
- Hashes of large files are cached (`sbeval.keeping.hashes`), so that weights are read once and not at every start:
  benchmarks/results/startup.md.
"""
