"""The training loss of windows of tokens, with attention across documents or restricted to each document.

To restrict attention, a window of joined documents is cut at its separators into segments. This project's models take
all segments of a batch packed into one row without padding (`cu_seqlens`). Other models run segments of similar length
as a right-padded batch; with causal attention no token sees the padding after it. Both ways give each segment the loss
that it would have in a batch of its own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbeval.models import SbevalForCausalLM
from sbeval.training.distributed import minimum_over_ranks

SHORTEST_BUCKET_TOKENS = 64
Loss = Callable[[nn.Module, Tensor], Tensor]
"""A function of a model and token ids [windows, length + 1] that returns the mean loss in nats."""


def next_token_loss(model: nn.Module, window_tokens: Tensor) -> Tensor:
    """Returns the mean NLL in nats of next-token prediction over token ids [windows, length + 1]."""
    logits = model(input_ids=window_tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), window_tokens[:, 1:].flatten())


class Segment(NamedTuple):
    """Model inputs `start` to `stop` (exclusive) of window `row`; each target is the token after its input."""

    row: int
    start: int
    stop: int


def segments(window_tokens: Tensor, separator: int) -> list[Segment]:
    """Cuts windows [windows, length + 1] before every separator.

    A segment therefore begins with a separator, as evaluation also feeds a separator before a document.
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
    """Returns the mean NLL in nats over all targets, with attention restricted to the target's document."""
    # DistributedDataParallel holds the model in `module`
    takes_cu_seqlens = isinstance(getattr(model, "module", model), SbevalForCausalLM)
    return (packed_loss if takes_cu_seqlens else bucketed_loss)(model, window_tokens, separator)


def packed_loss(model: nn.Module, window_tokens: Tensor, separator: int) -> Tensor:
    """Returns the mean NLL in nats of token ids [windows, length + 1], with all segments packed into one row."""
    inputs = window_tokens[:, :-1]
    begins = inputs == separator
    begins[:, 0] = True
    starts = begins.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([starts, starts.new_tensor([inputs.numel()])]).to(torch.int32)
    logits = model(input_ids=inputs.reshape(1, -1), cu_seqlens=cu_seqlens, use_cache=False).logits
    return F.cross_entropy(logits[0].float(), window_tokens[:, 1:].flatten())


def bucketed_loss(model: nn.Module, window_tokens: Tensor, separator: int) -> Tensor:
    """Returns the mean NLL in nats of token ids [windows, length + 1], with segments batched by similar length.

    All ranks run the same number of forward passes, since with FSDP each pass gathers weights from all ranks.
    """
    buckets: dict[int, list[Segment]] = {}
    longest = window_tokens.shape[1] - 1
    for segment in segments(window_tokens, separator):
        size = max(SHORTEST_BUCKET_TOKENS, 1 << (segment.stop - segment.start - 1).bit_length())
        buckets.setdefault(min(size, longest), []).append(segment)
    batches = len(buckets)
    passes = -round(minimum_over_ranks(torch.tensor(-batches, device=window_tokens.device)))
    total = torch.zeros((), device=window_tokens.device)
    for members in [*buckets.values(), *[[]] * (passes - batches)]:
        # a forward pass for which no segments are left runs one token, whose target is ignored
        rows, width = max(1, len(members)), max((segment.stop - segment.start for segment in members), default=1)
        inputs = window_tokens.new_full((rows, width), separator)
        targets = window_tokens.new_full((rows, width), -100)
        for index, (row, start, stop) in enumerate(members):
            inputs[index, : stop - start] = window_tokens[row, start:stop]
            targets[index, : stop - start] = window_tokens[row, start + 1 : stop + 1]
        logits = model(input_ids=inputs, use_cache=False).logits
        total = total + F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (window_tokens.shape[0] * longest)
