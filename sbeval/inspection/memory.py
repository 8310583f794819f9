"""Memory of weights, windows and generated texts, by sizes alone, and the longest length that fits.

A window's largest moment is either inside a block, where the residual stream, its norm, the branch and their sum stand
beside the MLP's inner channels, or beside the logits of one chunk of targets. What was measured on a GPU stands in
`benchmarks/results/inspection.md`.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Sequence

from sbeval.errors import UserError
from sbeval.inspection.sizes import Sizes
from sbeval.scoring.scorer import CHUNK_LOGITS

KEPT_FREE = 0.1
"""Share of the memory left for what the sizes do not tell: kernels' own memory, fragments, a CUDA context."""
ANSWER_TOKENS = 256
_ROOM_MULTIPLE = 64
_MOST_TOKENS = 2**32
_UNITS = {"": 1, "B": 1} | {
    f"{unit}{end}": base**power
    for power, unit in enumerate("KMGT", 1)
    for end, base in (("iB", 1024), ("B", 1000), ("", 1024))
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Memory beside the weights at one length, in bytes.

    Attributes:
        length_tokens: of a window, or of a prompt with its answer.
        all_targets: of one window whose targets are all scored, as rolling, stream, sliding and position have them.
        last_targets: of one window whose last 256 targets are scored, as fixed_target has them.
        batch: of a full batch of such windows; a batch that does not fit is halved.
        generation: of one text: its keys and values, and its prompt being read.
        further_text: of every text more that is generated beside it.
    """

    length_tokens: int
    all_targets: int
    last_targets: int
    batch: int
    generation: int
    further_text: int


def needs(sizes: Sizes, length_tokens: int, *, device: str, batch_tokens: int) -> Needs:
    """Returns what windows and texts of one length take.

    Args:
        sizes: of the model.
        length_tokens: of a window, or of a prompt with its answer.
        device: "cuda" or "cpu", which hold different numbers of logits at once.
        batch_tokens: most tokens of a batch.
    """
    rows = max(1, batch_tokens // length_tokens)
    return Needs(
        length_tokens=length_tokens,
        all_targets=window_bytes(sizes, length_tokens, length_tokens, device),
        last_targets=window_bytes(sizes, length_tokens, min(length_tokens, 256), device),
        batch=window_bytes(sizes, rows * length_tokens, rows * length_tokens, device),
        generation=text_bytes(sizes, length_tokens) + window_bytes(sizes, length_tokens, 1, device),
        further_text=text_bytes(sizes, length_tokens),
    )


def window_bytes(sizes: Sizes, tokens: int, scored: int, device: str) -> int:
    """Returns what scoring takes at most at one time, beside the weights.

    Args:
        sizes: of the model.
        tokens: model inputs of the batch.
        scored: targets of the batch.
        device: "cuda" or "cpu".
    """
    width, query, key = sizes.hidden_size, sizes.heads * sizes.head_dim, sizes.key_value_heads * sizes.head_dim
    in_attention = 2 * width + 3 * query + 3 * key  # projected, rotated, and what attention returns
    inner = 3 if sizes.gated else 2
    # a token stands before each of its experts, and what they return before it is summed
    to_experts = sizes.chosen_experts * (3 * width + inner * sizes.expert_size)
    at_once = min(tokens, sizes.tokens_of_experts_at_once or tokens)
    in_mlp = tokens * (4 * width + inner * sizes.inner_size) + at_once * to_experts
    body = max(tokens * in_attention, in_mlp) * sizes.item_bytes
    logits = min(scored * sizes.vocabulary, CHUNK_LOGITS[device])
    # on a CPU they are raised to fp32, and their exponentials stand beside them
    of_logit = sizes.item_bytes if device == "cuda" else sizes.item_bytes + 8
    return max(body, 2 * tokens * width * sizes.item_bytes + logits * of_logit)


def text_bytes(sizes: Sizes, length_tokens: int) -> int:
    """Returns what keys and values of one text take while it is generated."""
    room = -(-length_tokens // _ROOM_MULTIPLE) * _ROOM_MULTIPLE
    kept = sum(min(room, window or room) for window in sizes.key_windows)
    return sizes.key_value_heads * (sizes.cached_channels or 2 * sizes.head_dim) * kept * sizes.item_bytes


def longest_tokens(sizes: Sizes, memory_bytes: int, device: str) -> tuple[int, int]:
    """Returns the longest window and the longest generated text that fit, alone, in tokens; 0 where nothing does."""
    room = int(memory_bytes * (1 - KEPT_FREE)) - sizes.weight_bytes
    return (
        _longest(lambda tokens: window_bytes(sizes, tokens, tokens, device), room),
        _longest(lambda tokens: text_bytes(sizes, tokens) + window_bytes(sizes, tokens, 1, device), room),
    )


def _longest(takes: Callable[[int], int], room: int) -> int:
    fits, too_long = 0, _MOST_TOKENS
    while fits + 1 < too_long:
        tokens = (fits + too_long) // 2
        fits, too_long = (tokens, too_long) if takes(tokens) <= room else (fits, tokens)
    return fits


def read_memory(text: str) -> int:
    """Returns a size such as 80GiB, 24GB or 512M in bytes.

    Raises:
        UserError: it is no size.
    """
    found = re.fullmatch(r"\s*(\d{1,16}(?:\.\d{1,6})?)\s*([KMGT]?i?B?)\s*", text)
    size = int(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0
    if not 0 < size < 2**62:
        raise UserError(f"Expected --memory to be a size such as 80GiB, found {text[:50]!r}: correct it.")
    return size


def memory_here() -> tuple[str, str, int]:
    """Returns the device a run would take here ("cuda" or "cpu"), its name, and how much of its memory is free."""
    import torch

    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return "cuda", torch.cuda.get_device_name(), free
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        free = 0
    return "cpu", "the CPU of this machine", free


def lengths_shown(trained: int | None, asked: Sequence[int]) -> tuple[int, ...]:
    """Returns the lengths to show: those asked for, else the training length and four, sixteen and 64 times it."""
    first = trained or 1024
    return tuple(sorted(asked)) or tuple(first * times for times in (1, 4, 16, 64))
