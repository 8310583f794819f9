"""The loss of windows of tokens, whole or with documents that do not see each other.

For the latter a window of joined documents is cut at its separators into segments. A model of this family takes all
segments of a batch packed into one row without padding (`cu_seqlens`). Other models run segments of similar length
together in one batch: padding on the right changes nothing under causal attention. Either way a segment is computed as
if alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbeval.models import SbevalForCausalLM
from sbeval.training.distributed import smallest_over_processes

SHORTEST_BUCKET_TOKENS = 64
Loss = Callable[[nn.Module, Tensor], Tensor]
"""From a model and windows of tokens [windows, length + 1] to the loss."""


def next_token_loss(model: nn.Module, window_tokens: Tensor) -> Tensor:
    """Returns the mean negative log-likelihood in nats of the tokens after the first of [windows, length + 1]."""
    logits = model(input_ids=window_tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), window_tokens[:, 1:].flatten())


class Segment(NamedTuple):
    """Model inputs `start` to `stop` (exclusive) of one row; their targets lie one further."""

    row: int
    start: int
    stop: int


def segments(window_tokens: Tensor, separator: int) -> list[Segment]:
    """Cuts windows [windows, length + 1] so that each segment begins with a separator, as scoring puts one before a
    document.
    """
    length = window_tokens.shape[1] - 1
    starts: list[list[int]] = [[0] for _ in range(window_tokens.shape[0])]
    for row, place in (window_tokens[:, :length] == separator).nonzero().tolist():
        if place:
            starts[row].append(place)
    return [
        Segment(row, start, stop)
        for row, row_starts in enumerate(starts)
        for start, stop in zip(row_starts, [*row_starts[1:], length], strict=True)
    ]


def document_loss(model: nn.Module, window_tokens: Tensor, separator: int) -> Tensor:
    """Returns the mean negative log-likelihood in nats over all targets, each seeing its own document only."""
    # data parallelism wraps the model
    ours = isinstance(getattr(model, "module", model), SbevalForCausalLM)
    return (packed_loss if ours else bucketed_loss)(model, window_tokens, separator)


def packed_loss(model: nn.Module, window_tokens: Tensor, separator: int) -> Tensor:
    """Returns the mean loss of [windows, length + 1] token ids, every window's segments packed into one row."""
    inputs = window_tokens[:, :-1]
    begins = inputs == separator
    begins[:, 0] = True
    starts = begins.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([starts, starts.new_tensor([inputs.numel()])]).to(torch.int32)
    logits = model(input_ids=inputs.reshape(1, -1), cu_seqlens=cu_seqlens, use_cache=False).logits
    return F.cross_entropy(logits[0].float(), window_tokens[:, 1:].flatten())


def bucketed_loss(model: nn.Module, window_tokens: Tensor, separator: int) -> Tensor:
    """Returns the mean loss of [windows, length + 1] token ids, segments of similar length padded to one batch.

    All processes run the model equally often: each pass is a meeting of those that share its weights.
    """
    buckets: dict[int, list[Segment]] = {}
    longest = window_tokens.shape[1] - 1
    for segment in segments(window_tokens, separator):
        size = max(SHORTEST_BUCKET_TOKENS, 1 << (segment.stop - segment.start - 1).bit_length())
        buckets.setdefault(min(size, longest), []).append(segment)
    batches = len(buckets)
    passes = -round(smallest_over_processes(torch.tensor(-batches, device=window_tokens.device)))
    total = torch.zeros((), device=window_tokens.device)
    for members in [*buckets.values(), *[[]] * (passes - batches)]:
        # a pass without a segment runs one token, whose loss counts nothing
        rows = max(1, len(members))
        width = max((segment.stop - segment.start for segment in members), default=1)
        inputs = window_tokens.new_full((rows, width), separator)
        targets = window_tokens.new_full((rows, width), -100)
        for index, (row, start, stop) in enumerate(members):
            inputs[index, : stop - start] = window_tokens[row, start:stop]
            targets[index, : stop - start] = window_tokens[row, start + 1 : stop + 1]
        logits = model(input_ids=inputs, use_cache=False).logits
        total = total + F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (window_tokens.shape[0] * longest)
