import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbeval.errors import UserError
from sbeval.training.windows import TrainingWindows

RECALL_START = 50_000


def windows_of(tokens: int, length: int, windows: int, share: float = 0.0, seed: int = 0) -> TrainingWindows:
    recall = np.arange(RECALL_START, RECALL_START + 5 * (length + 1), dtype=np.uint16).reshape(5, length + 1)
    options = {"length_tokens": length, "windows": windows, "recall_share": share, "seed": seed}
    return TrainingWindows(np.arange(tokens, dtype=np.uint16), recall, **options)


@given(tokens=st.integers(40, 2000), length=st.integers(2, 20), seed=st.integers(0, 5))
def test_an_epoch_visits_disjoint_stretches_once_and_almost_all_tokens(tokens, length, seed):
    per_epoch = windows_of(tokens, length, 1).windows_per_epoch
    windows = windows_of(tokens, length, 3 * per_epoch, seed=seed)
    for epoch in range(3):
        items = windows.__getitems__(range(epoch * per_epoch, (epoch + 1) * per_epoch)).numpy()
        assert (np.diff(items, axis=1) == 1).all()
        inputs = items[:, :-1].flatten()
        assert len(np.unique(inputs)) == len(inputs) > tokens - 3 * length


@given(share=st.floats(0, 0.9), windows=st.integers(1, 300))
def test_the_share_of_recall_windows_is_exact_to_one_and_even(share, windows):
    items = windows_of(500, 8, windows, share).__getitems__(range(windows)).numpy()
    recall = items[:, 0] >= RECALL_START
    for upto in range(1, windows + 1):
        assert abs(recall[:upto].sum() - upto * share) <= 1


@given(order=st.permutations(range(60)))
def test_an_item_does_not_depend_on_what_was_read_before(order):
    windows = windows_of(300, 8, 60, 0.1, seed=3)
    straight = windows_of(300, 8, 60, 0.1, seed=3).__getitems__(range(60))
    for index in order:
        assert (windows[index] == straight[index]).all()


def test_longer_windows_join_rows_of_recall_text_without_losing_a_target():
    rows = np.arange(6 * 9, dtype=np.uint16).reshape(6, 9)
    text = np.arange(1000, 2000, dtype=np.uint16)
    windows = TrainingWindows(text, rows, length_tokens=16, windows=8, recall_share=0.5, seed=0)
    recall = [item.tolist() for item in (windows[index] for index in range(8)) if item[0] < 1000]
    joined = [[*range(9 * row, 9 * row + 8), *range(9 * row + 9, 9 * row + 18)] for row in (0, 2, 4)]
    assert recall == [*joined, joined[0]]


def test_epochs_and_seeds_differ():
    windows = windows_of(1000, 8, 400)
    per_epoch = windows.windows_per_epoch
    first = windows.__getitems__(range(per_epoch))
    assert not (first == windows.__getitems__(range(per_epoch, 2 * per_epoch))).all()
    assert not (first == windows_of(1000, 8, 400, seed=1).__getitems__(range(per_epoch))).all()


def test_too_little_text_or_recall_text_of_another_length_is_refused():
    with pytest.raises(UserError, match="at least 16 training tokens"):
        windows_of(15, 8, 1)
    text, recall = np.zeros(100, np.uint16), np.zeros((3, 7), np.uint16)
    with pytest.raises(UserError, match="--length 8"):
        TrainingWindows(text, recall, length_tokens=8, windows=1, recall_share=0.1, seed=0)
