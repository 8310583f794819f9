"""The reference against the definition written out, and what the definition implies."""

import math

import pytest
import torch
from attention_problems import problem
from hypothesis import given, settings
from hypothesis import strategies as st

from sbeval.attention import stickbreaking_attention


@pytest.mark.parametrize("attend_current", [False, True], ids=["strict", "current"])
def test_reference_is_the_definition_written_as_loops(attend_current: bool) -> None:
    p = problem(heads=2, groups=1, queries=4, keys=6, head_dim=3)
    found = stickbreaking_attention(p.q, p.k, p.v, scale=0.7, attend_current=attend_current, impl="reference")
    for head in range(2):
        for row in range(4):
            position, stick, output = row + 2, 1.0, torch.zeros(3, dtype=torch.float64)
            for key in range(position if attend_current else position - 1, -1, -1):
                taken = 1 / (1 + math.exp(-0.7 * float(p.q[0, head, row].cpu() @ p.k[0, 0, key].cpu())))
                output += stick * taken * p.v[0, 0, key].cpu()
                stick *= 1 - taken
            torch.testing.assert_close(found.output[0, head, row].cpu(), output)
            assert found.remainder[0, head, row].item() == pytest.approx(stick)


def test_gradients_of_the_reference_pass_gradcheck() -> None:
    p = problem(heads=2, groups=1, queries=4, keys=5, head_dim=3)
    inputs = [tensor.clone().requires_grad_() for tensor in (p.q, p.k, p.v)]
    assert torch.autograd.gradcheck(lambda q, k, v: stickbreaking_attention(q, k, v, impl="reference"), inputs)


def test_gradients_of_the_blocks_pass_gradcheck() -> None:
    p = problem(heads=2, groups=1, queries=4, keys=5, head_dim=3)
    inputs = [tensor.clone().requires_grad_() for tensor in (p.q, p.k, p.v)]
    assert torch.autograd.gradcheck(lambda q, k, v: stickbreaking_attention(q, k, v, impl="blockwise"), inputs)


@given(queries=st.integers(1, 40), older=st.integers(0, 40), seed=st.integers(0, 999))
@settings(max_examples=25, deadline=None)
def test_weights_and_remainder_sum_to_one(queries: int, older: int, seed: int) -> None:
    p = problem(queries=queries, keys=queries + older, seed=seed)
    ones = torch.ones_like(p.v)
    found = stickbreaking_attention(p.q, p.k, ones, impl="blockwise")
    torch.testing.assert_close(found.output[..., 0] + found.remainder, torch.ones_like(found.remainder))


def test_equal_logits_give_the_newer_key_at_least_the_older_ones_weight() -> None:
    p = problem(heads=1, queries=1, keys=12, head_dim=12)
    one_hot = torch.eye(12, dtype=torch.float64, device=p.q.device)[None, None]
    weights = stickbreaking_attention(p.q, torch.ones_like(p.k), one_hot, impl="reference").output[0, 0, 0]
    assert (weights[:-1].diff() >= 0).all()


def test_a_weight_does_not_depend_on_keys_older_than_its_own() -> None:
    p = problem(heads=1, queries=1, keys=9, head_dim=9)
    one_hot = torch.eye(9, dtype=torch.float64, device=p.q.device)[None, None]
    before = stickbreaking_attention(p.q, p.k, one_hot, impl="reference").output
    p.k[:, :, :4] += 3.0
    after = stickbreaking_attention(p.q, p.k, one_hot, impl="reference").output
    assert torch.equal(before[..., 4:], after[..., 4:])
    assert not torch.equal(before[..., :4], after[..., :4])


def test_the_first_row_attends_nothing() -> None:
    p = problem(queries=3)
    found = stickbreaking_attention(p.q, p.k, p.v, impl="reference")
    assert (found.output[:, :, 0] == 0).all()
    assert (found.remainder[:, :, 0] == 1).all()
