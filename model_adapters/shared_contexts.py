"""Continuations of one long context, such as the choices of a question: the context is read once."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from sbeval.model_adapters.batching import free_memory, out_of_memory
from sbeval.model_adapters.meter import Meter
from sbeval.model_adapters.windows import RunScores
from sbeval.scoring import TokenScorer

# where reading a context again costs more than running its continuations outside the batches of everything else
GPU_CONTEXT_TOKENS = 8192
CPU_CONTEXT_TOKENS = 32


def shared_contexts(
    pairs: Sequence[tuple[list[int], list[int]]], cut_tokens: Sequence[int], device: torch.device
) -> dict[tuple[int, ...], list[int]]:
    """Returns the contexts worth reading once, each with the indices of its (context, continuation) pairs.

    Args:
        pairs: context and continuation tokens.
        cut_tokens: how much of each context did not fit; contexts that were cut are not shared.
        device: what the model runs on.
    """
    least = CPU_CONTEXT_TOKENS if device.type == "cpu" else GPU_CONTEXT_TOKENS
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (context, _) in enumerate(pairs):
        if len(context) >= least and not cut_tokens[index]:
            groups.setdefault(tuple(context), []).append(index)
    # continuations that differ in their last token alone are one model input anyway
    return {
        context: indices
        for context, indices in groups.items()
        if len({tuple(pairs[index][1][:-1]) for index in indices}) > 1
    }


def score_shared_contexts(
    groups: Mapping[tuple[int, ...], Sequence[int]],
    continuations: Sequence[list[int]],
    scorer: TokenScorer,
    *,
    device: torch.device,
    hold: Callable[[int], AbstractContextManager[None]],
    meter: Meter,
    done: Callable[[int, RunScores], None],
) -> None:
    """Scores the continuations of each context, and calls `done(index, scores)` for each.

    Stops early where the model cannot share a context or memory runs out, which leaves the rest to be run one by one.
    """
    for context, indices in sorted(groups.items(), key=lambda group: -len(group[0])):
        started = time.perf_counter()
        try:
            with hold(len(context)):
                found = scorer.score_after(
                    torch.tensor(context, device=device),
                    [torch.tensor(continuations[index], device=device) for index in indices],
                )
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            found = None
        if found is None:
            free_memory()
            return
        read = len(context) + sum(len(continuations[index]) - 1 for index in indices)
        meter.add(read, time.perf_counter() - started)
        for index, scores in zip(indices, found, strict=True):
            done(index, RunScores(np.asarray(scores.logprobs.numpy()), bool(scores.greedy.all())))
