"""What stands for a checkpoint or a tokenizer: a folder, or an id of the hub; looked up without torch."""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbeval.errors import UserError, shown

_ASKED_FOR = "config.json"
_MOST_SECONDS = 10.0


def looks_like_path(name: str) -> bool:
    """Whether a name cannot be an id of the hub, which is `name` or `owner/name`."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def local_path(value: str | Path) -> Path:
    """Returns a path of this machine, `~` and `~name` in it as the home of that user.

    Raises:
        UserError: there is no such user, or the system knows that nothing can be there, such as behind a NUL.
    """
    try:
        path = Path(value).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except ValueError:  # NUL, or half a surrogate pair
        raise UserError(f"Expected a path, found {shown(str(value))}, which no file can have: correct it.") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return Path(value).expanduser()
        raise UserError(f"Expected a path, found {shown(str(value))} ({error.strerror}): correct it.") from None
    except RuntimeError:
        raise UserError(f"Expected a home folder for {Path(value).parts[0]!r}, found none: correct the path.") from None
    return path


def is_hub_id(path_or_id: str | Path) -> bool:
    """Whether a name can only mean a repository of the hub: nothing is there, and it does not look like a path."""
    name = str(path_or_id)
    return not (isinstance(path_or_id, Path) or looks_like_path(name) or Path(name).exists())


def check_name(name: str, what: str, *, file: str | None = None, remedy: str = "correct the name") -> None:
    """Refuses a name that is neither a folder of this machine nor a repository of the hub, before anything is loaded.

    `what` is looked for, such as "a checkpoint", and `file` the name of a file that such a folder always holds.

    Raises:
        UserError: nothing is there, or the folder lacks the file.
    """
    folder = local_path(name)
    if folder.is_dir():
        if file is not None and not (folder / file).is_file():
            raise UserError.expected(f"{what} with its {file} at {name!r}", found="a folder without it", remedy=remedy)
    elif folder.exists():
        raise UserError.expected(f"{what}, which is a folder", found=f"a file at {name!r}", remedy=remedy)
    elif not is_hub_id(name):
        raise UserError.expected(f"{what} at {name!r}", found="nothing there", remedy=remedy)
    elif not is_on_the_hub(name):
        raise UserError(
            f"Expected {what} at {name!r}, found no such folder, and neither the hub nor its cache here gave one of "
            f"that name: {remedy}."
        )


def is_on_the_hub(name: str, arguments: Mapping[str, Any] | None = None) -> bool:
    """Whether the hub has a repository, or where it cannot be reached, whether its cache here holds some of it.

    The hub is asked once: loading would ask it five times, which takes half a minute without a network. Of the model's
    arguments `revision` and `cache_dir` count.
    """
    # takes a third of a second, and most names are folders
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    given = arguments or {}
    revision, folder = (str(value) if (value := given.get(key)) else None for key in ("revision", "cache_dir"))
    try:
        if isinstance(try_to_load_from_cache(name, _ASKED_FOR, cache_dir=folder, revision=revision), str):
            return True
        if hub_commit(name, "models", revision) is None:
            get_hf_file_metadata(hf_hub_url(name, _ASKED_FOR, revision=revision), timeout=_MOST_SECONDS)
        return True
    except Exception as error:  # where it is not reached, the class is that of whichever client its library uses
        is_missing = isinstance(error, errors.RepositoryNotFoundError) and not isinstance(error, errors.GatedRepoError)
        return isinstance(error, errors.HfHubHTTPError | errors.EntryNotFoundError) and not is_missing


def hub_commit(name: str, kind: str, revision: str | None = None) -> str | None:
    """Returns the commit behind a revision of a hub id as the hub's cache has it, which may be a branch that moves.

    Of a data set ("datasets", not "models") whose branch the cache does not name, all commits it holds.
    """
    if looks_like_path(name):
        return None
    folder = hub_folder(name, kind)
    revision = revision or "main"
    try:
        if (folder / "snapshots" / revision).is_dir():
            return revision
        if (folder / "refs" / revision).is_file():
            return (folder / "refs" / revision).read_text(encoding="utf-8").strip()
        held = sorted(path.name for path in (folder / "snapshots").iterdir()) if kind == "datasets" else []
    except (OSError, ValueError):
        return None
    return " ".join(held) or None


def hub_folder(name: str, kind: str) -> Path:
    """Returns where the hub's cache keeps a repository."""
    from huggingface_hub import constants  # as in `is_on_the_hub`

    return Path(constants.HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}"
