"""Windows: lm-eval's rolling windows, the same targets at every length, and context inside the right document."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from sbeval.corpora.windows import (
    Window,
    disjoint_windows,
    document_target_blocks,
    own_document_targets,
    position_bins,
    rolling_windows,
    sliding_windows,
    stream_target_blocks,
    targets_by_document,
)


@given(tokens=st.integers(0, 200), length=st.integers(1, 64), start=st.integers(0, 9))
def test_rolling_is_lm_evals_cut(tokens, length, start):
    text = list(range(start, start + tokens))
    expected = [
        ([*context, *targets][:-1], targets)
        for context, targets in map(
            make_disjoint_window,
            get_rolling_token_windows(token_list=text, prefix_token=-1, max_seq_len=length, context_len=1),
        )
    ]
    found = []
    for window in rolling_windows(start, start + tokens, length):
        lead_in = -1 if window.start == start else window.start - 1
        inputs = [lead_in, *range(window.start, window.stop - 1)]
        found.append((inputs, list(range(window.stop - window.scored, window.stop))))
    assert found == expected


@given(blocks=st.integers(1, 4), power=st.integers(0, 5))
def test_disjoint_windows_score_every_target_once_at_every_length(blocks, power):
    longest = 2**power
    for length in (2**k for k in range(power + 1)):
        windows = disjoint_windows(10, 10 + blocks * longest, length)
        assert all(window.stop - window.start == window.scored == length for window in windows)
        assert [t for w in windows for t in range(w.start, w.stop)] == list(range(10, 10 + blocks * longest))


@given(before=st.integers(0, 2), power=st.integers(0, 4), stride_power=st.integers(0, 4))
def test_sliding_scores_every_target_once_with_full_windows(before, power, stride_power):
    longest, length, stride = 16, 2**power, 2 ** min(power, stride_power)
    region, start = 5, 5 + before * longest
    windows = sliding_windows(start, start + longest, length, stride=stride, region=region)
    assert all(window.stop - window.start == length and window.start >= region for window in windows)
    scored = [target for w in windows for target in range(w.stop - w.scored, w.stop)]
    assert scored == list(range(start, start + longest))
    assert all(window.scored == stride for window in (windows if before else windows[1:]))


@given(
    sizes=st.lists(st.integers(0, 120), min_size=1, max_size=12),
    longest=st.integers(4, 40),
    targets=st.integers(1, 4),
    limit=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_target_blocks_have_the_longest_context_inside_their_document(sizes, longest, targets, limit, seed):
    bounds = np.cumsum([0, *sizes])
    starts, stops = bounds[:-1], bounds[1:]
    options = {"longest": longest, "targets": targets, "blocks_per_document": limit, "seed": seed}
    blocks = document_target_blocks(starts, stops, **options)
    documents = [int(np.searchsorted(starts, start, side="right")) - 1 for start, _ in blocks]
    for document, (start, stop) in zip(documents, blocks, strict=True):
        assert start - starts[document] >= longest
        assert stop == start + targets <= stops[document]
    assert len({start for start, _ in blocks}) == len(blocks)
    fit = [index for index, size in enumerate(sizes) if size >= longest + targets]
    assert documents[: len(fit)] == fit
    assert blocks == document_target_blocks(starts, stops, **options)


def test_position_bins_cover_every_position_once():
    for length in (1, 2, 3, 100, 1024, 1030, 65536):
        bins = position_bins(length)
        sizes = [last - first + 1 for first, last in bins]
        assert len(bins) < 3 or sizes[-1] >= sizes[-2] / 2
        assert bins[0][0] == 1
        assert bins[-1][1] == length
        assert all(first <= last for first, last in bins)
        assert [after[0] - before[1] for before, after in pairwise(bins)] == [1] * (len(bins) - 1)


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    length=st.integers(1, 30),
    data=st.data(),
    lead_in=st.booleans(),
)
def test_own_document_targets_are_those_whose_inputs_are_all_of_their_document(sizes, length, data, lead_in):
    starts = np.cumsum([0, *sizes])
    total = int(starts[-1])
    length = min(length, total)
    begin = data.draw(st.integers(0, total - length))
    scored = data.draw(st.integers(1, length))
    document_of = np.repeat(np.arange(len(sizes)), sizes)
    expected = 0
    for target in range(begin + length - scored, begin + length):
        inputs = [document_of[token] for token in range(begin, target)]
        if lead_in and begin not in starts:
            inputs.append(document_of[begin - 1])
        expected += all(document == document_of[target] for document in inputs)
    assert own_document_targets(Window(begin, begin + length, scored), starts, lead_in=lead_in) == expected


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8), data=st.data())
def test_every_scored_target_counts_for_its_document(sizes, data):
    starts = np.cumsum([0, *sizes])
    document_of = np.repeat(np.arange(len(sizes)), sizes)
    ends = data.draw(st.lists(st.tuples(st.integers(0, int(starts[-1])), st.integers(0, int(starts[-1]))), max_size=5))
    windows = [Window(0, max(pair), max(pair) - min(pair)) for pair in ends]
    expected = sum(
        (np.bincount(document_of[min(pair) : max(pair)], minlength=len(sizes)) for pair in ends), np.zeros(len(sizes))
    )
    assert targets_by_document(windows, starts).tolist() == expected.tolist()


@given(total=st.integers(0, 5000), longest=st.integers(64, 1024), targets=st.integers(1, 64))
def test_target_blocks_of_a_stream_have_the_longest_context_before_them(total, longest, targets):
    blocks = list(stream_target_blocks(total, longest=longest, targets=targets))
    assert len(blocks) == max(0, total - targets) // longest
    for start, stop in blocks:
        assert stop - start == targets
        assert start >= longest
        assert stop <= total
