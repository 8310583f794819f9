import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from research.training_text.decontamination import SpanIndex, near_duplicates, span_hashes

SPAN = 5
small_text = st.lists(st.integers(0, 2), max_size=60).map(lambda ids: np.array(ids, np.uint16))


def spans(tokens: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + SPAN].tolist()) for start in range(len(tokens) - SPAN + 1)]


@given(held_out=st.lists(small_text, max_size=4), training=small_text)
def test_shared_spans_are_those_a_plain_search_finds(held_out, training):
    index = SpanIndex(held_out, SPAN)
    known = {span for tokens in held_out for span in spans(tokens)}
    assert len(index) == len(known)
    assert index.shared_spans(training) == sum(span in known for span in spans(training))


def test_a_span_hashes_the_same_wherever_it_stands():
    draw = np.random.default_rng(0)
    span = draw.integers(0, 4096, 50).astype(np.uint16)
    front = np.concatenate([draw.integers(0, 4096, 1234).astype(np.uint16), span])
    assert span_hashes(front)[-1] == span_hashes(span)[0]


def test_later_copies_are_marked_and_the_first_stays():
    draw = np.random.default_rng(1)
    first, other = draw.integers(0, 4096, (2, 3000)).astype(np.uint16)
    edited = first.copy()
    edited[1500:1510] = 7
    assert near_duplicates([first, other, edited, other[:1000]]).tolist() == [False, False, True, True]
