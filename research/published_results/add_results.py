"""Adds what was run later to the archive of the experiment.

    python -m research.published_results.add_results docs/results/extrapolation/results.tar.xz NEW.tar.gz

Evaluations replace earlier ones of the same scheme and task, MQRAR runs stand beside the earlier ones, training records
are added, a new `training_speed.json` replaces the old one, and the ledger and the rest lie under
`additions/<number>/`.
`write_pages.py` then writes the pages again.
"""

import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from sbeval.corpora.archives import unpack


def add(whole: Path, new: Path) -> None:
    """Merges the unpacked archive `new` into the unpacked archive `whole`."""
    for file in sorted(new.glob("results/*/*/results_*.json")):
        scheme = file.parents[1].name
        for task in json.loads(file.read_text(encoding="utf-8"))["results"]:
            _drop(whole / "results" / scheme, task)
        target = whole / "results" / scheme / file.parent.name
        target.mkdir(parents=True, exist_ok=True)
        for part in (file, *file.parent.glob(f"samples_*_{file.stem.removeprefix('results_')}.jsonl")):
            shutil.copy(part, target)
    for folder in ("mqrar", "records"):
        (whole / folder).mkdir(exist_ok=True)
    for file in sorted(new.glob("recall/mqrar/*.json")):
        _add_runs(whole / "mqrar" / file.name, json.loads(file.read_text(encoding="utf-8")))
    for file in sorted(new.glob("records/*.json")):
        shutil.copy(file, whole / "records")
    addition = whole / "additions" / str(1 + len(list(whole.glob("additions/*"))))
    addition.mkdir(parents=True)
    for file in sorted(new.glob("*.*")):
        shutil.copy(file, addition)
    if (new / "recall" / "jobs.jsonl").is_file():
        shutil.copy(new / "recall" / "jobs.jsonl", addition / "recall_jobs.jsonl")
    if (new / "training_speed.json").is_file():
        shutil.copy(new / "training_speed.json", whole)


def _add_runs(table: Path, runs: list[dict[str, Any]]) -> None:
    """Adds MQRAR runs to a table of the same name: a later one may have been given less time."""
    earlier = json.loads(table.read_text(encoding="utf-8")) if table.is_file() else []
    every = [*earlier, *(run for run in runs if run not in earlier)]
    table.write_text(json.dumps(every, indent=1), encoding="utf-8")


def _drop(scheme: Path, task: str) -> None:
    for file in scheme.glob("*/results_*.json"):
        if list(json.loads(file.read_text(encoding="utf-8"))["results"]) == [task]:
            date = file.stem.removeprefix("results_")
            for samples in file.parent.glob(f"samples_{task}_{date}.jsonl"):
                samples.unlink()
            file.unlink()
            if not any(file.parent.iterdir()):
                file.parent.rmdir()


def main(archive: Path, news: list[Path]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        with tarfile.open(archive) as packed:
            unpack(packed, whole)
        for number, new in enumerate(news):
            unpacked = Path(folder) / str(number)
            with tarfile.open(new) as packed:
                unpack(packed, unpacked)
            add(whole, unpacked)
        temporary = archive.with_suffix(".partial")
        with tarfile.open(temporary, "w:xz", preset=9) as packed:
            for entry in sorted(whole.iterdir()):
                packed.add(entry, entry.name)
        temporary.replace(archive)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
