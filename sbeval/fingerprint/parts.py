"""A fingerprint: parts by name, each a hash of content, a version or a revision; and what differs between two."""

import functools
import hashlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping
from typing import Any

Parts = dict[str, str]
"""Name of a part, such as "weights" or "tokenizer.json", to its hash, version or revision."""

REVISION = "revision"
"""How a part's name ends if the part is known only after a download."""
_HASH_CHARACTERS = 20
_HASH = re.compile(r"[0-9a-f]{20,}")
_PACKAGES = ("sbeval", "lm_eval", "torch", "triton", "transformers", "tokenizers", "flash-linear-attention", "peft")
TESTED = {
    "lm_eval": ("0.4.13", "0.4.13"),
    "transformers": ("5.16.1", "5.23"),
    "torch": ("2.11", "2.13"),
    "triton": ("3.6", "3.7"),
}
"""Package to the oldest and the newest version that this release was tested with, to as many places as are written."""


def short_sha256(value: Any) -> str:
    """Returns the beginning of the hash of bytes, or of a JSON-ready value."""
    raw = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(raw).hexdigest()[:_HASH_CHARACTERS]


def shortened(sha256: str) -> str:
    """Returns as much of a hash as a part keeps."""
    return sha256[:_HASH_CHARACTERS]


def part_name(path: str) -> str:
    """Returns a file's name in UTF-8, other bytes escaped, so that one can print and write it."""
    return path.encode("utf-8", "backslashreplace").decode()


def named(prefix: str, parts: Mapping[str, str]) -> Parts:
    """Returns parts whose names say which input they belong to: "peft: weights"."""
    return {f"{prefix}: {name}": value for name, value in parts.items()}


def versions() -> Parts:
    """Returns the versions of Python and of the installed packages that numbers depend on."""
    installed = {name: installed_version(name) for name in _PACKAGES}
    return {"python": platform.python_version()} | {name: version for name, version in installed.items() if version}


@functools.cache
def installed_version(package: str) -> str | None:
    """Returns the version of a package, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def untested() -> str | None:
    """Returns which installed versions lie outside of `TESTED`: "torch 2.14.0 (tested: 2.11 to 2.13)", None if none."""
    outside = []
    for package, (oldest, newest) in TESTED.items():
        version = installed_version(package)
        if version and not (
            _places(oldest, version) >= _places(oldest) and _places(newest, version) <= _places(newest)
        ):
            outside.append(f"{package} {version} (tested: {' to '.join(dict.fromkeys((oldest, newest)))})")
    return ", ".join(outside) or None


def _places(bound: str, version: str | None = None) -> list[int]:
    """Returns the numbers of a version, as many as its bound has."""
    return [int(number) for number in re.findall(r"\d+", version or bound)][: bound.count(".") + 1]


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Returns which parts differ: "config.json changed; weights changed", or None if none does.

    A revision known on only one side is no change: it is first known after a download.
    """
    differing = []
    for name in sorted(before.keys() | now.keys()):
        was = before.get(name)
        is_now = now.get(name)
        if was == is_now or (name.endswith(REVISION) and (was is None or is_now is None)):
            continue
        if was is None:
            differing.append(f"{name} is new")
        elif is_now is None:
            differing.append(f"{name} is gone")
        elif _HASH.fullmatch(was) or _HASH.fullmatch(is_now):
            differing.append(f"{name} changed")
        else:
            differing.append(f"{name} was {was} and is {is_now}")
    return "; ".join(differing) or None
