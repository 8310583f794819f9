"""Checkpoints that a training leaves while it goes on: each is evaluated once it is complete."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from sbeval.errors import UserError
from sbeval.foreign_files import read_json_object
from sbeval.hub_names import local_path
from sbeval.sweep.definition import Sweep, SweepCheckpoint
from sbeval.sweep.execute import Failure

_LOOK_SECONDS = 10.0
# a checkpoint without a Trainer's last file is complete when nothing has changed for so long
_SETTLED_SECONDS = 60.0
_NAME = re.compile(r"checkpoint-(\d{1,12})")
_INDEX = "model.safetensors.index.json"


def follow(sweep: Sweep, go: Callable[[Sweep], list[Failure]], *, once: bool = False) -> list[Failure]:
    """Takes the checkpoints of a sweep, and then those of the folder it follows as they are complete, through its runs.

    It goes on until it is ended, or with `once` looks once and returns the failed runs. A failed run is named and not
    tried again.

    Raises:
        UserError: the folder to follow is none.
    """
    folder = local_path(str(sweep.follow))
    if not folder.is_dir():
        raise UserError(
            f"Expected a training's folder to follow at {folder}, found none: start the training first, or correct "
            "the path."
        )
    failures = go(sweep.changed(follow=None)) if sweep.checkpoints else []
    known: set[Path] = set()
    while True:
        ready = [path for path in checkpoints_below(folder) if path not in known and is_complete(path)]
        if ready:
            checkpoints = tuple(SweepCheckpoint(pretrained=str(path)) for path in ready)
            failures += _without_deleted(go(sweep.changed(follow=None, checkpoints=checkpoints)))
            known.update(ready)
        if once:
            return failures
        if ready:
            print(f"Following {folder}; `sbeval report {sweep.output} --watch` shows the curve so far.", flush=True)
        else:
            time.sleep(_LOOK_SECONDS)


def checkpoints_below(folder: Path) -> list[Path]:
    """Returns a training's checkpoints in the order of their steps, complete or not."""
    steps = {path: match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()}
    return sorted(steps, key=lambda path: int(steps[path][1]))


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint is written to its end: its weights are whole, and a Trainer's last file is there too.

    Other programs leave no such last file; theirs is complete when nothing in it has changed for a minute.
    """
    try:
        read_json_object(checkpoint / "config.json", "a configuration")
        shards = ["model.safetensors"]
        if (checkpoint / _INDEX).is_file():
            shards = sorted(set(read_json_object(checkpoint / _INDEX, "an index")["weight_map"].values()))
        for shard in shards:
            with safe_open(checkpoint / shard, framework="numpy"):  # compares the header with the file's size
                pass
        if (checkpoint / "trainer_state.json").is_file():
            read_json_object(checkpoint / "trainer_state.json", "a Trainer's state")
            return True
        changed = max(path.stat().st_mtime for path in (checkpoint, *checkpoint.iterdir()))
    except (UserError, OSError, SafetensorError, KeyError, AttributeError, TypeError):
        return False
    return time.time() - changed > _SETTLED_SECONDS


def _without_deleted(failures: Sequence[Failure]) -> list[Failure]:
    """Names a deleted checkpoint as the reason why its run failed, since a training keeps its newest ones alone."""
    told = []
    for failure in failures:
        checkpoint = Path(failure.run.config["model_args"]["pretrained"])
        if not checkpoint.exists():
            reason = f"{checkpoint} was deleted in the meantime: have the training keep more (save_total_limit)"
            print(f"{failure.run}: {reason}", flush=True)
            failure = failure._replace(reason=reason)
        told.append(failure)
    return told
