"""Finds the packaged tasks and groups in their YAML files, and checks the names and the model of a run.

This module neither imports lm-eval nor parses its thousands of YAML files, which would take seconds. In every function,
`requested` are the names passed with `--tasks`, one by one, and `folders` are those passed with `--include_path`.
"""

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sbeval.errors import UserError
from sbeval.foreign_files import parse_task_yaml
from sbeval.scoring.requests import ATTENTION_SPAN, TARGET_LOGPROBS, TOKEN_LOGPROBS

PREFIX = "sb_"
_WILDCARD = re.compile(r"(\*|\?|\[[^\]]+\])")
_FOLDER = Path(__file__).parent
# Every model of lm-eval answers this request type; only tasks with this output type use lm-eval's own request types.
_ANSWERED_BY_ALL = "generate_until"
_SCORING_METHODS = (TOKEN_LOGPROBS, TARGET_LOGPROBS)
_CHAT_CLASSES = {"LocalChatCompletion", "AnthropicChat"}  # base classes of all chat models in lm-eval
_SPAN_CLASS = ".SpanTask"  # ending of the class name of tasks that need attention weights


@functools.cache
def definitions() -> Mapping[str, Mapping[str, Any]]:
    """Returns the YAML settings of every packaged task and group by name, with `include` resolved."""
    read = [_read(path) for path in sorted(_FOLDER.rglob(f"{PREFIX}*.yaml"))]
    return {str(settings.get("group") or settings["task"]): settings for settings in read}


def is_group(settings: Mapping[str, Any]) -> bool:
    """Whether YAML settings define a group instead of a task."""
    return "group" in settings


def expand_names(requested: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """Expands names, patterns and groups into tasks, and yields the name and the YAML settings of each.

    The settings are None for a task that is not packaged, such as one of lm-eval.
    """
    for name in requested:
        matching = [known for known in definitions() if fnmatchcase(known, name)]
        for member in matching or [name]:
            yield from _members(member)


def check_names(requested: Iterable[str], folders: Iterable[str | Path] = ()) -> None:
    """Refuses names that neither a packaged task, nor a task of lm-eval, nor a task in `folders` has.

    lm-eval needs ten seconds to parse its task files. This function only searches the files for the name.

    Raises:
        UserError: a name is unknown (the message lists similar ones), or a folder does not exist.
    """
    unknown = [
        name
        for name in requested
        if not _is_file(name) and not any(fnmatchcase(known, name) for known in definitions())
    ]
    include_folders = [Path(folder) for folder in folders]
    for folder in include_folders:
        if not folder.is_dir():
            raise UserError(f"--include_path names {folder}, which is no folder: correct the path.")
    if "" in unknown:
        raise UserError("The list of tasks holds an empty name: name a task, or remove the extra comma.")
    for name in unknown:
        if _is_written_in(include_folders, name):
            continue
        near = get_close_matches(name, definitions(), n=3)
        if name.startswith(PREFIX):
            remedy = f"try {', '.join(near or sorted(definitions()))}"
            raise UserError(f"There is no task {name!r}: {remedy}.")
        if (lm_eval := lm_eval_tasks()) and not _is_written_in([lm_eval], name):
            near = near or get_close_matches(name, {path.stem for path in _yaml_files([lm_eval])}, n=3)
            advice = f"try {', '.join(near)}" if near else "`lm_eval ls tasks` lists all tasks"
            raise UserError(f"There is no task {name!r}: {advice}.")


def check_model(model: object, requested: Iterable[str], class_of: Callable[[str], object] = str) -> None:
    """Refuses tasks whose requests a model cannot answer.

    Args:
        model: lm-eval's name of a model, or the model itself.
        requested: names, patterns and groups of tasks.
        class_of: returns a model's class by its name.

    Raises:
        UserError: the model cannot answer the requests of some tasks; the message names them.
    """
    scored_tasks = {
        name: settings
        for name, settings in expand_names(requested)
        if settings and settings.get("output_type") != _ANSWERED_BY_ALL
    }
    if not scored_tasks or model == "sb":
        return
    model_name = model if isinstance(model, str) else type(model).__name__
    resolved = model
    with contextlib.suppress(Exception):  # lm-eval is about to raise the same error when it loads the model
        resolved = class_of(model) if isinstance(model, str) else model
    if isinstance(resolved, str):  # no class was found: only the model's name shows which requests it answers
        scores_tokens = "chat" not in resolved
    else:
        model_class = resolved if isinstance(resolved, type) else type(resolved)
        is_chat = any(base.__name__ in _CHAT_CLASSES for base in model_class.__mro__)
        scores_tokens = not is_chat and any(hasattr(resolved, method) for method in _SCORING_METHODS)
    shows_attention = hasattr(resolved, ATTENTION_SPAN)
    refused = []
    for name, settings in scored_tasks.items():
        needs_attention = str(settings.get("class")).endswith(_SPAN_CLASS)
        if not (shows_attention if needs_attention else scores_tokens):
            refused.append(name)
    if refused:
        names = ", ".join(refused[:3]) + (" ..." if len(refused) > 3 else "")
        reason = "does not expose its attention weights" if scores_tokens else "gives no log-probabilities of a text"
        raise UserError(
            f"{names} cannot run with the model {model_name}, which {reason}: use --model sb, which loads the "
            "checkpoints that hf loads, or tasks that any model can answer, such as sb_niah_single_1, sb_ruler or "
            "sb_json_kv."
        )


def are_all_here(requested: Iterable[str], folders: Iterable[str | Path] = ()) -> bool:
    """Whether every requested task is packaged or defined in `folders`, so that lm-eval's own tasks are not needed."""
    names = list(requested)  # a pattern without our prefix may match tasks of lm-eval too
    patterns_are_ours = all(name.startswith(PREFIX) for name in names if _is_file(name) or _WILDCARD.search(name))
    include_folders = [Path(folder) for folder in folders]
    return patterns_are_ours and all(
        settings is not None or _is_defined_in(include_folders, name) for name, settings in expand_names(names)
    )


def _read(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = parse_task_yaml(path.read_text(encoding="utf-8"))
    included = settings.pop("include", None)
    return {**(_read(path.parent / included) if included else {}), **settings}


def _members(member: str | Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    name = ""
    settings = definitions().get(member) if isinstance(member, str) else member
    if isinstance(member, str):
        name = member
    elif not isinstance(member.get("task"), list):  # a group's member with its own settings
        name = str(member.get("task") or member.get("group"))
        settings = definitions().get(name)
    members = (settings or {}).get("task")
    if isinstance(members, list):
        for nested in members:
            yield from _members(nested)
    else:
        yield name, settings


def _is_file(name: str) -> bool:
    looks_like_path = "/" in name or "\\" in name or name.endswith(".yaml")
    return looks_like_path or (name != "" and Path(name).is_dir())


def lm_eval_tasks() -> Path | None:
    """Returns the folder of lm-eval's own tasks without importing lm-eval; None if lm-eval is not installed."""
    spec = sys.modules["lm_eval"].__spec__ if "lm_eval" in sys.modules else find_spec("lm_eval")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) / "tasks" if places else None


def _is_written_in(folders: Iterable[Path], name: str) -> bool:
    """Whether any YAML file in the folders contains the name, or a name that the pattern matches, as a word."""
    pieces = _WILDCARD.split(name)
    any_letters = {"*": r"[\w.-]*", "?": r"[\w.-]"}
    pieces[::2] = map(re.escape, pieces[::2])
    pieces[1::2] = [any_letters.get(wildcard) or wildcard.replace("[!", "[^", 1) for wildcard in pieces[1::2]]
    try:
        word = re.compile(rf"(?<![\w-]){''.join(pieces)}(?![\w-])".encode())
    except re.error:  # a reversed range such as [z-a], which matches nothing
        return False
    return any(word.search(path.read_bytes()) for path in _yaml_files(folders))


def _is_defined_in(folders: Iterable[Path], name: str) -> bool:
    """Whether a YAML file in the folders defines the task; groups do not count, as they may name tasks of lm-eval."""
    for path in _yaml_files(folders):
        if path.suffix == ".yaml" and name.encode() in (text := path.read_bytes()):
            with contextlib.suppress(ValueError):
                settings = parse_task_yaml(text)
                if isinstance(settings, dict) and settings.get("task") == name and not is_group(settings):
                    return True
    return False


def _yaml_files(folders: Iterable[Path]) -> Iterator[Path]:
    # `os.walk` takes a third of the time of `rglob` for thousands of files; included files may have no suffix
    for folder in folders:
        for place, _, names in os.walk(folder):
            likely = (Path(place, name) for name in names if name.endswith(("yaml", "yml")) or "." not in name)
            yield from filter(os.path.isfile, likely)  # reading a named pipe would block
