"""Which packaged tasks there are, and of what kind: read from their YAML files, without lm-eval and its thousands.

Names that are asked for are those of `--tasks`, one by one; folders are those of `--include_path`.
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
# lm-eval's own request types, which every one of its models answers, are made by tasks of this output type alone
_ANSWERED_BY_ALL = "generate_until"
_SCORED = (TOKEN_LOGPROBS, TARGET_LOGPROBS)
_CHATS = {"LocalChatCompletion", "AnthropicChat"}  # lm-eval's, of which all others are
_LOOKS = ".SpanTask"  # the class of tasks that ask where heads attend


@functools.cache
def definitions() -> Mapping[str, Mapping[str, Any]]:
    """Returns what the YAML of every packaged task and group says, by name, with what it includes."""
    read = [_read(path) for path in sorted(_FOLDER.rglob(f"{PREFIX}*.yaml"))]
    return {str(settings.get("group") or settings["task"]): settings for settings in read}


def is_group(settings: Mapping[str, Any]) -> bool:
    """Whether settings are a group's."""
    return "group" in settings


def named(asked: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """Yields name and definition of all tasks that names, patterns and groups stand for; None where it is lm-eval's."""
    for name in asked:
        matching = [known for known in definitions() if fnmatchcase(known, name)]
        for member in matching or [name]:
            yield from _members(member)


def check_names(asked: Iterable[str], folders: Iterable[str | Path] = ()) -> None:
    """Refuses names that neither a packaged task, nor one of lm-eval's, nor one in a given folder has.

    lm-eval needs ten seconds to read its tasks. Here their files are only searched for the name.

    Raises:
        UserError: naming it, with those that come near; or there is no such folder.
    """
    unknown = [name for name in asked if not _is_file(name) and not any(fnmatchcase(n, name) for n in definitions())]
    others = [Path(folder) for folder in folders]
    for folder in others:
        if not folder.is_dir():
            raise UserError(f"Expected a folder of tasks at --include_path, found none: {folder}: correct the path.")
    if "" in unknown:
        raise UserError.expected("names of tasks", found="an empty one", remedy="leave out the comma that is too many")
    for name in unknown:
        if _is_written_in(others, name):
            continue
        near = get_close_matches(name, definitions(), n=3)
        if name.startswith(PREFIX):
            remedy = f"try {', '.join(near or sorted(definitions()))}"
            raise UserError(f"Expected the name of a task, found {name!r}, which is none: {remedy}.")
        if (lm_eval := lm_eval_tasks()) and not _is_written_in([lm_eval], name):
            near = near or get_close_matches(name, {path.stem for path in _yaml_files([lm_eval])}, n=3)
            advice = f"try {', '.join(near)}" if near else "`lm_eval ls tasks` lists them"
            raise UserError.expected("the name of a task", found=f"{name!r}, which is none", remedy=advice)


def check_model(model: object, asked: Iterable[str], class_of: Callable[[str], object] = str) -> None:
    """Refuses tasks whose requests a model does not answer; `class_of` looks its class up where a name was given.

    Raises:
        UserError: naming the tasks.
    """
    ours = {name: of for name, of in named(asked) if of and of.get("output_type") != _ANSWERED_BY_ALL}
    if not ours or model == "sb":
        return
    shown = model if isinstance(model, str) else type(model).__name__
    kind = model
    with contextlib.suppress(Exception):  # whatever an engine's package raises, lm-eval is about to raise again
        kind = class_of(model) if isinstance(model, str) else model
    chats = {of.__name__ for of in (kind if isinstance(kind, type) else type(kind)).__mro__} & _CHATS
    scores = "chat" not in kind if isinstance(kind, str) else not chats and any(hasattr(kind, of) for of in _SCORED)
    answered = {True: hasattr(kind, ATTENTION_SPAN), False: scores}
    if refused := [name for name, of in ours.items() if not answered[str(of.get("class")).endswith(_LOOKS)]]:
        names = ", ".join(refused[:3]) + (" ..." if len(refused) > 3 else "")
        reason = "scores tokens and does not show its attention" if scores else "gives no log-probabilities of a text"
        raise UserError(
            f"Expected the model sb for {names}, found {shown}, which {reason}: use --model sb, which loads what hf "
            "loads, or tasks that any model answers, such as sb_niah_single_1, sb_ruler or sb_json_kv."
        )


def are_all_here(asked: Iterable[str], folders: Iterable[str | Path] = ()) -> bool:
    """Whether every task is packaged or defined in a given folder, so that nobody has to read lm-eval's own tasks."""
    names = list(asked)  # patterns of another prefix than ours may be lm-eval's too
    ours = all(name.startswith(PREFIX) for name in names if _is_file(name) or _WILDCARD.search(name))
    others = [Path(folder) for folder in folders]
    return ours and all(settings is not None or _is_defined_in(others, name) for name, settings in named(names))


def _read(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = parse_task_yaml(path.read_text(encoding="utf-8"))
    included = settings.pop("include", None)
    return {**(_read(path.parent / included) if included else {}), **settings}


def _members(member: str | Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    name = ""
    settings = definitions().get(member) if isinstance(member, str) else member
    if isinstance(member, str):
        name = member
    elif not isinstance(member.get("task"), list):  # a member with settings of its own
        name = str(member.get("task") or member.get("group"))
        settings = definitions().get(name)
    members = (settings or {}).get("task")
    if isinstance(members, list):
        for nested in members:
            yield from _members(nested)
    else:
        yield name, settings


def _is_file(name: str) -> bool:
    written = "/" in name or "\\" in name or name.endswith(".yaml")
    return written or (name != "" and Path(name).is_dir())


def lm_eval_tasks() -> Path | None:
    """Returns the folder of lm-eval's own tasks, found without importing it."""
    spec = sys.modules["lm_eval"].__spec__ if "lm_eval" in sys.modules else find_spec("lm_eval")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) / "tasks" if places else None


def _is_written_in(folders: Iterable[Path], name: str) -> bool:
    """Whether a name, or one that a pattern matches, stands as a word in any YAML file of some folders."""
    pieces = _WILDCARD.split(name)
    any_letters = {"*": r"[\w.-]*", "?": r"[\w.-]"}
    pieces[::2] = map(re.escape, pieces[::2])
    pieces[1::2] = [any_letters.get(wildcard) or wildcard.replace("[!", "[^", 1) for wildcard in pieces[1::2]]
    try:
        word = re.compile(rf"(?<![\w-]){''.join(pieces)}(?![\w-])".encode())
    except re.error:  # letters in brackets that run backwards match nothing
        return False
    return any(word.search(path.read_bytes()) for path in _yaml_files(folders))


def _is_defined_in(folders: Iterable[Path], name: str) -> bool:
    """Whether a YAML file of some folders is a task's own; a group may have members of lm-eval's."""
    for path in _yaml_files(folders):
        if path.suffix == ".yaml" and name.encode() in (text := path.read_bytes()):
            with contextlib.suppress(ValueError):
                settings = parse_task_yaml(text)
                if isinstance(settings, dict) and settings.get("task") == name and not is_group(settings):
                    return True
    return False


def _yaml_files(folders: Iterable[Path]) -> Iterator[Path]:
    # three times as fast as `rglob`, with thousands of files; what tasks include needs no ending
    for folder in folders:
        for place, _, names in os.walk(folder):
            likely = (Path(place, name) for name in names if name.endswith(("yaml", "yml")) or "." not in name)
            yield from filter(os.path.isfile, likely)  # a pipe would be waited for
