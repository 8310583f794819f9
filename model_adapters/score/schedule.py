"""Scores windows in batches sorted by length; the device computes a batch while the host reads the scores before it."""

import contextlib
import functools
from collections import deque
from collections.abc import Sequence

from sbeval.model_adapters.answers import handed_over
from sbeval.model_adapters.batching import BatchLimits, fitting, free_memory, out_of_memory, run_in_batches
from sbeval.model_adapters.score.batch import (
    PendingBatch,
    RequestName,
    ScoredWindows,
    Windows,
    WindowScores,
    joined,
    score_texts,
    start_batch,
)
from sbeval.model_adapters.score.context_parallel import score_together
from sbeval.model_adapters.score.windows import as_sequence
from sbeval.model_adapters.self_test.real import Kind
from sbeval.model_adapters.session import Session
from sbeval.scoring.context_parallel import ContextParallelScorer
from sbeval.scoring.non_finite import NonFiniteError

# for pipeline placement (`relay`): large chunks mean few kernels, of which a GPU queues only about 1,000
_RELAYED_CHUNK_LOGITS = 2**29


def score_windows(session: Session, windows: Windows, *, batches: BatchLimits, name: RequestName) -> ScoredWindows:
    """Scores every window, longest first, and yields each window's number and scores when its batch is finished.

    While the host reads the scores of a batch, the device computes the next `batches_ahead` batches. If an error
    occurs, the scores of batches that are already started are yielded before it is raised.

    Args:
        session: the session of the model.
        windows: the windows by number.
        batches: the limits of a batch.
        name: returns the name of a window's request, for error messages.

    Raises:
        UserError: a window is longer than the model's learned positions.
        NonFiniteError: a log-probability is not finite.
        DoesNotFit: a single window, or the scores of a batch, do not fit into memory.
    """
    session.check_positions(max((window.length for window in windows.values()), default=0))
    together: set[int] = set()
    if isinstance(session.scorer, ContextParallelScorer):
        least = session.own_batches.max_tokens or 0
        together = {index for index, window in windows.items() if window.length >= least}
        yield from score_together(session, session.scorer, windows, together, name)
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
            free_memory()  # waits for the batches that are already started, so that their memory is freed, too

    def finished() -> list[tuple[int, WindowScores]]:
        """Waits for the oldest started batch and returns its scores; an interrupted wait leaves it in `started`."""
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

    again = functools.partial(score_texts, session)
    order = sorted((index for index in windows if index not in together), key=lambda index: -windows[index].length)
    session.meter.begin()
    try:
        with session.autocast():
            length_of = {index: window.length for index, window in windows.items()}
            begun = 0
            if order:
                session.real.begin(again)
            while begun < len(order):  # if the check of a batch fails, its texts are scored again under tighter limits
                limits = session.real.limits(batches, "scoring")
                for batch in run_in_batches(order[begun:], start, length_tokens=length_of.__getitem__, limits=limits):
                    started.append(batch)
                    lengths = [length_of[index] for index in batch[0]]
                    kind: Kind = "one length" if len(set(lengths)) == 1 else "padded"
                    if session.real.needs_check(kind, len(lengths), lengths[0]):
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
            with contextlib.suppress(Exception):  # only the first error is reported
                yield from handed_over(finished())
        raise
