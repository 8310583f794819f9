"""Windows of tokens, cut out of what lm-eval and this project's tasks ask for."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import resolve_tokens
from sbeval.scoring.requests import TokenLogprobsRequest

TokenIds = NDArray[np.int64]


class LoadedWindow(NamedTuple):
    """Model inputs, int64 [L], and one or more runs of 1 to L targets that each end right after the last input."""

    inputs: TokenIds
    target_runs: list[TokenIds]


class ScoredWindow(NamedTuple):
    """A window of so many model inputs, whose tokens are fetched when its batch is run."""

    length: int
    load: Callable[[], LoadedWindow]


def window_of(inputs: Sequence[int], target_runs: Sequence[Sequence[int]]) -> ScoredWindow:
    """Returns a window of tokens that are already in memory."""
    loaded = LoadedWindow(np.asarray(inputs), [np.asarray(targets) for targets in target_runs])
    return ScoredWindow(len(inputs), lambda: loaded)


def rolling_windows(tokens: Sequence[int], *, lead_in: int, max_length: int) -> list[ScoredWindow]:
    """Returns the windows of `loglikelihood_rolling`: every token is a target once, after up to `max_length` inputs.

    They are lm-eval's windows with one token of context, the lead-in before the first. The last takes inputs from the
    one before to be full.
    """

    def load(first: int, stop: int, scored: int) -> LoadedWindow:
        before = [lead_in, *tokens[:stop]] if first == 0 else tokens[first - 1 : stop]
        read = np.asarray(before, dtype=np.int64)
        return LoadedWindow(read[:-1], [read[-scored:]])

    windows = []
    for begin in range(0, len(tokens), max_length):
        stop = min(begin + max_length, len(tokens))
        first = max(0, stop - max_length) if begin else 0
        windows.append(ScoredWindow(stop - first, functools.partial(load, first, stop, stop - begin)))
    return windows


def requested_window(request: TokenLogprobsRequest) -> ScoredWindow:
    """Returns the window a task asks for: the lead-in and the tokens that the request's key names, but the last."""

    def load() -> LoadedWindow:
        tokens = np.asarray(resolve_tokens(request.key), dtype=np.int64)
        if len(tokens) != request.context_length or not 1 <= request.scored <= request.context_length:
            raise ValueError(f"{request} does not fit the {len(tokens)} tokens its key names")
        inputs = np.concatenate([np.array([request.lead_in], dtype=np.int64), tokens[:-1]])
        return LoadedWindow(inputs, [tokens[-request.scored :]])

    return ScoredWindow(request.context_length, load)
