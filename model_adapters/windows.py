"""Scores windows of tokens in length-sorted batches: the one path from every scoring request to the model."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sbeval.corpora import resolve_tokens
from sbeval.model_adapters.batching import run_in_batches
from sbeval.model_adapters.meter import Meter
from sbeval.scoring import Prefix, TokenScorer
from sbeval.token_logprobs import TokenLogprobsRequest

Tokens = NDArray[np.int64]


class LoadedWindow(NamedTuple):
    """Model inputs, and one or more runs of targets that each end right after the last input.

    Attributes:
        inputs: int64 [L].
        target_runs: int64 arrays of 1 to L tokens; the last token of each is predicted by the last input.
    """

    inputs: Tokens
    target_runs: list[Tokens]


class Window(NamedTuple):
    """A window whose tokens are fetched when its batch is run.

    Attributes:
        length: number of model inputs.
        load: returns the tokens.
    """

    length: int
    load: Callable[[], LoadedWindow]


class RunScores(NamedTuple):
    """Scores of one run of targets.

    Attributes:
        logprobs: float32, one per target, in nats.
        greedy: whether every target is the model's most probable token.
    """

    logprobs: NDArray[np.float32]
    greedy: bool

    @property
    def total(self) -> float:
        """Sum of the log-probabilities, added in fp64."""
        return float(self.logprobs.sum(dtype=np.float64))


def window(inputs: Sequence[int], target_runs: Sequence[Sequence[int]]) -> Window:
    """Returns a window whose tokens are known already."""
    loaded = LoadedWindow(np.asarray(inputs), [np.asarray(targets) for targets in target_runs])
    return Window(len(inputs), lambda: loaded)


def requested_window(request: TokenLogprobsRequest) -> Window:
    """Returns the window a task asks for: the lead-in and all but the last of the tokens its key names."""

    def load() -> LoadedWindow:
        tokens = np.asarray(resolve_tokens(request.key), dtype=np.int64)
        if len(tokens) != request.context_length or not 1 <= request.scored <= request.context_length:
            raise ValueError(f"{request} does not fit the {len(tokens)} tokens its key names")
        inputs = np.concatenate([np.array([request.lead_in], dtype=np.int64), tokens[:-1]])
        return LoadedWindow(inputs, [tokens[-request.scored :]])

    return Window(request.context_length, load)


def score_windows(
    windows: Sequence[Window],
    scorer: TokenScorer,
    *,
    device: torch.device,
    max_rows: int | None,
    max_tokens: int | None,
    same_length: bool,
    hold: Callable[[int], AbstractContextManager[None]],
    meter: Meter,
    done: Callable[[int, list[RunScores]], None],
) -> None:
    """Scores every window, longest first, and calls `done(index, scores of each run)` as each batch finishes.

    A batch runs inside `hold(its longest window's length)`.
    """

    def run(batch: Sequence[int]) -> None:
        started = time.perf_counter()
        loaded = [windows[index].load() for index in batch]
        with hold(windows[batch[0]].length):
            scores = score_batch(loaded, scorer, device)
        meter.add(sum(windows[index].length for index in batch), time.perf_counter() - started)
        for index, window_scores in zip(batch, scores, strict=True):
            done(index, window_scores)

    order = sorted(range(len(windows)), key=lambda index: -windows[index].length)
    run_in_batches(
        order,
        run,
        length_tokens=lambda index: windows[index].length,
        max_rows=max_rows,
        max_tokens=max_tokens,
        same_length=same_length,
    )


def score_batch(
    batch: Sequence[LoadedWindow], scorer: TokenScorer, device: torch.device, *, after: Prefix | None = None
) -> list[list[RunScores]]:
    """Returns the scores of each run of each window, in one call of the model.

    Args:
        batch: windows, padded here on the right.
        scorer: scores tokens with the model.
        device: what the model runs on.
        after: what the windows' inputs follow, from `TokenScorer.read`.
    """
    longest = max(len(window.inputs) for window in batch)
    input_ids = np.zeros((len(batch), longest), dtype=np.int64)
    rows, positions, targets = [], [], []
    for row, window in enumerate(batch):
        length = len(window.inputs)
        input_ids[row, :length] = window.inputs
        for run in window.target_runs:
            rows.append(np.full(len(run), row))
            positions.append(np.arange(length - len(run), length))
            targets.append(run)
    scores = scorer.score(
        torch.from_numpy(input_ids).to(device),
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.concatenate(positions)),
        torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        after=after,
    )
    ends = np.cumsum([len(run) for run in targets])[:-1]
    logprobs = iter(np.split(scores.logprobs.numpy(), ends))
    greedy = iter(np.split(scores.greedy.numpy(), ends))
    return [[RunScores(next(logprobs), bool(next(greedy).all())) for _ in window.target_runs] for window in batch]
