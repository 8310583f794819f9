"""Runs the command `sbeval` with one rank that fails, hangs or dies when it scores requests.

Or every rank fails with an error of the package, or one runs out of memory while it gathers keys. Ranks in
RANKS_THAT_READ_LATE, such as "2 3", take seconds longer to read the error of another rank.

python -m rank_that ARGUMENT..., with RANK_THAT="3 fails" in the environment.
"""

import os
import signal
import time
from typing import Any

import torch

from sbeval.attention.context_parallel import ContextParallel
from sbeval.errors import UserError
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.processes import ranks

SENTENCE = "Expected a test to go well, found one that does not."


scoring = False


def scores(self: StickBreakingLM, requests: Any, **options: Any) -> Any:
    global scoring
    scoring = True
    rank, does = os.environ["RANK_THAT"].split()
    if rank in (str(self.rank), "any"):
        if does == "raises":
            ranks._READ_SECONDS = 6.0  # on a slow machine, the rank that is first takes a while to print
            raise KeyError("of the package")
        if does == "fails":
            raise UserError(SENTENCE)
        if does == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    return whole(self, requests, **options)


def gathers(self: ContextParallel, *arguments: Any) -> Any:
    rank, does = os.environ["RANK_THAT"].split(maxsplit=1)
    if self.rank == int(rank) and does == "runs out":
        raise torch.OutOfMemoryError
    return gather(self, *arguments)


def reads_late(self: ranks._Watch, key: str) -> str | None:
    if os.environ["RANK"] in os.environ.get("RANKS_THAT_READ_LATE", "").split():
        time.sleep(2.5)  # longer than the failed rank waits for others
    return read(self, key)


def late_in_scoring(self: ranks._Watch, step: int) -> list[str]:
    """Names no rank before scoring, where either rank may be the slower one to load the model."""
    return late(self, step) if scoring else []


if __name__ == "__main__":
    late = ranks._Watch._late
    ranks._Watch._late = late_in_scoring  # type: ignore[method-assign]
    read = ranks._Watch._read
    ranks._Watch._read = reads_late  # type: ignore[method-assign]
    gather = ContextParallel.gather
    ContextParallel.gather = gathers  # type: ignore[method-assign]
    whole = StickBreakingLM.token_logprobs
    StickBreakingLM.token_logprobs = scores  # type: ignore[method-assign]
    from sbeval.__main__ import main

    main()
