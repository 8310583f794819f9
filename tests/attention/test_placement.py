"""Which program works on which rows of which head."""

import pytest
import torch
import triton
import triton.language as tl
from attention_problems import DEVICE

from sbeval.attention.impl.triton.launch import PROGRAMS_TOGETHER, heads_at_once
from sbeval.attention.impl.triton.primitives import place


@triton.jit
def _places(found_ptr, blocks, all_heads, together):
    block, head = place(blocks, all_heads, together)
    tl.store(found_ptr + tl.program_id(0) * 2, block)
    tl.store(found_ptr + tl.program_id(0) * 2 + 1, head)


@pytest.mark.parametrize(("blocks", "heads"), [(1, 1), (1, 7), (5, 1), (4, 6), (3, 7)])
@pytest.mark.parametrize("together", [1, 2, 4, 100])
def test_every_block_of_every_head_has_one_program_and_long_rows_come_first(
    blocks: int, heads: int, together: int
) -> None:
    found = torch.zeros(blocks * heads, 2, dtype=torch.int32, device=DEVICE)
    _places[(blocks * heads,)](found, blocks, heads, together)
    places = [(block, head) for block, head in found.tolist()]
    assert sorted(places) == [(block, head) for block in range(blocks) for head in range(heads)]
    for first in range(0, heads, together):
        group = [place for place in places if first <= place[1] < first + together]
        assert places.index(group[-1]) - places.index(group[0]) == len(group) - 1
        assert [block for block, _ in group] == sorted((block for block, _ in group), reverse=True)


def test_as_many_heads_go_together_as_fit_half_the_cache_and_fill_the_machine() -> None:
    many = PROGRAMS_TOGETHER
    assert heads_at_once(heads=20, bytes_a_head=1_000_000, blocks=many, cache_bytes=10_000_000) == 5
    assert heads_at_once(heads=20, bytes_a_head=10**9, blocks=many, cache_bytes=10_000_000) == 1
    assert heads_at_once(heads=20, bytes_a_head=10**9, blocks=many // 4, cache_bytes=10_000_000) == 4
    assert heads_at_once(heads=20, bytes_a_head=0, blocks=1, cache_bytes=0) == 20


def test_no_round_has_few_heads_left() -> None:
    assert heads_at_once(heads=16, bytes_a_head=1_000_000, blocks=PROGRAMS_TOGETHER, cache_bytes=30_000_000) == 16
    assert heads_at_once(heads=16, bytes_a_head=1_000_000, blocks=PROGRAMS_TOGETHER, cache_bytes=20_000_000) == 8
