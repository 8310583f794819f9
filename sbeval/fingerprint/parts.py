"""A fingerprint is a mapping from names of parts to hashes, versions or revisions. This module compares two."""

import functools
import hashlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping
from typing import Any

Parts = dict[str, str]
"""A fingerprint: from the name of a part, such as "weights" or "tokenizer.json", to its hash, version or revision."""

REVISION = "revision"
"""Ending of the names of parts that are hub commits, which may be unknown before a download."""
_HASH_CHARACTERS = 20
_HASH = re.compile(r"[0-9a-f]{20,}")
_PACKAGES = (
    *("sbeval", "lm_eval", "torch", "triton", "transformers", "tokenizers", "flash-linear-attention", "peft"),
    "adasplash",
)
TESTED = {
    "lm_eval": ("0.4.13", "0.4.13"),
    "transformers": ("5.16.1", "5.23"),
    "torch": ("2.11", "2.13"),
    "triton": ("3.6", "3.7"),
}
"""Oldest and newest tested version by package. Only the components given here are compared: 2.13 includes 2.13.1."""


def short_sha256(value: Any) -> str:
    """Returns a shortened SHA-256 of bytes, or of a value as JSON."""
    raw = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(raw).hexdigest()[:_HASH_CHARACTERS]


def shortened(sha256: str) -> str:
    """Shortens a hash to the length used in fingerprints."""
    return sha256[:_HASH_CHARACTERS]


def part_name(path: str) -> str:
    """Returns a file name that can be printed and written as UTF-8: undecodable bytes are escaped."""
    return path.encode("utf-8", "backslashreplace").decode()


def named(prefix: str, parts: Mapping[str, str]) -> Parts:
    """Prefixes the names of parts with the input they belong to: "peft: weights"."""
    return {f"{prefix}: {name}": value for name, value in parts.items()}


def versions() -> Parts:
    """Returns the versions of Python and of installed packages that results depend on."""
    installed = {name: installed_version(name) for name in _PACKAGES}
    return {"python": platform.python_version()} | {name: version for name, version in installed.items() if version}


@functools.cache
def installed_version(package: str) -> str | None:
    """Returns the version of a package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def untested() -> str | None:
    """Lists installed versions outside `TESTED`, such as "torch 2.14.0 (tested: 2.11 to 2.13)", or returns None."""
    outside = []
    for package, (oldest, newest) in TESTED.items():
        version = installed_version(package)
        if version and not (
            _places(oldest, version) >= _places(oldest) and _places(newest, version) <= _places(newest)
        ):
            outside.append(f"{package} {version} (tested: {' to '.join(dict.fromkeys((oldest, newest)))})")
    return ", ".join(outside) or None


def _places(bound: str, version: str | None = None) -> list[int]:
    """Returns the components of a version as integers, as many as `bound` has."""
    return [int(number) for number in re.findall(r"\d+", version or bound)][: bound.count(".") + 1]


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Describes which parts differ, such as "config.json changed; weights changed"; None if none do.

    A hub commit that only one of the two fingerprints contains is not a difference: the commit becomes known at the
    first download.
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
