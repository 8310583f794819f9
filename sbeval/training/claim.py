"""How a training run claims its output folder: it locks the folder and writes its settings to `run.json`.

It may claim a folder that is new or empty, or that holds either the same run or a run that failed before it saved its
first state (a checkpoint from which the Trainer can resume).
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sbeval.checkpoints.files import Weights
from sbeval.errors import UserError
from sbeval.foreign_files import read_json_object
from sbeval.keeping.writing import LOCK, alone_in, is_unfinished, set_aside, whole_file, write_errors_explained
from sbeval.processes.ranks import check_environment, is_first_process
from sbeval.training.record import OTHER_FOLDER, full_disk_named
from sbeval.training.trainer import holds_states

OTHER_OR_REPLACE = "choose another --out, or move what is there aside with --replace"


@contextlib.contextmanager
def claimed(
    out: Path, identity: Mapping[str, Any], checkpoint: Path, *, replace: bool, inputs: Sequence[Path]
) -> Iterator[bool]:
    """Claims `out` for one run: locks the folder and writes the run's settings to `run.json`.

    Args:
        out: output folder: new or empty, of this same run, or of a run that failed before its first state.
        identity: settings and data of the run; under "inputs" the fingerprint of the files that it starts from. If
            run.json has no "inputs", because an earlier version wrote it, they are not compared.
        checkpoint: folder for the final checkpoint.
        replace: move anything else that `out` holds aside instead of refusing it.
        inputs: paths that the command reads; they are never moved.

    Yields:
        Whether an earlier command already finished the run, so that `checkpoint` holds the final checkpoint.

    Raises:
        UserError: the folder holds something else, it cannot be written, or another process has locked it.
    """
    check_environment(meeting=True)
    try:
        has_finished = _check_folder(out, identity, checkpoint)
    except UserError:
        if not replace:
            raise
        if is_first_process():
            lock = out / LOCK
            with alone_in(lock) if lock.exists() else contextlib.nullcontext():
                set_aside(out, reads=inputs)
        has_finished = False
    with contextlib.ExitStack() as stack:
        if is_first_process() and not has_finished:
            with _writable(out):
                out.mkdir(parents=True, exist_ok=True)
                stack.enter_context(alone_in(out / LOCK))
            # check again under the lock: another process may have written here in between
            has_finished = _check_folder(out, identity, checkpoint)
            if not has_finished and _holds_no_step(out, _names(out)):
                file = out / "run.json"
                with full_disk_named(out), whole_file(file, "the settings of a run", remedy=OTHER_FOLDER) as new:
                    new.write_text(json.dumps(identity, indent=1, sort_keys=True), encoding="utf-8")
        yield has_finished


def _check_folder(out: Path, identity: Mapping[str, Any], checkpoint: Path) -> bool:
    """Returns whether the run's final checkpoint exists.

    Raises:
        UserError: the folder holds something else than this run.
    """
    # listed before run.json is read, because other ranks of this run may add files in between
    existing_names = _names(out)
    recorded, requested = _recorded(out / "run.json"), json.loads(json.dumps(identity))
    if recorded is not None and "inputs" not in recorded:
        requested.pop("inputs", None)
    if recorded == requested:
        return _is_own_checkpoint(out, checkpoint, identity)
    if "run.json" in existing_names and (recorded is None or not _holds_no_step(out, existing_names)):
        differing = ", ".join(_differing(recorded or {}, requested))
        content = (
            "a run.json that no training run wrote" if recorded is None else f"another run (it differs in {differing})"
        )
        raise UserError(f"{out} holds {content}; {OTHER_OR_REPLACE}")
    if existing_names and "run.json" not in existing_names:
        raise UserError(
            f"Expected {out} to be new, empty, or the folder of this run, found {existing_names[0]!r} and no run.json; "
            f"{OTHER_OR_REPLACE}"
        )
    return False


def _writable(out: Path) -> contextlib.AbstractContextManager[None]:
    return write_errors_explained(out, "a run", remedy="choose another --out")


def _names(out: Path) -> list[str]:
    """Lists the folder, without the lock file and unfinished temporary files."""
    with _writable(out):
        names = sorted(entry.name for entry in out.iterdir()) if out.exists() else []
    return [name for name in names if name != LOCK and not is_unfinished(name)]


def _recorded(file: Path) -> dict[str, Any] | None:
    """Reads run.json; returns None if it is missing or no training run wrote it."""
    with contextlib.suppress(UserError):
        recorded = read_json_object(file, "the settings of a run")
        return recorded if "tokens_sha256" in recorded else None
    return None


def _holds_no_step(out: Path, existing_names: Sequence[str]) -> bool:
    """Whether the files are those of a run that failed before its first state, so that other settings may use `out`."""
    return set(existing_names) <= {"run.json", "training_log.jsonl", "states"} and not holds_states(out / "states")


def _is_own_checkpoint(out: Path, checkpoint: Path, identity: Mapping[str, Any]) -> bool:
    """Whether this run's final checkpoint exists.

    Raises:
        UserError: `checkpoint` is of another run, or it lacks weights.
    """
    if not checkpoint.exists():
        return False
    try:
        record = read_json_object(checkpoint / "training_record.json", "a training record")
        same = record["data"]["tokens_sha256"] == identity["tokens_sha256"] and all(
            record[key] == identity[key] for key in ("recipe", "extension") if key in identity
        )
    except (UserError, KeyError, TypeError):
        same = False
    if not same:
        raise UserError(
            f"{checkpoint} is not this run's checkpoint: its training_record.json is missing or belongs to another "
            f"run; {OTHER_OR_REPLACE}"
        )
    try:
        Weights(checkpoint)
    except UserError as error:
        raise UserError(
            f"The weights of this run's checkpoint in {checkpoint} cannot be read: {error}; {OTHER_OR_REPLACE}"
        ) from error
    return True


def _differing(recorded: Mapping[str, Any], requested: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns the names of the settings that differ; a nested setting is named as `optimization.learning_rate`."""
    names = []
    for key in sorted(recorded.keys() | requested.keys()):
        before = recorded.get(key)
        now = requested.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            names += _differing(before, now, f"{prefix}{key}.")
        elif before != now:
            names.append(prefix + key)
    return names
