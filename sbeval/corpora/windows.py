"""Arithmetic of the evaluation protocols: which tokens each window feeds to the model and which targets it scores.

A window with context length L has L targets and L model inputs: a lead-in token, which precedes the first target, and
the first L - 1 targets. Positions are indices into the flat token array of a `TokenizedCorpus`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Window(NamedTuple):
    """Targets [start, stop), of which the last `scored` are scored; the token before `start` is fed first (lead-in)."""

    start: int
    stop: int
    scored: int


def rolling_windows(start: int, stop: int, context_length: int) -> list[Window]:
    """Cuts one document into windows as lm-eval's rolling log-likelihood does.

    Windows are disjoint and have L = `context_length` targets. If fewer targets remain at the end, the last window
    begins earlier, so that it has L targets, and only the remaining ones are scored. A document shorter than L is one
    window.
    """
    first = min(start + context_length, stop)
    windows = [Window(start, first, first - start)] if first > start else []
    scored_to = first
    while scored_to < stop:
        scored = min(context_length, stop - scored_to)
        scored_to += scored
        windows.append(Window(scored_to - context_length, scored_to, scored))
    return windows


def disjoint_windows(start: int, stop: int, context_length: int) -> list[Window]:
    """Cuts a block into disjoint windows of `context_length` targets, all scored; the length divides the block's."""
    return [Window(begin, begin + context_length, context_length) for begin in range(start, stop, context_length)]


def sliding_windows(start: int, stop: int, context_length: int, *, stride: int, region: int) -> list[Window]:
    """Cuts a block into overlapping windows of L inputs, each of which scores only its new targets.

    A window scores `stride` targets, except that the first one may score L targets and the last one fewer.

    Args:
        start: first target of the block.
        stop: end of the block.
        context_length: L.
        stride: number of tokens by which windows advance; it is at most L and divides the block's length.
        region: index of the first token that windows may contain: `start`, or at least L tokens before it. If it is
            `start`, no further context exists for the first window, which scores all its L targets.
    """
    first = start + (context_length if start == region else stride)
    windows = [Window(first - context_length, first, first - start)]
    while (scored_to := windows[-1].stop) < stop:
        end = min(scored_to + stride, stop)
        windows.append(Window(end - context_length, end, end - scored_to))
    return windows


def document_target_blocks(
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    *,
    longest: int,
    targets: int,
    blocks_per_document: int,
    seed: int,
) -> list[tuple[int, int]]:
    """Draws blocks of `targets` consecutive targets with at least `longest` tokens before them in their document.

    The candidates of a document are consecutive blocks from its token `longest` on. Up to `blocks_per_document` of them
    are drawn at random, seeded by (seed, document index). The first blocks of all documents come before all second
    blocks. The first N blocks therefore cover as many documents as possible, which are the clusters of confidence
    intervals.

    Args:
        starts: first token of each document, [C].
        stops: end of each document, [C].
        longest: smallest number of tokens before a block in its document; the longest context length of the run.
        targets: number of targets in a block.
        blocks_per_document: largest number of blocks from one document.
        seed: seed of the draw.

    Returns:
        First target and end of each block.
    """
    rounds: list[list[tuple[int, int]]] = [[] for _ in range(blocks_per_document)]
    for document, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        if (candidates := (stop - start - longest) // targets) < 1:
            continue
        order = np.random.default_rng([seed, document]).permutation(candidates)[:blocks_per_document]
        for number, candidate in enumerate(order.tolist()):
            begin = start + longest + candidate * targets
            rounds[number].append((begin, begin + targets))
    return [block for blocks in rounds for block in blocks]


def stream_target_blocks(total: int, *, longest: int, targets: int) -> Iterator[tuple[int, int]]:
    """Yields (first target, end) of blocks of `targets` targets, one every `longest` tokens of `total`.

    Each block has at least `longest` tokens before it.
    """
    for stop in range(longest + targets, total + 1, longest):
        yield stop - targets, stop


def position_bins(context_length: int, *, per_octave: int = 4) -> list[tuple[int, int]]:
    """Returns log-spaced bins (first, last) that cover positions 1 to L, `per_octave` for each doubling.

    A target's position is the number of tokens that the model has read when it predicts the target. A last bin with few
    positions, whose mean would be noisy, is merged into the bin before it.
    """
    octaves = np.arange(0, per_octave * int(np.ceil(np.log2(context_length))) + 1)
    edges = np.unique(np.round(2.0 ** (octaves / per_octave)).astype(np.int64))
    first = [int(edge) for edge in edges if edge <= context_length]
    if len(first) > 2 and context_length + 1 - first[-1] < (first[-1] - first[-2]) / 2:
        first.pop()
    return list(zip(first, [*(edge - 1 for edge in first[1:]), context_length], strict=True))


def targets_sha256(windows: Sequence[Window]) -> str:
    """Returns a hash of the set of scored targets, which does not depend on how windows divide the targets.

    The windows must not score a target twice.
    """
    bounds = np.array(sorted((window.stop - window.scored, window.stop) for window in windows), "<i8")
    joined = bounds[1:, 0] == bounds[:-1, 1]
    firsts = bounds[np.r_[True, ~joined], 0]
    stops = bounds[np.r_[~joined, True], 1]
    return hashlib.sha256(np.stack([firsts, stops]).tobytes()).hexdigest()


def own_document_targets(window: Window, starts: NDArray[np.int64], *, lead_in: bool) -> int:
    """Counts a window's scored targets for which all tokens before them in the window are of the target's document.

    The separator before a document counts as part of the document if it is the first token that is fed. `starts` are
    the indices of the documents' first tokens and the total number of tokens, [C + 1]. `lead_in` says whether the token
    before the window is fed as its first input.
    """
    document = int(np.searchsorted(starts, window.start, side="right")) - 1
    if lead_in and window.start != int(starts[document]):
        document = int(np.searchsorted(starts, window.start - 1, side="right")) - 1
    return int(np.clip(int(starts[document + 1]) - (window.stop - window.scored), 0, window.scored))


def targets_by_document(windows: Sequence[Window], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the number of scored targets in each document, [C].

    `starts` are the indices of the documents' first tokens and the total number of tokens, [C + 1].
    """

    def up_to_starts(tokens: list[int]) -> NDArray[np.int64]:
        """Returns, for each document start s, the sum of s - t over all positions t in `tokens` up to s."""
        sums = np.concatenate([[0], np.cumsum(sorted(tokens))])
        before = np.searchsorted(sorted(tokens), starts, side="right")
        below: NDArray[np.int64] = starts * before - sums[before]
        return below

    firsts = [window.stop - window.scored for window in windows]
    stops = [window.stop for window in windows]
    return np.diff(up_to_starts(firsts) - up_to_starts(stops))


def own_document_share(windows: Sequence[Window], starts: NDArray[np.int64], *, lead_in: bool) -> float:
    """Returns the share of scored targets for which all tokens before them in the window are of their document.

    Args:
        windows: at least one window.
        starts: indices of the documents' first tokens and the total number of tokens, [C + 1].
        lead_in: whether the token before a window is fed as its first input; otherwise BOS is.
    """
    inside = sum(own_document_targets(window, starts, lead_in=lead_in) for window in windows)
    return inside / sum(window.scored for window in windows)
