"""Protocols as plain arithmetic: which tokens a window feeds and which it scores.

A window of context length L is L model inputs: a lead-in token and its first L - 1 targets. Positions are indices into
the flat array of a `TokenizedCorpus`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Window(NamedTuple):
    """Targets [start, stop), of which the last `scored` are scored; the lead-in is the token before `start`."""

    start: int
    stop: int
    scored: int


def rolling_windows(start: int, stop: int, context_length: int) -> list[Window]:
    """Cuts one document as lm-eval's rolling log-likelihood does.

    Disjoint windows of L targets. If fewer are left, the last window reaches back to hold L, and scores only those. A
    document under L is one window of its length.
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
    """Cuts a block into windows of L targets, all scored; L divides the block."""
    return [Window(begin, begin + context_length, context_length) for begin in range(start, stop, context_length)]


def sliding_windows(start: int, stop: int, context_length: int, *, stride: int, region: int) -> list[Window]:
    """Cuts a block into windows of L inputs that score `stride` new targets each, and every target once.

    Left context comes from before the block, from `region` on, which is `start` or at least L before it. If the block
    begins the region, there is none and the first window scores all L targets. The stride is at most L, and divides
    the block.
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
    """Chooses runs of `targets` targets that have `longest` tokens of left context or more inside their document.

    The candidates of a document follow one another from token `longest` on; (seed, document) draws up to
    `blocks_per_document` of them. The first blocks of all documents come before any second block, so a run over the
    first few blocks has as many clusters as it can.

    Documents begin at `starts` and end at `stops`, [C] each. Returns first target and end of each run.
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
    """Yields blocks of `targets` targets, `longest` tokens apart, each with at least `longest` tokens before it."""
    for stop in range(longest + targets, total + 1, longest):
        yield stop - targets, stop


def position_bins(context_length: int, *, per_octave: int = 4) -> list[tuple[int, int]]:
    """Returns log-spaced bins (first, last) that cover positions 1 to L.

    A target's position is the number of tokens the model has read when it predicts it. If the end of the
    window leaves the last bin few positions, whose mean says little, it joins the one before.
    """
    octaves = np.arange(0, per_octave * int(np.ceil(np.log2(context_length))) + 1)
    edges = np.unique(np.round(2.0 ** (octaves / per_octave)).astype(np.int64))
    first = [int(edge) for edge in edges if edge <= context_length]
    if len(first) > 2 and context_length + 1 - first[-1] < (first[-1] - first[-2]) / 2:
        first.pop()
    return list(zip(first, [*(edge - 1 for edge in first[1:]), context_length], strict=True))


def targets_sha256(windows: Sequence[Window]) -> str:
    """Returns a hash of the scored targets, however windows cut them; no target is scored twice."""
    bounds = np.array(sorted((window.stop - window.scored, window.stop) for window in windows), "<i8")
    joined = bounds[1:, 0] == bounds[:-1, 1]
    firsts = bounds[np.r_[True, ~joined], 0]
    stops = bounds[np.r_[~joined, True], 1]
    return hashlib.sha256(np.stack([firsts, stops]).tobytes()).hexdigest()


def own_document_targets(window: Window, starts: NDArray[np.int64], *, lead_in: bool) -> int:
    """Counts scored targets whose whole left context lies in their own document, as `own_document_share` has it.

    A lead-in that is the separator just before a document counts as part of it.
    """
    document = int(np.searchsorted(starts, window.start, side="right")) - 1
    if lead_in and window.start != int(starts[document]):
        document = int(np.searchsorted(starts, window.start - 1, side="right")) - 1
    return int(np.clip(int(starts[document + 1]) - (window.stop - window.scored), 0, window.scored))


def targets_by_document(windows: Sequence[Window], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [C] how many scored targets each document has; `starts` are [C + 1], the total among them."""

    def up_to_starts(tokens: list[int]) -> NDArray[np.int64]:
        """Returns for each start s: the sum of s - t over all tokens t up to s."""
        sums = np.concatenate([[0], np.cumsum(sorted(tokens))])
        before = np.searchsorted(sorted(tokens), starts, side="right")
        below: NDArray[np.int64] = starts * before - sums[before]
        return below

    firsts = [window.stop - window.scored for window in windows]
    stops = [window.stop for window in windows]
    return np.diff(up_to_starts(firsts) - up_to_starts(stops))


def own_document_share(windows: Sequence[Window], starts: NDArray[np.int64], *, lead_in: bool) -> float:
    """Returns the share of scored targets whose whole left context lies in their own document.

    There is at least one window; `starts` are [C + 1], the total among them; `lead_in` says whether the token before a
    window is fed (BOS is fed where not).
    """
    inside = sum(own_document_targets(window, starts, lead_in=lead_in) for window in windows)
    return inside / sum(window.scored for window in windows)
