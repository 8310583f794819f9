"""How a run claims its folder: new, its own, or one whose run failed before its first state."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sbeval.checkpoints.files import Weights
from sbeval.errors import UserError
from sbeval.foreign_files import parse_json, read_json_object
from sbeval.keeping.locks import LOCK, alone_in
from sbeval.keeping.writing import is_unfinished, set_aside, whole_file
from sbeval.training.distributed import is_first_process
from sbeval.training.full_disk import full_disk_named
from sbeval.training.record import OTHER_FOLDER
from sbeval.training.trainer import holds_states

OTHER_OR_REPLACE = "choose another --out, or have what is there moved aside with --replace"


@contextlib.contextmanager
def claimed(
    out: Path, identity: Mapping[str, Any], checkpoint: Path, *, replace: bool, inputs: Sequence[Path]
) -> Iterator[bool]:
    """Claims a new or empty folder, or one of the same run: writes what its run is, and keeps other processes out.

    Args:
        out: the folder.
        identity: settings, data, and under "inputs" the parts of what the run begins with; a run of an earlier
            version has not recorded those and is not asked for them.
        checkpoint: the folder in it that the run is to end in.
        replace: where the folder holds something else, move that aside.
        inputs: what the command reads, which is never moved.

    Yields:
        Whether the run has ended before and its checkpoint stands there.

    Raises:
        UserError: the folder holds something else, it cannot be written, or another process is at it.
    """
    try:
        ended = _ended_before(out, identity, checkpoint)
    except UserError:
        if not replace:
            raise
        if is_first_process():
            _set_aside(out, inputs)
        ended = False
    with contextlib.ExitStack() as stack:
        if is_first_process() and not ended:
            try:
                out.mkdir(parents=True, exist_ok=True)
                stack.enter_context(alone_in(out / LOCK))
            except OSError as error:
                raise _not_writable(out, error) from error
            # again, since another process may have been at it a moment ago
            ended = _ended_before(out, identity, checkpoint)
            if not ended and _holds_no_step(out, _names(out)):
                _write_identity(out, identity)
        yield ended


def _ended_before(out: Path, identity: Mapping[str, Any], checkpoint: Path) -> bool:
    wanted, file = _text(identity), out / "run.json"
    try:
        # names first: what another process of this run writes from now on is its own
        held = _names(out)
        there = file.read_text(encoding="utf-8") if file.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise _not_writable(out, error) from error
    if there is not None and "inputs" not in (_identity(there) or {}):
        wanted = _text({key: value for key, value in identity.items() if key != "inputs"})
    if there == wanted:
        return _is_own_checkpoint(out, checkpoint, identity)
    if there is not None and not (_holds_no_step(out, held) and _identity(there)):
        raise UserError(
            f"Expected {out} to hold the run of these settings and data, found {_how(there, wanted)}; "
            f"{OTHER_OR_REPLACE}"
        )
    if there is None and held:
        raise UserError(
            f"Expected {out} to be new, empty, or the folder of this run, found {held[0]!r} and no run.json; "
            f"{OTHER_OR_REPLACE}"
        )
    return False


def _names(out: Path) -> list[str]:
    names = sorted(entry.name for entry in out.iterdir()) if out.exists() else []
    return [name for name in names if name != LOCK and not is_unfinished(name)]


def _holds_no_step(out: Path, held: Sequence[str]) -> bool:
    """Whether a run that failed before its first state left these, so that other settings may begin in the folder."""
    return set(held) <= {"run.json", "training_log.jsonl", "states"} and not holds_states(out / "states")


def _set_aside(out: Path, inputs: Sequence[Path]) -> None:
    lock = out / LOCK
    with alone_in(lock) if lock.exists() else contextlib.nullcontext():
        set_aside(out, reads=inputs)


def _write_identity(out: Path, identity: Mapping[str, Any]) -> None:
    file = out / "run.json"
    with full_disk_named(out), whole_file(file, "the settings of a run", remedy=OTHER_FOLDER) as part:
        part.write_text(_text(identity), encoding="utf-8")


def _not_writable(out: Path, error: OSError | UnicodeDecodeError) -> UserError:
    reason = error.strerror if isinstance(error, OSError) else "its run.json is no text"
    return UserError(f"Expected a folder that can be written at {out}, found: {reason}; choose another --out")


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


def _text(identity: Mapping[str, Any]) -> str:
    return json.dumps(identity, indent=1, sort_keys=True)


def _how(there: str, wanted: str) -> str:
    found = _identity(there)
    if found is None:
        return "a run.json that no run wrote"
    return f"another (it differs in {', '.join(_differing(found, json.loads(wanted)))})"


def _identity(text: str) -> dict[str, Any] | None:
    """Reads a run.json; None where no run wrote it."""
    try:
        found = parse_json(text)
    except UserError:
        return None
    return found if isinstance(found, dict) and "tokens_sha256" in found else None


def _differing(there: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Names of the settings in which two runs differ, those within others as `optimization.learning_rate`."""
    names = []
    for key in sorted(there.keys() | wanted.keys()):
        one, other = there.get(key), wanted.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            names += _differing(one, other, f"{prefix}{key}.")
        elif one != other:
            names.append(prefix + key)
    return names
