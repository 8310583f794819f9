"""One batch of windows: padded, started on the device, and read when its scores are needed."""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sbeval.model_adapters.score.windows import LoadedWindow, PlannedWindow, as_sequence
from sbeval.model_adapters.session import Session
from sbeval.scoring.requests import TargetSequence
from sbeval.scoring.scorer import PendingScores, Prefix, to_device

Start = Callable[..., PendingScores]
WindowScores = list["RunScores"]
"""The scores of a window: one `RunScores` for each run of targets, such as one continuation after a context."""
Windows = Mapping[int, PlannedWindow]
RequestName = Callable[[int], str]
"""Maps a window's number to the name of its request, for error messages."""
ScoredWindows = Generator[tuple[int, WindowScores], None, None]
"""Yields the number of each window with its scores."""


class RunScores(NamedTuple):
    """Log-probabilities of consecutive targets, float32 in nats, and whether all targets have the largest logits."""

    logprobs: NDArray[np.float32]
    greedy: bool

    @property
    def total(self) -> float:
        """Sum of the log-probabilities, added in fp64."""
        return float(self.logprobs.sum(dtype=np.float64))


class PendingBatch(NamedTuple):
    """A started batch, whose scores the device may still be computing.

    `run_tokens` holds, for each window, the number of targets in each of its runs of targets.
    """

    scores: PendingScores
    run_tokens: list[list[int]]

    def result(self) -> list[WindowScores]:
        """Waits for the device, and returns the scores of every window in the batch."""
        scores = self.scores.result()
        ends = np.cumsum([tokens for window in self.run_tokens for tokens in window])[:-1]
        logprobs = iter(np.split(scores.logprobs.numpy(), ends))
        greedy = iter(np.split(scores.greedy.numpy(), ends))
        return [[RunScores(next(logprobs), bool(next(greedy).all())) for _ in window] for window in self.run_tokens]


def joined(runs: Sequence[RunScores]) -> NDArray[np.float32]:
    """Returns the log-probabilities of all targets of a window, in the order of `as_sequence`."""
    return np.concatenate([run.logprobs for run in runs])


def score_texts(session: Session, texts: Sequence[TargetSequence]) -> list[NDArray[np.float32]]:
    """Scores texts in one batch without using a cached prefix, and returns the log-probabilities of their targets."""
    longest = max(len(text.inputs_L) for text in texts)
    relayed = session.relay.window() if session.relay else contextlib.nullcontext()
    with relayed, session.autocast(), session.rope.hold(longest):
        pending = _start_texts(session, texts, session.scorer.start)
    ends = np.cumsum([len(text.targets_T) for text in texts])[:-1]
    return np.split(pending.result().logprobs.numpy(), ends)


def start_batch(
    session: Session, batch: Sequence[LoadedWindow], *, after: Prefix | None = None, start: Start | None = None
) -> PendingBatch:
    """Starts the forward pass of a right-padded batch of windows, and returns without waiting for its scores.

    Args:
        session: the session of the model.
        batch: the windows, without the tokens of the prefix if `after` is passed.
        after: the KV cache of a prefix that all windows continue, from `TokenScorer.read`; None without a prefix.
        start: the scorer's method to call; None for `start`. Context parallelism passes `start_together`.
    """
    options = {} if after is None else {"after": after}
    pending = _start_texts(session, [as_sequence(window) for window in batch], start or session.scorer.start, **options)
    return PendingBatch(pending, [[len(run) for run in window.target_runs] for window in batch])


def _start_texts(session: Session, texts: Sequence[TargetSequence], start: Start, **options: Any) -> PendingScores:
    input_ids = np.zeros((len(texts), max(len(text.inputs_L) for text in texts)), dtype=np.int64)
    for row, text in enumerate(texts):
        input_ids[row, : len(text.inputs_L)] = text.inputs_L
    return start(
        to_device(torch.from_numpy(input_ids), session.device),
        torch.from_numpy(np.repeat(np.arange(len(texts)), [len(text.targets_T) for text in texts])),
        torch.from_numpy(np.concatenate([text.positions_T for text in texts])),
        torch.from_numpy(np.concatenate([text.targets_T for text in texts]).astype(np.int64)),
        **options,
    )
