"""MQRAR sequences against the definition, replayed with a dictionary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbeval.errors import UserError
from sbeval.tasks.recall.sequences import PAIRS, Mqrar, with_other_values

settings = st.builds(
    lambda pairs, n_back, extra, vocabulary: Mqrar(
        length_tokens=2 * (pairs * n_back + extra), pairs=pairs, n_back=n_back, vocabulary=2 * pairs + vocabulary
    ),
    pairs=st.integers(1, 20),
    n_back=st.integers(1, 4),
    extra=st.integers(1, 60),
    vocabulary=st.integers(6, 200),
)


@given(settings, st.integers(0, 3), st.integers(0, 50))
def test_targets_are_the_values_n_assignments_ago(setting: Mqrar, seed: int, index: int) -> None:
    sequence = setting.sequence(seed, index)
    keys, values = sequence.inputs_L[0::2].tolist(), sequence.inputs_L[1::2].tolist()
    expected = {}
    history: dict[int, list[int]] = {}
    for slot, (key, value) in enumerate(zip(keys, values, strict=True)):
        if len(history.setdefault(key, [])) >= setting.n_back and slot >= setting.pairs * setting.n_back:
            expected[2 * slot] = history[key][-setting.n_back]
        history[key].append(value)
    assert dict(zip(sequence.positions_T.tolist(), sequence.targets_T.tolist(), strict=True)) == expected
    assert len(expected) == setting.length_tokens // 2 - setting.pairs * setting.n_back
    assert len(set(keys)) == setting.pairs
    assert max(keys) < setting.vocabulary // 2 <= min(values)
    assert min(keys) >= 1
    assert max(values) < setting.vocabulary


@given(settings, st.integers(0, 9))
def test_a_reassignment_changes_the_value_so_the_next_token_is_never_the_answer(setting: Mqrar, index: int) -> None:
    sequence = setting.sequence(0, index)
    if setting.n_back == 1:
        assert (sequence.inputs_L[sequence.positions_T + 1] != sequence.targets_T).all()


@given(settings, st.integers(0, 9))
def test_other_values_leave_keys_and_questions_alone(setting: Mqrar, index: int) -> None:
    shown = setting.sequence(0, index)
    replaced = with_other_values(setting, shown, 0, index)
    assert (shown.inputs_L[0::2] == replaced.inputs_L[0::2]).all()
    assert (shown.inputs_L[1::2] != replaced.inputs_L[1::2]).all()
    assert setting.vocabulary // 2 <= min(replaced.inputs_L[1::2]) <= max(replaced.inputs_L[1::2]) < setting.vocabulary
    assert (shown.targets_T == replaced.targets_T).all()
    assert (shown.positions_T == replaced.positions_T).all()


def test_the_papers_settings_are_possible_and_sequences_differ() -> None:
    for pairs in PAIRS:
        setting = Mqrar(pairs=pairs)
        first, second = setting.sequence(0, 0), setting.sequence(0, 1)
        assert (len(first.inputs_L), len(first.targets_T)) == (768, 384 - pairs)
        assert (first.inputs_L != second.inputs_L).any()
        assert (first.inputs_L == setting.sequence(0, 0).inputs_L).all()


@pytest.mark.parametrize(
    "options",
    [
        *({"length_tokens": 767}, {"pairs": 384}, {"pairs": 0}, {"n_back": 0}),
        *({"vocabulary": 64}, {"pairs": 128, "n_back": 3}),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UserError):
        Mqrar(**options)
