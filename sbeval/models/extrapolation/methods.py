"""The extrapolation methods, each as functions of positions, and the parser of the option `extrapolation`.

Every method but `log_length` splits the query-key pairs into zones, such as near and distant pairs. In each zone,
queries and keys are rotated by modified positions, so that no distance exceeds the training length (with `self_extend`:
unless the text is too long for its group size). A query's keys in one zone are consecutive, and no key is in two zones.
Positions are int64 tensors of any shape, counted from the beginning of a text; positions below 0 are padding.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sbeval.errors import UserError, brief
from sbeval.foreign_files import read_json
from sbeval.hub_names import local_path
from sbeval.rope_parameters import parse_rope_scaling

OfPosition = Callable[[Tensor], Tensor]
_LARGEST = 2**31 - 1


class Zone(NamedTuple):
    """A set of query-key pairs, and the positions by which their queries and keys are rotated.

    Attributes:
        query: maps a query's position to the position it is rotated by.
        key: maps a key's position to the position it is rotated by.
        first: maps a query's position to that of its first key in this zone, at least 0.
        stop: maps a query's position to the one after its last key in this zone; at most `first` if there is none.
    """

    query: OfPosition
    key: OfPosition
    first: OfPosition
    stop: OfPosition


def _same(position: Tensor) -> Tensor:
    return position


def _next(position: Tensor) -> Tensor:
    return position + 1


def _first_of_window(window: int) -> OfPosition:
    return lambda position: (position - window + 1).clamp_min(0)


def _unchanged_positions(first: OfPosition) -> Zone:
    return Zone(query=_same, key=_same, first=first, stop=_next)


def _self_extend(group: int, window: int) -> tuple[Zone, ...]:
    """SelfExtend (Jin et al. 2024, arXiv 2401.01325, algorithm 1).

    The newest `window` keys keep their positions; older keys share a position in groups of `group`.
    """
    shift, first_of_window = window - window // group, _first_of_window(window)
    return (
        _unchanged_positions(first_of_window),
        Zone(
            query=lambda position: position // group + shift,
            key=lambda position: position // group,
            first=torch.zeros_like,
            stop=first_of_window,
        ),
    )


def _dual_chunk(chunk: int, local: int) -> tuple[Zone, ...]:
    """Dual chunk attention (An et al. 2024, arXiv 2402.17463); the paper calls `chunk` s, `local` w, and their sum c.

    A key's position is its index within its chunk. A query's position is its index within its chunk for keys of the
    same chunk, that index plus `chunk` (at most `chunk + local - 1`) for keys of the previous chunk, and always
    `chunk + local - 1` for keys of all older chunks.
    """
    farthest = chunk + local - 1

    def place(position: Tensor) -> Tensor:
        return position % chunk

    def chunk_start(position: Tensor) -> Tensor:
        return position // chunk * chunk

    def start_of_chunk(position: Tensor) -> Tensor:
        return chunk_start(position).clamp_min(0)

    def start_of_previous_chunk(position: Tensor) -> Tensor:
        return (chunk_start(position) - chunk).clamp_min(0)

    return (
        Zone(query=place, key=place, first=start_of_chunk, stop=_next),
        Zone(
            query=lambda position: (place(position) + chunk).clamp_max(farthest),
            key=place,
            first=start_of_previous_chunk,
            stop=start_of_chunk,
        ),
        Zone(
            query=lambda position: torch.full_like(position, farthest),
            key=place,
            first=torch.zeros_like,
            stop=start_of_previous_chunk,
        ),
    )


def _sink_window(sink: int, window: int) -> tuple[Zone, ...]:
    """Attention sinks with a sliding window (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453, section 3.2).

    A query sees the first `sink` keys and the newest `window` keys, at the positions they have in a cache of that size.
    """
    first_of_window = _first_of_window(window)
    return (
        _unchanged_positions(first_of_window),
        Zone(
            query=lambda position: position.clamp_max(sink + window - 1),
            key=_same,
            first=torch.zeros_like,
            stop=lambda position: first_of_window(position).clamp_max(sink),
        ),
    )


class _Method(NamedTuple):
    """Definition of a method; the functions take the method's parameters.

    Attributes:
        numbers: names of the parameters, which are numbers of tokens.
        zones: returns the zones.
        farthest: returns the shortest training length that these parameters need; None for a method whose parameter is
            the training length.
        unchanged: returns the length of the longest text for which the method equals plain attention.
    """

    numbers: tuple[str, ...]
    zones: Callable[..., tuple[Zone, ...]]
    farthest: Callable[..., int] | None
    unchanged: Callable[..., int] | None


_METHODS = {
    "self_extend": _Method(
        ("group", "window"), _self_extend, lambda group, window: window + 1, lambda group, window: window
    ),
    "dual_chunk": _Method(
        ("chunk", "local"), _dual_chunk, lambda chunk, local: chunk + local, lambda chunk, local: chunk
    ),
    "sink_window": _Method(
        ("sink", "window"), _sink_window, lambda sink, window: sink + window, lambda sink, window: sink + window
    ),
    # positions do not change; logits are scaled by the log of the length (Chiang and Cholak 2022, arXiv 2202.12172)
    "log_length": _Method((), lambda: (_unchanged_positions(torch.zeros_like),), None, None),
}
LONGROPE = "longrope"
SPELLINGS = (
    *(":".join([name, *(number.upper() for number in kind.numbers)]) for name, kind in _METHODS.items()),
    f"{LONGROPE}:FILE",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Extrapolation:
    """A method with its parameters in tokens; hashable. Only `log_length` uses `training_length_tokens`."""

    method: str
    numbers: tuple[int, ...] = ()
    training_length_tokens: int | None = None

    @property
    def zones(self) -> tuple[Zone, ...]:
        """Zones of the method; each visible query-key pair is in exactly one."""
        return _METHODS[self.method].zones(*self.numbers)

    @property
    def unchanged_tokens(self) -> int:
        """Length of the longest text for which the method equals plain attention, in tokens."""
        if (unchanged := _METHODS[self.method].unchanged) is not None:
            return unchanged(*self.numbers)
        assert self.training_length_tokens is not None
        return self.training_length_tokens

    def temperature(self, position: Tensor) -> Tensor | None:
        """Returns the factor of each query's logits in fp32, or None for methods without one.

        For a query with n keys, the factor is max(1, log n / log(training length)).
        """
        if self.method != "log_length":
            return None
        assert self.training_length_tokens is not None
        keys = (position + 1).clamp_min(1).double()
        return (keys.log() / math.log(self.training_length_tokens)).clamp_min(1).float()

    def trained_at(self, length_tokens: int | None) -> "Extrapolation":
        """Checks the method against a model's training length, and returns it with that length if it needs it.

        Raises:
            UserError: the parameters lead to distances beyond the training length, or the length is needed and None.
        """
        kind = _METHODS[self.method]
        if kind.farthest is None:
            if length_tokens is None or length_tokens < 2:
                raise UserError(
                    f"extrapolation={self.method} needs the training length, which is "
                    f"{'unknown' if length_tokens is None else length_tokens}: set training_length in --model_args."
                )
            return dataclasses.replace(self, training_length_tokens=length_tokens)
        farthest = kind.farthest(*self.numbers)
        if length_tokens is not None and farthest > length_tokens:
            raise UserError(
                f"extrapolation={self} needs a training length of at least {farthest} tokens, and this model's is "
                f"{length_tokens}: choose a smaller {kind.numbers[-1]}, or correct training_length."
            )
        return self

    def __str__(self) -> str:
        return ":".join([self.method, *map(str, self.numbers)])

    def to_json(self) -> dict[str, Any]:
        """Returns the method and its parameters by name, for a results file."""
        return {"method": self.method} | dict(zip(_METHODS[self.method].numbers, self.numbers, strict=True))


def parse_extrapolation(spec: str) -> Extrapolation | dict[str, Any]:
    """Parses the option `extrapolation`.

    Args:
        spec: one of `SPELLINGS`; commas may stand between the numbers. FILE of "longrope:FILE" holds transformers'
            longrope scaling as a JSON object, with at least `factor` and `long_factor`.

    Returns:
        The method; for "longrope:FILE", the RoPE scaling.

    Raises:
        UserError: the method is unknown, a number is invalid, or the file cannot be read.
    """
    method, _, rest = spec.strip().partition(":")
    if method == LONGROPE and rest:
        return _longrope(rest)
    kind = _METHODS.get(method)
    numbers = re.split("[:,]", rest) if rest else []
    if kind is None or len(numbers) != len(kind.numbers):
        raise UserError(f"extrapolation must be one of {', '.join(SPELLINGS)}; got {brief(spec)}")
    if not all(re.fullmatch("[0-9]{1,10}", number.strip()) and 1 <= int(number) <= _LARGEST for number in numbers):
        raise UserError(
            f"{' and '.join(kind.numbers)} of extrapolation={method} must be whole numbers of at least 1; got "
            f"{brief(rest)}"
        )
    return Extrapolation(method=method, numbers=tuple(map(int, numbers)))


def _longrope(file: str) -> dict[str, Any]:
    """Reads a LongRoPE scaling (Ding et al. 2024, arXiv 2402.13753) from a JSON file."""
    content = read_json(local_path(file), "LongRoPE's scaling")
    scaling = dict(content) if isinstance(content, Mapping) else {}
    if not any(_is_factor(scaling.get(name)) for name in ("factor", "attention_factor")):
        raise UserError(
            f"{file!r} has no factor above 0, from which LongRoPE's attention factor is computed: add it, as in "
            '{"factor": 16, "long_factor": [...]}'
        )
    factors = scaling.get("long_factor")
    if isinstance(factors, list):
        scaling.setdefault("short_factor", [1.0] * len(factors))
    for name in ("long_factor", "short_factor"):
        numbers = scaling.get(name)
        if not isinstance(numbers, list) or not numbers or not all(_is_factor(number) for number in numbers):
            raise UserError(
                f"{name} of the longrope scaling in {file!r} must be a list of numbers above 0; got {brief(numbers)}"
            )
        scaling[name] = [float(number) for number in numbers]
    return parse_rope_scaling({"rope_type": LONGROPE, **scaling})


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
