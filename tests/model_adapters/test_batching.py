"""Batches by token budget: everything runs once, in order, within the limits and whatever memory there is."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbeval.errors import UserError
from sbeval.model_adapters.batching import BatchLimits, run_in_batches

LENGTHS = st.lists(st.integers(1, 50), max_size=30).map(lambda lengths: sorted(lengths, reverse=True))


@settings(max_examples=30, deadline=None)
@given(
    lengths=LENGTHS,
    max_rows=st.none() | st.integers(1, 8),
    max_tokens=st.none() | st.integers(1, 300),
    memory_tokens=st.integers(50, 400),
    same_length=st.booleans(),
)
def test_every_item_runs_once_within_limits_and_memory(
    lengths: list[int], max_rows: int | None, max_tokens: int | None, memory_tokens: int, same_length: bool
) -> None:
    def run(batch: Sequence[int]) -> list[int]:
        if lengths[batch[0]] * len(batch) > memory_tokens:
            raise torch.OutOfMemoryError
        return list(batch)

    limits = BatchLimits(max_rows=max_rows, max_tokens=max_tokens, same_length=same_length)
    ran = list(run_in_batches(range(len(lengths)), run, length_tokens=lengths.__getitem__, limits=limits))
    assert all(list(batch) == result for batch, result in ran)
    batches = [result for _, result in ran]
    assert [index for batch in batches for index in batch] == list(range(len(lengths)))
    for batch in batches:
        assert max_rows is None or len(batch) <= max_rows
        assert max_tokens is None or len(batch) == 1 or len(batch) * lengths[batch[0]] <= max_tokens
        assert not same_length or len({lengths[index] for index in batch}) == 1


@pytest.mark.parametrize(
    ("message", "error", "sentence"),
    [
        ("DefaultCPUAllocator: can't allocate memory", UserError, "an input of 7 tokens to fit"),
        ("shapes do not fit", RuntimeError, "shapes do not fit"),
    ],
)
def test_an_item_that_never_fits_is_a_sentence_and_other_errors_are_raised_as_they_are(
    message: str, error: type[Exception], sentence: str
) -> None:
    def run(batch: Sequence[int]) -> None:
        raise RuntimeError(message)

    with pytest.raises(error, match=sentence):
        list(run_in_batches([7, 7, 7], run, length_tokens=lambda item: item, limits=BatchLimits()))
