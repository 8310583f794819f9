"""Atomic writes, locks, the cache folder, and content hashes of files.

- `writing`: atomic writes of files and folders, moving existing ones aside, and locks
- `cache`: the cache folder, and Arrow tables in it
- `content`: results that a process caches until the content of a file changes
- `hashes`: SHA-256 of files, cached so that a large file is not read at every start

Decisions:

- Everything that is reused between runs (tokens, token sequences, counts, answers) is in one cache folder,
  `SBEVAL_CACHE` or beside Hugging Face's datasets, in files named by the hash of their inputs. Files appear by an
  atomic rename, so processes that run at the same time need no lock to read.
- A command deletes or replaces only files that it can prove to be its own. The proof is a record in the same folder:
  the settings and inputs of a sweep's run, `run.json` of a training, a list of names and hashes of a report. Without it
  the folder is refused, or `--replace` moves it aside by one rename.
- Temporary files and folders have a unique name and are locked while their process lives. So the next command can
  remove those that a killed process left.
"""
