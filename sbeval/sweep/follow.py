"""Follows a running training: evaluates each checkpoint in its folder as soon as the checkpoint is complete."""

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
# a checkpoint without trainer_state.json counts as complete if none of its files has changed for this time
_SETTLED_SECONDS = 60.0
_NAME = re.compile(r"checkpoint-(\d{1,12})")
_INDEX = "model.safetensors.index.json"


def follow(sweep: Sweep, go: Callable[[Sweep], list[Failure]], *, once: bool = False) -> list[Failure]:
    """Evaluates the checkpoints that a sweep lists, then those that a training writes to the folder `sweep.follow`.

    The function runs until it is interrupted; with `once` it looks at the folder only once. A failed run is printed and
    not tried again.

    Args:
        sweep: the sweep.
        go: runs a sweep and returns its failed runs.
        once: whether to return after one look at the folder.

    Returns:
        The failed runs.

    Raises:
        UserError: the folder to follow does not exist.
    """
    folder = local_path(str(sweep.follow))
    if not folder.is_dir():
        raise UserError(
            f"There is no training folder to follow at {folder}: start the training first, or correct the path."
        )
    failures = go(sweep.changed(follow=None)) if sweep.checkpoints else []
    evaluated: set[Path] = set()
    while True:
        ready = [path for path in checkpoints_below(folder) if path not in evaluated and is_complete(path)]
        if ready:
            checkpoints = tuple(SweepCheckpoint(pretrained=str(path)) for path in ready)
            failures += _explain_deleted(go(sweep.changed(follow=None, checkpoints=checkpoints)))
            evaluated.update(ready)
        if once:
            return failures
        if ready:
            print(f"Following {folder}; `sbeval report {sweep.output} --watch` shows the curve so far.", flush=True)
        else:
            time.sleep(_LOOK_SECONDS)


def checkpoints_below(folder: Path) -> list[Path]:
    """Returns the folders `checkpoint-STEP` of a training in the order of their steps, complete or not."""
    steps = {path: match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()}
    return sorted(steps, key=lambda path: int(steps[path][1]))


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint has been written completely.

    Its weights must be complete, and `trainer_state.json`, which a Trainer writes last, must exist. Programs without a
    Trainer do not write that file; their checkpoint is complete if none of its files has changed for a minute.
    """
    try:
        read_json_object(checkpoint / "config.json", "a configuration")
        shards = ["model.safetensors"]
        if (checkpoint / _INDEX).is_file():
            shards = sorted(set(read_json_object(checkpoint / _INDEX, "an index")["weight_map"].values()))
        for shard in shards:
            with safe_open(checkpoint / shard, framework="numpy"):  # opening compares the header with the file's size
                pass
        if (checkpoint / "trainer_state.json").is_file():
            read_json_object(checkpoint / "trainer_state.json", "a Trainer's state")
            return True
        changed = max(path.stat().st_mtime for path in (checkpoint, *checkpoint.iterdir()))
    except (UserError, OSError, SafetensorError, KeyError, AttributeError, TypeError):
        return False
    return time.time() - changed > _SETTLED_SECONDS


def _explain_deleted(failures: Sequence[Failure]) -> list[Failure]:
    """Changes the reason of runs whose checkpoint was deleted: a training may keep only its newest checkpoints."""
    explained = []
    for failure in failures:
        checkpoint = Path(failure.run.config["model_args"]["pretrained"])
        if not checkpoint.exists():
            reason = f"{checkpoint} was deleted in the meantime: let the training keep more (save_total_limit)"
            print(f"{failure.run}: {reason}", flush=True)
            failure = failure._replace(reason=reason)
        explained.append(failure)
    return explained
