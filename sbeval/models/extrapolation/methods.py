"""Ways to read beyond the training length, each as functions of positions.

Every method but `log_length` splits query-key pairs into zones and rotates each zone anew, so that no distance is
longer than in training (`self_extend`: in texts not too long). A query's keys in one zone lie in a row, none in two.
Positions are int64 tensors of any shape, counted from the beginning of a text; those below 0 are padding.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sbeval.errors import UserError, shown
from sbeval.foreign_files import read_json
from sbeval.hub_names import local_path
from sbeval.rope_parameters import parse_rope_scaling

OfPosition = Callable[[Tensor], Tensor]
_LARGEST = 2**31 - 1


class Zone(NamedTuple):
    """Pairs whose queries and keys are rotated alike.

    Attributes:
        query: maps a query's position to the one it is rotated by.
        key: maps a key's position to the one it is rotated by.
        first: maps a query's position to that of its first key here, at least 0.
        stop: maps it to the position after its last key, at most `first` if it has none.
    """

    query: OfPosition
    key: OfPosition
    first: OfPosition
    stop: OfPosition


def _itself(position: Tensor) -> Tensor:
    return position


def _next(position: Tensor) -> Tensor:
    return position + 1


def _oldest_of(window: int) -> OfPosition:
    return lambda position: (position - window + 1).clamp_min(0)


def _as_they_are(first: OfPosition) -> Zone:
    return Zone(query=_itself, key=_itself, first=first, stop=_next)


def _self_extend(group: int, window: int) -> tuple[Zone, ...]:
    """The newest `window` keys as they are, older ones in groups that share a position (Jin et al. 2024).

    arXiv 2401.01325, algorithm 1.
    """
    shift = window - window // group
    older = _oldest_of(window)
    return (
        _as_they_are(older),
        Zone(
            query=lambda position: position // group + shift,
            key=lambda position: position // group,
            first=torch.zeros_like,
            stop=older,
        ),
    )


def _dual_chunk(chunk: int, local: int) -> tuple[Zone, ...]:
    """Keys by place in chunk; queries too, `chunk` more for the chunk before, else farthest (An et al. 2024).

    arXiv 2402.17463, where `chunk` is s, `local` w, and their sum the pretraining window c.
    """
    farthest = chunk + local - 1

    def place(position: Tensor) -> Tensor:
        return position % chunk

    def begins(position: Tensor) -> Tensor:
        return position // chunk * chunk

    def own(position: Tensor) -> Tensor:
        return begins(position).clamp_min(0)

    def before(position: Tensor) -> Tensor:
        return (begins(position) - chunk).clamp_min(0)

    return (
        Zone(query=place, key=place, first=own, stop=_next),
        Zone(query=lambda position: (place(position) + chunk).clamp_max(farthest), key=place, first=before, stop=own),
        Zone(
            query=lambda position: torch.full_like(position, farthest), key=place, first=torch.zeros_like, stop=before
        ),
    )


def _sink_window(sink: int, window: int) -> tuple[Zone, ...]:
    """The first `sink` keys and the newest `window`, by their places in such a cache (Xiao et al. 2023).

    arXiv 2309.17453, 3.2.
    """
    older = _oldest_of(window)
    return (
        _as_they_are(older),
        Zone(
            query=lambda position: position.clamp_max(sink + window - 1),
            key=_itself,
            first=torch.zeros_like,
            stop=lambda position: older(position).clamp_max(sink),
        ),
    )


class _Kind(NamedTuple):
    """What a method takes: the names of its numbers, in tokens, and what follows from them.

    Attributes:
        zones: the zones of all pairs.
        farthest: training length its numbers need at least; None if it needs the training length itself.
        unchanged: longest text on which it is plain attention.
    """

    numbers: tuple[str, ...]
    zones: Callable[..., tuple[Zone, ...]]
    farthest: Callable[..., int] | None
    unchanged: Callable[..., int] | None


_KINDS = {
    "self_extend": _Kind(
        ("group", "window"), _self_extend, lambda group, window: window + 1, lambda group, window: window
    ),
    "dual_chunk": _Kind(
        ("chunk", "local"), _dual_chunk, lambda chunk, local: chunk + local, lambda chunk, local: chunk
    ),
    "sink_window": _Kind(
        ("sink", "window"), _sink_window, lambda sink, window: sink + window, lambda sink, window: sink + window
    ),
    # every pair as it is; what changes are the logits (Chiang and Cholak 2022, arXiv 2202.12172)
    "log_length": _Kind((), lambda: (_as_they_are(torch.zeros_like),), None, None),
}
LONGROPE = "longrope"
SPELLINGS = (
    *(":".join([name, *(number.upper() for number in kind.numbers)]) for name, kind in _KINDS.items()),
    f"{LONGROPE}:FILE",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Extrapolation:
    """A method with its numbers in tokens, as they are written, hashable; `log_length` needs the training length."""

    method: str
    numbers: tuple[int, ...] = ()
    training_length_tokens: int | None = None

    @property
    def zones(self) -> tuple[Zone, ...]:
        """The zones that all pairs of a query and a key it sees lie in."""
        return _KINDS[self.method].zones(*self.numbers)

    @property
    def unchanged_tokens(self) -> int:
        """Longest text on which the method is plain attention."""
        if (unchanged := _KINDS[self.method].unchanged) is not None:
            return unchanged(*self.numbers)
        assert self.training_length_tokens is not None
        return self.training_length_tokens

    def temperature(self, position: Tensor) -> Tensor | None:
        """Returns the factor of each query's logits in fp32, None where there is none.

        For a query with n keys it is log n / log(training length), but at least 1.
        """
        if self.method != "log_length":
            return None
        assert self.training_length_tokens is not None
        keys = (position + 1).clamp_min(1).double()
        return (keys.log() / math.log(self.training_length_tokens)).clamp_min(1).float()

    def trained_at(self, length_tokens: int | None) -> "Extrapolation":
        """Returns the method for a model of this training length.

        Raises:
            UserError: its numbers make distances that the model has not seen, or the length is needed and unknown.
        """
        kind = _KINDS[self.method]
        if kind.farthest is None:
            if length_tokens is None or length_tokens < 2:
                raise UserError(
                    f"Expected a training length for extrapolation={self.method}, found "
                    f"{'none' if length_tokens is None else length_tokens}: give training_length in --model_args."
                )
            return dataclasses.replace(self, training_length_tokens=length_tokens)
        farthest = kind.farthest(*self.numbers)
        if length_tokens is not None and farthest > length_tokens:
            raise UserError(
                f"Expected extrapolation={self} to stay within the training length of {length_tokens} tokens, found "
                f"{farthest}: choose a smaller {kind.numbers[-1]}, or correct training_length."
            )
        return self

    def __str__(self) -> str:
        return ":".join([self.method, *map(str, self.numbers)])

    def to_json(self) -> dict[str, Any]:
        """Returns what a results file holds: the method, and its numbers by name."""
        return {"method": self.method} | dict(zip(_KINDS[self.method].numbers, self.numbers, strict=True))


def parse_extrapolation(spec: str) -> Extrapolation | dict[str, Any]:
    """Returns the method a user asks for; of LongRoPE's factors, the RoPE scaling that they are.

    `spec` is one of `SPELLINGS`; numbers may have commas between them. FILE holds transformers' longrope scaling as a
    JSON object, `factor` and `long_factor` among it.

    Raises:
        UserError: the method is unknown, a number cannot be, or the file cannot be read.
    """
    method, _, rest = spec.strip().partition(":")
    if method == LONGROPE and rest:
        return _longrope(rest)
    kind = _KINDS.get(method)
    numbers = re.split("[:,]", rest) if rest else []
    if kind is None or len(numbers) != len(kind.numbers):
        raise UserError(f"Expected extrapolation to be one of {', '.join(SPELLINGS)}, found {shown(spec)}: correct it.")
    if not all(re.fullmatch("[0-9]{1,10}", number.strip()) and 1 <= int(number) <= _LARGEST for number in numbers):
        raise UserError(
            f"Expected {' and '.join(kind.numbers)} of extrapolation={method} to be whole numbers of at least 1, found "
            f"{shown(rest)}: correct them."
        )
    return Extrapolation(method=method, numbers=tuple(map(int, numbers)))


def _longrope(file: str) -> dict[str, Any]:
    """Returns LongRoPE's scaling (Ding et al. 2024, arXiv 2402.13753) from a file."""
    content = read_json(local_path(file), "LongRoPE's scaling")
    scaling = dict(content) if isinstance(content, Mapping) else {}
    if not any(_is_factor(scaling.get(name)) for name in ("factor", "attention_factor")):
        raise UserError(
            f"Expected {file!r} to hold transformers' longrope scaling, as in "
            '{"factor": 16, "long_factor": [...]}, found no factor above 0, from which its logits are scaled: add it.'
        )
    factors = scaling.get("long_factor")
    if isinstance(factors, list):
        scaling.setdefault("short_factor", [1.0] * len(factors))
    for name in ("long_factor", "short_factor"):
        given = scaling.get(name)
        numbers = given if isinstance(given, list) else [None]
        if not numbers or not all(_is_factor(number) for number in numbers):
            raise UserError(
                f"Expected {name} of extrapolation={LONGROPE} to be a list of numbers above 0, found {shown(given)}: "
                "correct it."
            )
        scaling[name] = [float(number) for number in numbers if number is not None]
    return parse_rope_scaling({"rope_type": LONGROPE, **scaling})


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
