"""Windows of tokens, cut out of what is asked for, to scores, in batches sorted by length."""

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sbeval.corpora import resolve_tokens
from sbeval.model_adapters.answers import handed_over
from sbeval.model_adapters.batching import BatchLimits, fitting, free_memory, out_of_memory, run_in_batches
from sbeval.model_adapters.self_test.real import Kind
from sbeval.model_adapters.session import Session
from sbeval.scoring.context_parallel import ContextParallelScorer
from sbeval.scoring.non_finite import NonFiniteError
from sbeval.scoring.requests import TargetSequence, TokenLogprobsRequest
from sbeval.scoring.scorer import PendingScores, Prefix, to_device

# a child of lm-eval's logger, whose level is INFO: under another name the line would not be shown
logger = logging.getLogger("lm_eval.sbeval.context_parallel")
_RELAYED_CHUNK_LOGITS = 2**29  # a GPU takes some 1,000 kernels, and then the host waits, with the next window in hand

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


class RunScores(NamedTuple):
    """Log-probabilities of one run of targets, float32 in nats, and whether every target is the most probable token."""

    logprobs: NDArray[np.float32]
    greedy: bool

    @property
    def total(self) -> float:
        """Sum of the log-probabilities, added in fp64."""
        return float(self.logprobs.sum(dtype=np.float64))


Windows = Mapping[int, ScoredWindow]
Name = Callable[[int], str]
Scored = tuple[int, list[RunScores]]
"""Number of a window, and the scores of each of its runs."""
Scores = Generator[Scored, None, None]


def scored(session: Session, windows: Windows, *, batches: BatchLimits, name: Name) -> Scores:
    """Scores every window, longest first, and yields each as its batch finishes; `name` names the request of a window.

    While the scores of one batch are read, the device computes the next `batches_ahead`. Even if an error ends the
    loop, the scores of batches already started are yielded first.

    Raises:
        UserError: the model has no positions for a window.
        NonFiniteError: a log-probability is not finite.
        DoesNotFit: memory does not suffice for a single window, or for reading the scores of a batch.
    """
    session.check_positions(max((window.length for window in windows.values()), default=0))
    together: set[int] = set()
    if isinstance(session.scorer, ContextParallelScorer):
        least = session.own_batches.max_tokens or 0
        together = {index for index, window in windows.items() if window.length >= least}
        yield from _scored_together(session, session.scorer, windows, together, name)
    started: deque[tuple[Sequence[int], PendingBatch]] = deque()

    def start(batch: Sequence[int]) -> PendingBatch:
        loaded = [windows[index].load() for index in batch]
        relay, scorer = session.relay, session.scorer
        while True:
            if relay is not None and relay.windows > 1:
                scorer.chunk_logits = _RELAYED_CHUNK_LOGITS
            try:
                with relay.window() if relay else contextlib.nullcontext(), session.rope.hold(windows[batch[0]].length):
                    return start_batch(session, loaded)
            except (RuntimeError, MemoryError) as error:
                if relay is None or not out_of_memory(error) or not relay.alone():
                    raise
            finally:
                if relay is not None:
                    scorer.chunk_logits = None
            free_memory()  # that of the batches under way too, for which it waits

    def finished() -> list[Scored]:
        """Waits for the first of the started batches, and takes it away unless the wait is interrupted."""
        batch, pending = started[0]
        try:
            with fitting("Expected memory for the scores of a batch, but it ran out: free some."):
                scores = pending.result()
        except Exception as error:
            started.popleft()
            if isinstance(error, NonFiniteError):
                raise error.of(name(batch[error.row])) from None
            raise
        started.popleft()
        session.meter.add(sum(windows[index].length for index in batch))
        return list(zip(batch, scores, strict=True))

    def again(texts: Sequence[TargetSequence]) -> list[NDArray[np.float32]]:
        return score_texts(session, texts)

    order = sorted((index for index in windows if index not in together), key=lambda index: -windows[index].length)
    session.meter.begin()
    try:
        with session.autocast():
            length_of = {index: window.length for index, window in windows.items()}
            begun = 0
            if order:
                session.real.begin(again)
            while begun < len(order):  # anew where a batch was wrong, and its windows are run in another way
                limits = session.real.limits(batches, "scoring")
                for batch in run_in_batches(order[begun:], start, length_tokens=length_of.__getitem__, limits=limits):
                    started.append(batch)
                    lengths = [length_of[index] for index in batch[0]]
                    kind: Kind = "scored" if len(set(lengths)) == 1 else "padded"
                    if session.real.wants(kind, len(lengths), lengths[0]):
                        while len(started) > 1:
                            yield from handed_over(finished())
                        results = finished()
                        texts = [as_sequence(windows[index].load()) for index in batch[0]]
                        if not session.real.stand(kind, texts, [joined(scores) for _, scores in results], again):
                            break
                        session.meter.begin()
                        yield from handed_over(results)
                    begun += len(lengths)
                    while len(started) > session.batches_ahead:
                        yield from handed_over(finished())
        while started:
            yield from handed_over(finished())
        if order:
            session.real.end(again)
    except GeneratorExit:
        raise
    except BaseException:
        while started:
            with contextlib.suppress(Exception):  # the first error is the one to report
                yield from handed_over(finished())
        raise


def _scored_together(
    session: Session, scorer: ContextParallelScorer, windows: Windows, long: set[int], name: Name
) -> Scores:
    """Scores the long windows of all processes of a group, one after another, and yields those of this process."""
    context = scorer.context
    everyone = context.gather_objects([(windows[index].length, index) for index in sorted(long)])
    order = sorted((-length, rank, index) for rank, asked in enumerate(everyone) for length, index in asked)
    for minus_length, rank, index in order:
        session.meter.begin()
        mine = rank == context.rank
        window, label = context.from_rank(rank, (windows[index].load(), name(index)) if mine else None)
        does_not_fit = (
            f"Expected a window of {-minus_length} tokens to fit into the memory of {context.ranks} processes, but it "
            "ran out: use more processes with a larger context_parallel, a shorter length or dtype=bfloat16."
        )
        try:
            with fitting(does_not_fit), session.autocast(), session.rope.hold(-minus_length):
                (scores,) = start_batch(session, [window], start=scorer.start_together).result()
        except NonFiniteError as error:
            raise error.of(label) from None
        if mine:
            session.meter.add(-minus_length)
            yield index, scores
    if order and context.transfers.whole_bytes:
        gib = (context.transfers.received_bytes / 2**30, context.transfers.whole_bytes / 2**30)
        logger.info("keys and values received from other processes so far: %.3f GiB; without skipping: %.3f GiB", *gib)


class PendingBatch(NamedTuple):
    """Scores of a batch that a device may still be computing, and the number of targets in each run of each window."""

    scores: PendingScores
    run_tokens: list[list[int]]

    def result(self) -> list[list[RunScores]]:
        """Waits for the scores of each run of each window, and returns them."""
        scores = self.scores.result()
        ends = np.cumsum([tokens for window in self.run_tokens for tokens in window])[:-1]
        logprobs = iter(np.split(scores.logprobs.numpy(), ends))
        greedy = iter(np.split(scores.greedy.numpy(), ends))
        return [[RunScores(next(logprobs), bool(next(greedy).all())) for _ in window] for window in self.run_tokens]


Start = Callable[..., PendingScores]


def as_sequence(window: LoadedWindow) -> TargetSequence:
    """Returns a window with the position of each target."""
    length = len(window.inputs)
    positions = np.concatenate([np.arange(length - len(run), length) for run in window.target_runs])
    return TargetSequence(window.inputs, positions, np.concatenate(window.target_runs))


def joined(runs: Sequence[RunScores]) -> NDArray[np.float32]:
    """Returns the log-probabilities of all targets of a window, in the order of `as_sequence`."""
    return np.concatenate([run.logprobs for run in runs])


def score_texts(session: Session, texts: Sequence[TargetSequence]) -> list[NDArray[np.float32]]:
    """Returns the log-probabilities of each text's targets, of texts that are read in one batch without a prefix."""
    longest = max(len(text.inputs_L) for text in texts)
    relayed = session.relay.window() if session.relay else contextlib.nullcontext()
    with relayed, session.autocast(), session.rope.hold(longest):
        pending = _start_texts(session, texts, session.scorer.start)
    ends = np.cumsum([len(text.targets_T) for text in texts])[:-1]
    return np.split(pending.result().logprobs.numpy(), ends)


def start_batch(
    session: Session, batch: Sequence[LoadedWindow], *, after: Prefix | None = None, start: Start | None = None
) -> PendingBatch:
    """Starts to score each run of each window, padded here on the right, in one call of the model.

    A prefix of all inputs, from `TokenScorer.read`, may stand before them. `start` is another method than the scorer's
    own if other processes score the same batch.
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
