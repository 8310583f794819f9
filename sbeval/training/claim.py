"""How a run claims its folder: new, its own, or one whose run failed before its first state."""

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

OTHER_OR_REPLACE = "choose another --out, or have what is there moved aside with --replace"


@contextlib.contextmanager
def claimed(
    out: Path, identity: Mapping[str, Any], checkpoint: Path, *, replace: bool, inputs: Sequence[Path]
) -> Iterator[bool]:
    """Claims a new or empty folder, or one of the same run: writes what its run is, and keeps other processes out.

    `identity` holds settings, data, and under "inputs" the parts of what the run begins with; a run of an earlier
    version has not recorded those and is not asked for them. The run is to end in the folder `checkpoint`. With
    `replace` what else the folder holds is moved aside, but never `inputs`, which the command reads.

    Yields:
        Whether the run has ended before and its checkpoint stands there.

    Raises:
        UserError: the folder holds something else, it cannot be written, or another process is at it.
    """
    check_environment(meeting=True)
    try:
        ended = _ended_before(out, identity, checkpoint)
    except UserError:
        if not replace:
            raise
        if is_first_process():
            lock = out / LOCK
            with alone_in(lock) if lock.exists() else contextlib.nullcontext():
                set_aside(out, reads=inputs)
        ended = False
    with contextlib.ExitStack() as stack:
        if is_first_process() and not ended:
            with _writable(out):
                out.mkdir(parents=True, exist_ok=True)
                stack.enter_context(alone_in(out / LOCK))
            # again, since another process may have been at it a moment ago
            ended = _ended_before(out, identity, checkpoint)
            if not ended and _holds_no_step(out, _names(out)):
                file = out / "run.json"
                with full_disk_named(out), whole_file(file, "the settings of a run", remedy=OTHER_FOLDER) as new:
                    new.write_text(json.dumps(identity, indent=1, sort_keys=True), encoding="utf-8")
        yield ended


def _ended_before(out: Path, identity: Mapping[str, Any], checkpoint: Path) -> bool:
    """Whether the run's checkpoint stands there; raises a `UserError` where the folder is not the run's."""
    held = _names(out)  # before the record: what another process of this run writes from now on is its own
    recorded, wanted = _recorded(out / "run.json"), json.loads(json.dumps(identity))
    if recorded is not None and "inputs" not in recorded:
        wanted.pop("inputs", None)
    if recorded == wanted:
        return _is_own_checkpoint(out, checkpoint, identity)
    if "run.json" in held and (recorded is None or not _holds_no_step(out, held)):
        differing = ", ".join(_differing(recorded or {}, wanted))
        said = "a run.json that no run wrote" if recorded is None else f"another (it differs in {differing})"
        raise UserError(f"Expected {out} to hold the run of these settings and data, found {said}; {OTHER_OR_REPLACE}")
    if held and "run.json" not in held:
        raise UserError(
            f"Expected {out} to be new, empty, or the folder of this run, found {held[0]!r} and no run.json; "
            f"{OTHER_OR_REPLACE}"
        )
    return False


def _writable(out: Path) -> contextlib.AbstractContextManager[None]:
    return write_errors_explained(out, "a run", remedy="choose another --out")


def _names(out: Path) -> list[str]:
    with _writable(out):
        names = sorted(entry.name for entry in out.iterdir()) if out.exists() else []
    return [name for name in names if name != LOCK and not is_unfinished(name)]


def _recorded(file: Path) -> dict[str, Any] | None:
    """Reads a run.json; None where there is none that a run wrote."""
    with contextlib.suppress(UserError):
        recorded = read_json_object(file, "the settings of a run")
        return recorded if "tokens_sha256" in recorded else None
    return None


def _holds_no_step(out: Path, held: Sequence[str]) -> bool:
    """Whether a run that failed before its first state left these, so that other settings may begin in the folder."""
    return set(held) <= {"run.json", "training_log.jsonl", "states"} and not holds_states(out / "states")


def _is_own_checkpoint(out: Path, checkpoint: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the run's checkpoint stands there; raises a `UserError` where something else has its name."""
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
            f"Expected no {checkpoint.name!r} in {out} but this run's own checkpoint, found something without "
            f"its training_record.json; {OTHER_OR_REPLACE}"
        )
    try:
        Weights(checkpoint)
    except UserError as error:
        raise UserError(
            f"Expected this run's checkpoint in {checkpoint} to hold its weights: {error}; {OTHER_OR_REPLACE}"
        ) from error
    return True


def _differing(recorded: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Names of the settings in which two runs differ, those within others as `optimization.learning_rate`."""
    names = []
    for key in sorted(recorded.keys() | wanted.keys()):
        before, now = recorded.get(key), wanted.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            names += _differing(before, now, f"{prefix}{key}.")
        elif before != now:
            names.append(prefix + key)
    return names
