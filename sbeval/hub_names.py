"""Names of checkpoints, tokenizers and data sets: local paths and hub ids, looked up without torch."""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbeval.errors import UserError, brief

_ASKED_FOR = "config.json"
_MOST_SECONDS = 10.0


def looks_like_path(name: str) -> bool:
    """Whether a name is a path because it cannot be a hub id, which is `name` or `owner/name`."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def local_path(value: str | Path) -> Path:
    """Returns a local path with `~` and `~name` expanded.

    Raises:
        UserError: there is no such user, or no file can have this name, such as one with NUL.
    """
    try:
        path = Path(value).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except ValueError:  # NUL, or half a surrogate pair
        raise UserError(f"Expected a path, found {brief(str(value))}, which no file can have: correct it.") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return Path(value).expanduser()
        raise UserError(f"Expected a path, found {brief(str(value))} ({error.strerror}): correct it.") from None
    except RuntimeError:
        raise UserError(f"Expected a home folder for {Path(value).parts[0]!r}, found none: correct the path.") from None
    return path


def is_hub_id(path_or_id: str | Path) -> bool:
    """Whether a name must be a hub id: no file or folder has the name, and it does not look like a path."""
    name = str(path_or_id)
    return not (isinstance(path_or_id, Path) or looks_like_path(name) or Path(name).exists())


def check_name(name: str, what: str, *, file: str | None = None, remedy: str = "correct the name") -> None:
    """Checks, before anything is loaded, that a name is a local folder or a repository of the hub.

    Args:
        name: path or hub id.
        what: what the name should stand for, such as "a checkpoint", for the message.
        file: name of a file that such a folder always holds.
        remedy: what to do, for the message.

    Raises:
        UserError: there is no such folder and no such repository, or the folder lacks the file.
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
            f"Expected {what} at {name!r}, found no such folder, and neither the hub nor its cache on this machine has "
            f"that name: {remedy}."
        )


def is_on_the_hub(name: str, arguments: Mapping[str, Any] | None = None) -> bool:
    """Whether the hub, or if it cannot be reached the hub's local cache, has a repository.

    This function sends one request. Loading would send five, which take half a minute without a network. `arguments`
    are those of the model, of which `revision`, `cache_dir` and `token` are used.
    """
    # the import takes a third of a second, and most names are folders
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    options = arguments or {}
    revision = str(options["revision"]) if options.get("revision") else None
    folder = str(options["cache_dir"]) if options.get("cache_dir") else None
    try:
        if isinstance(try_to_load_from_cache(name, _ASKED_FOR, cache_dir=folder, revision=revision), str):
            return True
        if hub_commit(name, "models", revision) is None:
            address = hf_hub_url(name, _ASKED_FOR, revision=revision)
            get_hf_file_metadata(address, token=options.get("token"), timeout=_MOST_SECONDS)
        return True
    except Exception as error:  # without a network, the HTTP client raises an error of its own class
        is_missing = isinstance(error, errors.RepositoryNotFoundError) and not isinstance(error, errors.GatedRepoError)
        return isinstance(error, errors.HfHubHTTPError | errors.EntryNotFoundError) and not is_missing


def config_of_hub(name: str, arguments: Mapping[str, Any] | None = None) -> Path | None:
    """Returns config.json of a repository in the hub's local cache, downloaded if needed; None if there is none.

    `arguments` are those of the model, of which `revision`, `cache_dir`, `subfolder` and `token` are used.
    """
    # the import takes a third of a second, and most names are folders
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    options = {name: value for name, value in (arguments or {}).items() if value is not None}
    file = f"{options['subfolder']}/{_ASKED_FOR}" if "subfolder" in options else _ASKED_FOR
    place: dict[str, Any] = {key: str(options[key]) for key in ("revision", "cache_dir") if key in options}
    try:
        path: Any = try_to_load_from_cache(name, file, **place)
        if not isinstance(path, str):
            path = hf_hub_download(name, file, **place, token=options.get("token"), etag_timeout=_MOST_SECONDS)
        return Path(path)
    except Exception:  # without a network, the HTTP client raises an error of its own class; loading says why
        return None


def hub_commit(name: str, kind: str, revision: str | None = None) -> str | None:
    """Returns the commit that the hub's local cache has for a revision of a hub id, None if the cache has none.

    For a data set (`kind` "datasets") whose branch the cache does not record, returns all cached commits.
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
        commits = sorted(path.name for path in (folder / "snapshots").iterdir()) if kind == "datasets" else []
    except (OSError, ValueError):
        return None
    return " ".join(commits) or None


def hub_folder(name: str, kind: str) -> Path:
    """Returns the folder of a repository in the hub's local cache; `kind` is "models" or "datasets"."""
    from huggingface_hub import constants  # the import takes a third of a second

    return Path(constants.HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}"
