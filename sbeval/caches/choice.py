"""The model argument `cache`: which KV cache the model writes to and reads from."""

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from sbeval.errors import UserError, first_line

Kind = Literal["quantized", "static", "offloaded", "function"]
Backend = Literal["hqq", "quanto"]
RESIDUAL_TOKENS = 128
"""Newest tokens that a quantized cache holds in full precision, at most; transformers' default."""
MOST_GROUP = 64
"""Numbers that share a scale and a zero point if the user names no group size; fewer with smaller heads."""
PACKAGES: dict[Backend, str] = {"hqq": "hqq", "quanto": "optimum-quanto"}
"""The package of each backend."""
BITS: dict[Backend, tuple[int, ...]] = {"quanto": (2, 4), "hqq": (8,)}
"""The numbers of bits for each backend. hqq 0.2.8 also has fewer, but packs 1, 2 and 4 bits only if the groups fill
whole bytes, which most lengths of a text do not, and unpacks 3 bits only of matrices."""
EXPECTED = (
    "quantized:BITS, quantized:BITS:GROUP or quantized:BITS:GROUP:BACKEND (2 or 4 bits by quanto, 8 by hqq), "
    "static, offloaded or MODULE:FUNCTION"
)
_HASH_CHARACTERS = 20
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheChoice:
    """A KV cache as the user chose it.

    Attributes:
        kind: "function" if the user's function makes the cache.
        bits: bits of a quantized number.
        group: numbers that share a scale and a zero point; None for the default.
        backend: the package that quantizes; None for the default.
        function: MODULE:FUNCTION.
    """

    kind: Kind
    bits: int | None = None
    group: int | None = None
    backend: Backend | None = None
    function: str | None = None

    def __str__(self) -> str:
        parts = [self.function or self.kind, *(str(each) for each in (self.bits, self.group, self.backend) if each)]
        return ":".join(parts)


def parse_cache(value: Any) -> CacheChoice:
    """Returns the cache that the text of a model argument names.

    Raises:
        ValueError: the text names no cache.
    """
    if isinstance(value, CacheChoice):
        return value
    if not isinstance(value, str):
        raise ValueError
    if value in ("static", "offloaded"):
        return CacheChoice(kind=value)  # type: ignore[arg-type]
    name, *parts = value.split(":")
    if name != "quantized":
        if not _FUNCTION.fullmatch(value):
            raise ValueError
        return CacheChoice(kind="function", function=value)
    if not 1 <= len(parts) <= 3 or not all(number.isdecimal() for number in parts[:2]):
        raise ValueError
    bits, group = int(parts[0]), int(parts[1]) if len(parts) > 1 else None
    backend: Backend | None = None
    if len(parts) == 3:
        backend = next(each for each in (*BITS, None) if each in (parts[2], None))
        if backend is None:
            raise ValueError
    known = {each for name, bits_of in BITS.items() if backend in (None, name) for each in bits_of}
    if bits not in known or group == 0:
        raise ValueError
    return CacheChoice(kind="quantized", bits=bits, group=group, backend=backend)


def group_for(choice: CacheChoice, head_dim: int) -> int:
    """Returns the group size of a quantized cache for heads of this many channels.

    Raises:
        UserError: the group size does not divide the number of channels.
    """
    if choice.group is None:
        return max(size for size in range(1, min(head_dim, MOST_GROUP) + 1) if head_dim % size == 0)
    if head_dim % choice.group:
        raise UserError(
            f"cache={choice} has groups of {choice.group} numbers, but the model's heads have {head_dim} channels: use "
            f"a group size that divides {head_dim}."
        )
    return choice.group


def quantized_bytes(bits: int, group: int, channels: int, item_bytes: int) -> float:
    """Returns the bytes of this many quantized channels: the numbers, and a scale and a zero point for each group.

    Scale and zero point have the dtype of the keys, `item_bytes` bytes each.
    """
    return channels * (bits / 8 + 2 * item_bytes / group)


def function_of(choice: CacheChoice) -> Any:
    """Imports and returns the user's function; a module is also looked for in the working directory.

    Raises:
        UserError: the module or the function does not exist, or the module raises an error.
    """
    module_name, _, name = str(choice.function).partition(":")
    try:
        with _working_directory():
            function = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:  # the user's module can raise anything
        raise UserError(
            f"The module of cache={choice} cannot be imported ({first_line(error)}): correct it."
        ) from error
    if not callable(function):
        raise UserError(
            f"The module {module_name} has no function {name}, which cache={choice} names: correct the name."
        )
    return function


def function_sha256(choice: CacheChoice) -> str | None:
    """Returns the SHA-256 of the file of the user's function, None if there is no such file.

    The module is not imported, but its parent packages are.
    """
    with _working_directory(), contextlib.suppress(Exception):  # parent packages can raise anything
        spec = importlib.util.find_spec(str(choice.function).partition(":")[0])
        if spec is not None and spec.origin is not None:
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    return None


def cache_parts(value: Any) -> dict[str, str]:
    """Returns the inputs of a run that its model argument `cache` names, by name, for the fingerprint.

    They are the hash of the file of the user's function, or the versions of installed packages that quantize.
    """
    try:
        choice = parse_cache(value)
    except ValueError:  # the model refuses this value
        return {}
    if choice.kind == "function":
        sha256 = function_sha256(choice)
        return {} if sha256 is None else {"cache": sha256[:_HASH_CHARACTERS]}
    versions = {package: package_version(package) for package in PACKAGES.values() if choice.kind == "quantized"}
    return {package: version for package, version in versions.items() if version is not None}


def package_version(package: str) -> str | None:
    """Returns the version of a package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def _working_directory() -> Iterator[None]:
    """Inside this context, modules are also found in the working directory, as with `python -m`."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
