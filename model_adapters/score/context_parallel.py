"""Context parallelism: all ranks of a process group score a long window together; each rank runs a part of its tokens.

lm-eval distributes documents over ranks and gathers results as usual, so each rank has windows of its own. The ranks
first exchange the lengths of all long windows in the group, and then score these one after another. Short windows need
no communication: each rank scores its own (docs/context_parallel.md).
"""

import logging

from sbeval.model_adapters.batching import fitting
from sbeval.model_adapters.score.batch import RequestName, ScoredWindows, Windows, start_batch
from sbeval.model_adapters.session import Session
from sbeval.scoring.context_parallel import ContextParallelScorer
from sbeval.scoring.non_finite import NonFiniteError

# named below `lm_eval`, because lm-eval shows INFO lines of its own loggers only
logger = logging.getLogger("lm_eval.sbeval.context_parallel")


def score_together(
    session: Session, scorer: ContextParallelScorer, windows: Windows, long: set[int], name: RequestName
) -> ScoredWindows:
    """Scores the long windows of all ranks in the group together, and yields the numbers and scores of this rank's.

    `long` holds the numbers of this rank's windows that the group scores together.
    """
    context = scorer.context
    everyone = context.gather_objects([(windows[index].length, index) for index in sorted(long)])
    order = sorted((-length, rank, index) for rank, theirs in enumerate(everyone) for length, index in theirs)
    for minus_length, rank, index in order:
        session.meter.begin()
        is_own_rank = rank == context.rank
        window, label = context.from_rank(rank, (windows[index].load(), name(index)) if is_own_rank else None)
        does_not_fit = (
            f"Expected a window of {-minus_length} tokens to fit into the memory of {context.ranks} processes, but it "
            "ran out: use more processes with a larger context_parallel, a shorter length or dtype=bfloat16."
        )
        try:
            with fitting(does_not_fit), session.autocast(), session.rope.hold(-minus_length):
                (scores,) = start_batch(session, [window], start=scorer.start_together).result()
        except NonFiniteError as error:
            raise error.of(label) from None
        if is_own_rank:
            session.meter.add(-minus_length)
            yield index, scores
    if order and context.transfers.whole_bytes:
        gib = (context.transfers.received_bytes / 2**30, context.transfers.whole_bytes / 2**30)
        logger.info(
            "keys and values received from other ranks so far: %.3f GiB; without skipping keys: %.3f GiB",
            *gib,
        )
