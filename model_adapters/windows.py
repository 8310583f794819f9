"""Scores windows of tokens in batches sorted by length; every scoring request takes this path to the model."""

import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sbeval.corpora import resolve_tokens
from sbeval.model_adapters.batching import BatchLimits, DoesNotFit, out_of_memory, run_in_batches
from sbeval.model_adapters.session import Session
from sbeval.scoring.context_parallel import ContextParallelScorer
from sbeval.scoring.non_finite import NonFiniteError
from sbeval.scoring.pending import PendingScores, to_device
from sbeval.scoring.requests import TokenLogprobsRequest
from sbeval.scoring.scorer import Prefix

# a child of lm-eval's logger, whose level is INFO: under another name the line would not be shown
logger = logging.getLogger("lm_eval.sbeval.context_parallel")
Tokens = NDArray[np.int64]


class LoadedWindow(NamedTuple):
    """Model inputs, and one or more runs of targets that each end right after the last input.

    Attributes:
        inputs: int64 [L].
        target_runs: int64 arrays of 1 to L tokens; the last token of each is predicted by the last input.
    """

    inputs: Tokens
    target_runs: list[Tokens]


class ScoredWindow(NamedTuple):
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


def window(inputs: Sequence[int], target_runs: Sequence[Sequence[int]]) -> ScoredWindow:
    """Returns a window of tokens that are already in memory."""
    loaded = LoadedWindow(np.asarray(inputs), [np.asarray(targets) for targets in target_runs])
    return ScoredWindow(len(inputs), lambda: loaded)


def rolling_windows(tokens: Sequence[int], *, lead_in: int, max_length: int) -> list[ScoredWindow]:
    """Returns the windows of `loglikelihood_rolling`: every token is a target once, after up to `max_length` inputs.

    They are lm-eval's windows with one token of context. The last takes inputs from the one before to be full.

    Args:
        tokens: a text.
        lead_in: the token fed before its first token.
        max_length: most inputs of a window.
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


def score_windows(
    session: Session,
    windows: Sequence[ScoredWindow],
    done: Callable[[int, list[RunScores]], None],
    *,
    batches: BatchLimits,
    name: Callable[[int], str],
) -> None:
    """Scores every window, longest first, and calls `done(index, scores of each run)` as each batch finishes.

    While the scores of one batch are read, the device computes the next `batches_ahead`. Even if an error ends the
    loop, the scores of batches already started are read first.

    Args:
        session: of the model.
        windows: what is scored.
        done: takes the scores.
        batches: what a batch may hold.
        name: names the request of a window.

    Raises:
        UserError: the model has no positions for a window.
        NonFiniteError: a log-probability is not finite.
        DoesNotFit: memory does not suffice for a single window, or for reading the scores of a batch.
    """
    session.check_positions(max((window.length for window in windows), default=0))
    together = _score_together(session, windows, done, name=name)
    waiting: deque[tuple[Sequence[int], PendingBatch]] = deque()
    clock = time.perf_counter()

    def finish() -> None:
        nonlocal clock
        batch, pending = waiting[0]
        try:
            scores = pending.result()
        except Exception as error:
            waiting.popleft()
            if isinstance(error, NonFiniteError):
                raise error.of(name(batch[error.row])) from None
            raise
        waiting.popleft()  # only now: after an interrupt during the wait it is read below
        now = time.perf_counter()
        session.meter.add(sum(windows[index].length for index in batch), now - clock)
        clock = now
        for index, window_scores in zip(batch, scores, strict=True):
            done(index, window_scores)

    def run(batch: Sequence[int]) -> None:
        loaded = [windows[index].load() for index in batch]
        with session.rope.hold(windows[batch[0]].length):
            waiting.append((batch, start_batch(session, loaded)))
        try:
            while len(waiting) > session.batches_ahead:
                finish()
        except (RuntimeError, MemoryError) as error:
            if out_of_memory(error):  # of an earlier batch: running this one again would lose or repeat scores
                raise DoesNotFit("Expected memory for the scores of a batch, but it ran out: free some.") from error
            raise

    order = sorted(set(range(len(windows))) - together, key=lambda index: -windows[index].length)
    try:
        with session.autocast():
            run_in_batches(order, run, length_tokens=lambda index: windows[index].length, limits=batches)
        while waiting:
            finish()
    except BaseException:
        while waiting:
            with contextlib.suppress(Exception):  # the first error is the one to report
                finish()
        raise


def _score_together(
    session: Session,
    windows: Sequence[ScoredWindow],
    done: Callable[[int, list[RunScores]], None],
    *,
    name: Callable[[int], str],
) -> set[int]:
    """Scores the long windows of all processes of a group together, and returns the indices of this process's."""
    scorer = session.scorer
    if not isinstance(scorer, ContextParallelScorer):
        return set()
    context, least = scorer.context, session.own_batches.max_tokens or 0
    own = [index for index, window in enumerate(windows) if window.length >= least]
    everyone = context.gather_objects([(windows[index].length, index) for index in own])
    order = sorted((-length, rank, index) for rank, asked in enumerate(everyone) for length, index in asked)
    for minus_length, rank, index in order:
        started = time.perf_counter()
        mine = rank == context.rank
        window, label = context.from_rank(rank, (windows[index].load(), name(index)) if mine else None)
        try:
            with session.autocast(), session.rope.hold(-minus_length):
                (scores,) = start_batch(session, [window], start=scorer.start_together).result()
        except NonFiniteError as error:
            raise error.of(label) from None
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise DoesNotFit(
                f"Expected a window of {-minus_length} tokens to fit into the memory of {context.ranks} processes, but "
                "it ran out: use more processes with a larger context_parallel, a shorter length or dtype=bfloat16."
            ) from error
        if mine:
            session.meter.add(-minus_length, time.perf_counter() - started)
            done(index, scores)
    if order and context.transfers.whole_bytes:
        gib = (context.transfers.received_bytes / 2**30, context.transfers.whole_bytes / 2**30)
        logger.info("keys and values received from other processes so far: %.3f GiB; without skipping: %.3f GiB", *gib)
    return set(own)


class PendingBatch(NamedTuple):
    """Scores of a batch that a device may still be computing.

    Attributes:
        scores: of all targets, one run after another.
        run_tokens: number of targets in each run of each window.
    """

    scores: PendingScores
    run_tokens: list[list[int]]

    def result(self) -> list[list[RunScores]]:
        """Waits for the scores of each run of each window, and returns them."""
        scores = self.scores.result()
        ends = np.cumsum([tokens for window in self.run_tokens for tokens in window])[:-1]
        logprobs = iter(np.split(scores.logprobs.numpy(), ends))
        greedy = iter(np.split(scores.greedy.numpy(), ends))
        return [[RunScores(next(logprobs), bool(next(greedy).all())) for _ in window] for window in self.run_tokens]


def start_batch(
    session: Session,
    batch: Sequence[LoadedWindow],
    *,
    after: Prefix | None = None,
    start: Callable[..., PendingScores] | None = None,
) -> PendingBatch:
    """Starts to score each run of each window, in one call of the model.

    Args:
        session: of the model.
        batch: windows, padded here on the right.
        after: the prefix of the windows' inputs, from `TokenScorer.read`.
        start: `ContextParallelScorer.start_together` if other processes score the same batch; None means `start`.
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
    options = {} if after is None else {"after": after}
    pending = (start or session.scorer.start)(
        to_device(torch.from_numpy(input_ids), session.device),
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.concatenate(positions)),
        torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        **options,
    )
    return PendingBatch(pending, [[len(run) for run in window.target_runs] for window in batch])
