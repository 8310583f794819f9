"""Scores (position, target) pairs inside sequences, in batches of one length."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from sbeval.model_adapters.batching import run_in_batches
from sbeval.model_adapters.meter import Meter
from sbeval.scoring import TokenScorer
from sbeval.target_logprobs import TargetLogprobs, TargetLogprobsRequest, TargetSequence, resolve_sequence


def score_targets(
    requests: Sequence[TargetLogprobsRequest],
    scorer: TokenScorer,
    *,
    device: torch.device,
    max_tokens: int,
    hold: Callable[[int], AbstractContextManager[None]],
    meter: Meter,
    done: Callable[[int, TargetLogprobs], None],
) -> None:
    """Scores every request, longest first, and calls `done(index, result)` as each batch finishes.

    A batch holds requests of one length and runs inside `hold(length)`.
    """

    def run(batch: Sequence[int]) -> None:
        started = time.perf_counter()
        loaded = [_load(requests[index]) for index in batch]
        with hold(requests[batch[0]].inputs):
            results = _score_batch(loaded, scorer, device)
        meter.add(sum(requests[index].inputs for index in batch), time.perf_counter() - started)
        for index, result in zip(batch, results, strict=True):
            done(index, result)

    run_in_batches(
        sorted(range(len(requests)), key=lambda index: -requests[index].inputs),
        run,
        length_tokens=lambda index: requests[index].inputs,
        max_rows=None,
        max_tokens=max_tokens,
        same_length=True,
    )


def _load(request: TargetLogprobsRequest) -> TargetSequence:
    sequence = resolve_sequence(request.key)
    if len(sequence.inputs_L) != request.inputs or not len(sequence.targets_T):
        raise ValueError(f"{request} does not fit the {len(sequence.inputs_L)} inputs its key names")
    return sequence


def _score_batch(batch: Sequence[TargetSequence], scorer: TokenScorer, device: torch.device) -> list[TargetLogprobs]:
    scores = scorer.score(
        torch.from_numpy(np.stack([sequence.inputs_L for sequence in batch])).to(device),
        torch.from_numpy(np.repeat(np.arange(len(batch)), [len(sequence.targets_T) for sequence in batch])),
        torch.from_numpy(np.concatenate([sequence.positions_T for sequence in batch])),
        torch.from_numpy(np.concatenate([sequence.targets_T for sequence in batch])),
    )
    ends = np.cumsum([len(sequence.targets_T) for sequence in batch])[:-1]
    logprobs, greedy = np.split(scores.logprobs.numpy(), ends), np.split(scores.greedy.numpy(), ends)
    return [TargetLogprobs(*pair) for pair in zip(logprobs, greedy, strict=True)]
