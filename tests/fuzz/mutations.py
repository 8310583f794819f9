"""Seeded damage to foreign files: hostile values in a tree, hostile bytes in a text, a folder or link for a file."""

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

ABSENT = "(absent)"
DEEP = 100_000
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 64, 10**9, 2**31, 2**63, 2**64 + 1, 10**400, -(2**63) - 1),
    *(0.0, -0.5, 0.5, 1.5, 1e-9, 1e30, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", " ", "x", "1", "-1", "1e-3", "\u0663", "\u00b2", "9" * 5000, "NaN", "null", "true", "auto", "\ud800", "a\0b"),
    *("../../etc/passwd", "/etc/passwd", ".", "y" * 10_000, "\x1b[2J\a\N{RIGHT-TO-LEFT OVERRIDE}", "<script>", "%s{0}"),
    *([], [[]], {}, [None], [1, 2], {"a": 1}, ["x"], {"": None}, [{}], [[1, "x"]]),
)
ODD_BYTES = (
    *(b"\0", b"\xff", b"\xed\xa0\x80", b"\xc3", b"\r", b"\n", b"\r\n", *(bytes([byte]) for byte in b'"{}[],:\\')),
    *(b"\\ud800", b"\\u0000", "\u0663".encode(), b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b" " * 3000),
    *(b"&a ", b"*a ", b"<<: ", b"!!python/object ", b"---\n", b"\t", b"# ", b"? ", b"| ", b"- "),
)


class Change(NamedTuple):
    """One place of a tree: where, what was there, what is there now; `ABSENT` stands for nothing."""

    path: tuple[Any, ...]
    old: Any
    new: Any


def changed_tree(tree: Any, rng: Random, *, most: int = 2) -> tuple[Any, list[Change]]:
    """Returns a copy of a tree of dicts and lists with one or a few places changed."""
    tree, changes = copy.deepcopy(tree), []
    for _ in range(rng.choice([1, 1, 1, most])):
        place, path = tree, []
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = rng.choice(keys)
            path.append(key)
            if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.15:
                break
            place = place[key]
        if not path or not isinstance(place, dict | list) or not place:
            continue
        old = place[key]
        if rng.random() < 0.15:
            del place[key]
            changes.append(Change(tuple(path), old, ABSENT))
            continue
        place[key] = new = _value_near(old, rng)
        changes.append(Change(tuple(path), old, new))
    return tree, changes


def differences(old: Any, new: Any, path: tuple[Any, ...] = ()) -> Iterator[Change]:
    """Yields every place where two trees differ, at the deepest level that both have."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            yield from differences(old.get(key, ABSENT), new.get(key, ABSENT), (*path, key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, (*path, index))
    elif repr(old) != repr(new):
        yield Change(path, old, new)


def _value_near(old: Any, rng: Random) -> Any:
    """Returns a hostile value, or another value of the same type."""
    if rng.random() < 0.5:
        return copy.deepcopy(rng.choice(VALUES))
    if isinstance(old, bool):
        return rng.choice([not old, str(old).lower(), int(old)])
    if isinstance(old, int | float):
        half = old / 2.0 if abs(old) < 1e300 else 0.5
        return rng.choice([old + 1, old * 2, -old, old - 1, half, -1.0 * (old % 97), str(old), [old], old * 10**6])
    if isinstance(old, str):
        return rng.choice([old.upper(), old[:-1], old + "x", [old], {old: old}, old[::-1]])
    if isinstance(old, list):
        return rng.choice([old[:-1], old + old[:1], old * 2, {str(i): v for i, v in enumerate(old)}, old[::-1]])
    if isinstance(old, dict):
        return rng.choice([list(old.items()), list(old), {**old, "unknown_key": 1}, str(old)])
    return rng.choice([0, 1, "x", [], {}])


def same_kind(old: Any, new: Any) -> bool:
    """Whether a value could be meant in place of another: null stands for every kind, and an absent key is null."""
    if any(value is None or value == ABSENT for value in (old, new)):
        return True
    if isinstance(old, bool) or isinstance(new, bool):
        return isinstance(old, bool) and isinstance(new, bool)
    numbers = (int, float)
    return isinstance(new, numbers) if isinstance(old, numbers) else isinstance(new, type(old))


def changed_bytes(raw: bytes, rng: Random) -> bytes:
    """Returns bytes with some cut, overwritten, put in or written in another encoding."""
    at = rng.randrange(len(raw) + 1)
    span = rng.choice([1, 1, 2, 8, 100])
    odd = rng.choice([*ODD_BYTES, rng.randbytes(span)])
    return rng.choice(
        [
            lambda: raw[:at],
            lambda: raw[:at] + raw[at + span :],
            lambda: raw[:at] + odd + raw[at:],
            lambda: raw[:at] + odd + raw[at:],
            lambda: raw[:at] + odd + raw[at + len(odd) :],
            lambda: raw[:at] + raw[at : at + span] * 3 + raw[at:],
            lambda: b"",
            lambda: b"\xef\xbb\xbf" + raw,
            lambda: raw.decode("utf-8", "replace").encode("utf-16"),
            lambda: b"[" * DEEP + raw,
            lambda: b'{"a":' * DEEP + raw,
            lambda: raw + raw,
            lambda: rng.randbytes(64),
            lambda: raw.replace(b"\n", b"\r\n"),
        ]
    )()


def put_in_place_of(path: Path, rng: Random) -> str:
    """Replaces a file by something that is not a file, and returns its kind."""
    path.unlink(missing_ok=True)
    make: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "folder": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "dangling link": lambda: path.symlink_to(path.parent / "nowhere"),
        "link to itself": lambda: path.symlink_to(path.name),
        "empty file": path.touch,
        "device": lambda: path.symlink_to("/dev/zero"),
    }
    kind = rng.choice(list(make))
    make[kind]()
    return kind


def damage(path: Path, rng: Random, *, tree_share: float = 0.75) -> list[Change] | None:
    """Damages a JSON file; returns the places changed, None where the damage is to the text or the file itself."""
    draw = rng.random()
    if draw < tree_share:
        tree, changes = changed_tree(json.loads(path.read_bytes()), rng)
        path.write_text(json.dumps(tree), encoding="utf-8")
        return changes
    if draw < tree_share + (1 - tree_share) * 0.8:
        path.write_bytes(changed_bytes(path.read_bytes(), rng))
    else:
        put_in_place_of(path, rng)
    return None
