"""Algorithms over token ids, replayed without numpy."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruler_problems import load_task

from sbeval.errors import UserError
from sbeval.scoring.requests import resolve_sequence
from sbeval.tasks.recall.algorithms import (
    ALGORITHMS,
    END,
    FIRST_SYMBOL,
    IGNORE,
    QUERIES,
    QUERY,
    READ,
    SEPARATOR,
    SPACE,
    SYMBOLS,
    VALUE,
    VOCABULARY,
    WRITE,
    Algorithm,
    guessed,
    least_tokens,
    solved,
    start_token,
)

odd = st.integers(30, 200).map(lambda half: 2 * half + 1)


def check_symbols(algorithm: Algorithm, symbols: list[int]) -> None:
    assert all(FIRST_SYMBOL <= symbol < FIRST_SYMBOL + SYMBOLS[algorithm] for symbol in symbols)


@given(tokens=odd, index=st.integers(0, 99), algorithm=st.sampled_from(["copy", "reverse", "sort"]))
def test_a_source_comes_again_as_the_algorithm_says(tokens: int, index: int, algorithm: Algorithm) -> None:
    made = solved(algorithm, tokens, index)
    start, *rest, end = made.tokens_T.tolist()
    middle = rest.index(SEPARATOR)
    source, target = rest[:middle], rest[middle + 1 :]
    assert (start, end, len(rest)) == (start_token(algorithm), END, tokens - 2)
    assert target == {"copy": source, "reverse": source[::-1], "sort": sorted(source)}[algorithm]
    check_symbols(algorithm, source)
    assert made.answer_N.tolist() == list(range(2 + len(source), tokens))
    assert made.last_tokens == len(target) + 1


@given(tokens=odd, index=st.integers(0, 99))
def test_each_symbol_is_followed_by_the_one_two_steps_before(tokens: int, index: int) -> None:
    made = solved("two_back", tokens, index)
    symbols, answers = made.tokens_T[1::2].tolist(), made.tokens_T[made.answer_N].tolist()
    check_symbols("two_back", symbols)
    assert answers == [SPACE, SPACE, *symbols[:-2]]
    assert made.answer_N.tolist() == list(range(2, tokens, 2))


@given(tokens=odd, index=st.integers(0, 99))
def test_a_read_shows_the_bit_written_last(tokens: int, index: int) -> None:
    made = solved("flipflop", tokens, index)
    instructions, bits = made.tokens_T[1::2].tolist(), made.tokens_T[2::2].tolist()
    assert (instructions[0], instructions[-1], made.last_tokens) == (WRITE, READ, 1)
    assert set(instructions) <= {WRITE, IGNORE, READ}
    written, reads = None, []
    for number, (instruction, bit) in enumerate(zip(instructions, bits, strict=True)):
        if instruction == WRITE:
            written = bit
        elif instruction == READ:
            assert bit == written
            reads.append(2 * number + 2)
    assert made.answer_N.tolist() == reads


@given(tokens=st.integers(65, 600), index=st.integers(0, 99))
def test_values_are_those_of_the_keys_asked_for(tokens: int, index: int) -> None:
    made = solved("association", tokens, index)
    assert len(made.tokens_T) == tokens
    ids = made.tokens_T.tolist()
    size = 3 * QUERIES
    source, questions = ids[1 : tokens - 2 * size - 2], ids[tokens - 2 * size - 2 : tokens - size - 2]
    assert ids[tokens - size - 2] == SEPARATOR
    assert ids[-1] == END
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    for place, token in enumerate(source):
        if token == VALUE:
            key, value = tuple(source[place - 2 : place]), tuple(source[place + 1 : place + 3])
            check_symbols("association", [*key, *value])
            assert key not in known
            known[key] = value
    assert len(known) == int((tokens - 27) * 0.8) // 6 >= QUERIES
    assert source.count(SPACE) == len(source) - 5 * len(known)
    keys = [tuple(questions[place + 1 : place + 3]) for place in range(0, size, 3)]
    assert [questions[place] for place in range(0, size, 3)] == [QUERY] * QUERIES
    assert len(set(keys)) == QUERIES
    answers = [token for key in keys for token in (QUERY, *known[key])]
    assert ids[-size - 1 :] == [*answers, END]
    assert made.answer_N.tolist() == list(range(tokens - size - 1, tokens))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sequences_differ_and_impossible_lengths_are_refused(algorithm: Algorithm) -> None:
    first, again, second = (solved(algorithm, 101, 0, index).tokens_T for index in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)
    assert first.max() < VOCABULARY
    solved(algorithm, least_tokens(algorithm) | 1, 0)
    with pytest.raises(UserError, match=f"{algorithm} needs an even context length of at least"):
        solved(algorithm, 5, 0)
    if algorithm != "association":
        with pytest.raises(UserError, match="got 99"):
            solved(algorithm, 100, 0)


def test_a_guess_is_right_as_often_as_its_symbols_say() -> None:
    assert guessed("flipflop", 65) == 0.5
    assert guessed("copy", 7) == guessed("sort", 7) == 32**-2
    assert guessed("two_back", 9) == 16**-2
    assert guessed("association", 999) == 256**-8


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tasks_count_whole_answers_beside_tokens(algorithm: Algorithm) -> None:
    options = {"context_lengths": [64, 128], "num_samples": 2}
    task: Any = load_task(f"sb_algorithm_{algorithm}", options)
    task.build_all_requests(limit=2, rank=0, world_size=1)
    sequences = [resolve_sequence(instance.args[0]) for instance in task.instances]
    assert [len(sequence.inputs_L) for sequence in sequences] == [64, 128] * 2
    made = solved(algorithm, 65, task.options.seed, 0)
    assert np.array_equal(sequences[0].inputs_L, made.tokens_T[:-1])
    assert np.array_equal(sequences[0].targets_T, made.tokens_T[sequences[0].positions_T + 1])
    condition = task.all_conditions[0]
    count = len(made.answer_N)
    for wrong in (0, count - 1):
        exact = np.ones(count)
        exact[wrong] = 0
        scores = task.score(condition, [(np.full(count, 2.0), exact)])
        assert scores["exact_match"] == float(algorithm == "flipflop" and wrong < count - 1)
        assert scores["token_match"] == pytest.approx(1 - 1 / count)
        assert scores["answer_nll"] == 2.0
    assert task.score(condition, [(np.zeros(count), np.ones(count))])["exact_match"] == 1.0
    assert f"token_match@{64:07d}" in task.aggregation()
