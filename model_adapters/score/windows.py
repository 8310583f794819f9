"""Builds windows from requests: a window is one input sequence of the model with the targets to score in it."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import resolve_tokens
from sbeval.scoring.requests import TargetSequence, TokenLogprobsRequest

TokenIds = NDArray[np.int64]


class LoadedWindow(NamedTuple):
    """Model inputs, int64 [L], and one or more runs of 1 to L consecutive targets.

    The last target of each run is the token after the last input: several continuations can share their inputs.
    """

    inputs: TokenIds
    target_runs: list[TokenIds]


class PlannedWindow(NamedTuple):
    """The number of inputs of a window, and `load`, which returns its tokens and is called right before it runs."""

    length: int
    load: Callable[[], LoadedWindow]


def window_of(inputs: Sequence[int], target_runs: Sequence[Sequence[int]]) -> PlannedWindow:
    """Returns a window of tokens that are already in memory."""
    loaded = LoadedWindow(np.asarray(inputs), [np.asarray(targets) for targets in target_runs])
    return PlannedWindow(len(inputs), lambda: loaded)


def rolling_windows(tokens: Sequence[int], *, lead_in: int, max_length: int) -> list[PlannedWindow]:
    """Returns the windows of `loglikelihood_rolling`: each token of a text is a target in one window.

    As in lm-eval, `lead_in` is the input before the first token, a window has at most `max_length` inputs, and the last
    of several windows also has that many: it begins with tokens that are targets of the window before.
    """

    def load(first: int, stop: int, target_count: int) -> LoadedWindow:
        before = [lead_in, *tokens[:stop]] if first == 0 else tokens[first - 1 : stop]
        window_tokens = np.asarray(before, dtype=np.int64)
        return LoadedWindow(window_tokens[:-1], [window_tokens[-target_count:]])

    windows = []
    for begin in range(0, len(tokens), max_length):
        stop = min(begin + max_length, len(tokens))
        first = max(0, stop - max_length) if begin else 0
        windows.append(PlannedWindow(stop - first, functools.partial(load, first, stop, stop - begin)))
    return windows


def requested_window(request: TokenLogprobsRequest) -> PlannedWindow:
    """Returns the window of a request: its inputs are `lead_in`, such as BOS, and all tokens of `key` but the last."""

    def load() -> LoadedWindow:
        tokens = np.asarray(resolve_tokens(request.key), dtype=np.int64)
        if len(tokens) != request.context_length or not 1 <= request.scored <= request.context_length:
            raise ValueError(f"{request} does not fit the {len(tokens)} tokens that its key names")
        inputs = np.concatenate([np.array([request.lead_in], dtype=np.int64), tokens[:-1]])
        return LoadedWindow(inputs, [tokens[-request.scored :]])

    return PlannedWindow(request.context_length, load)


def as_sequence(window: LoadedWindow) -> TargetSequence:
    """Returns a window as a `TargetSequence`, which holds the position of each target."""
    length = len(window.inputs)
    positions = np.concatenate([np.arange(length - len(run), length) for run in window.target_runs])
    return TargetSequence(window.inputs, positions, np.concatenate(window.target_runs))
