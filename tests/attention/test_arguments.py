"""Inputs that do not fit are refused in one sentence."""

import pytest
import torch
from attention_problems import outputs_and_gradients, problem

from sbeval.attention import stickbreaking_attention
from sbeval.attention.impl.triton.launch import backward_parameters, forward_parameters, training_block_keys

P = problem(batch=2, heads=4, groups=2, queries=5, keys=7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": P.q[0]}, "q must be"),
        ({"q": P.q.long()}, "floating point"),
        ({"q": P.q.float()}, "share one dtype"),
        ({"v": P.v[..., :3]}, "k and v must have one shape"),
        ({"q": P.q[:1]}, "agree in batch and head_dim"),
        ({"q": P.q[:, :3]}, "multiple of key/value heads"),
        ({"k": P.k[:, :, :4], "v": P.v[:, :, :4]}, "at most 4 fit"),
        ({"skip_threshold": 0.0}, "between 0 and 1"),
        ({"skip_threshold": 2.0}, "between 0 and 1"),
        ({"seq_start": torch.zeros(3, dtype=torch.int32)}, "2 integers"),
        ({"seq_start": torch.zeros(2)}, "2 integers"),
        ({"impl": "fast"}, "impl must be"),
        ({"impl": "triton"}, "fp64"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes: dict, message: str) -> None:
    arguments = {"q": P.q, "k": P.k, "v": P.v, **changes}
    with pytest.raises(ValueError, match=message):
        stickbreaking_attention(**arguments)


@pytest.mark.parametrize("head_dim", [1, 16, 32, 50, 64, 96, 128, 200, 256])
@pytest.mark.parametrize("queries", [1, 17, 64, 1_000_000])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("shared_memory_bytes", [99 * 1024, 227 * 1024])
def test_launch_parameters_are_powers_of_two_that_cover_the_head(
    head_dim: int, queries: int, element_bytes: int, shared_memory_bytes: int
) -> None:
    sizes = {"head_dim": head_dim, "element_bytes": element_bytes}
    block_keys = training_block_keys(**sizes, shared_memory_bytes=shared_memory_bytes)
    inference = forward_parameters(**sizes, queries=queries)
    forward = forward_parameters(**sizes, queries=queries, training_block_keys=block_keys)
    backward = backward_parameters(**sizes, queries=queries, shared_memory_bytes=shared_memory_bytes)
    assert forward.block_keys == backward.block_keys, "the backward pass starts from what tiles were left"
    for launch in (inference, forward, backward):
        for size in (launch.block_queries, launch.block_keys, launch.block_head_dim):
            assert size >= 16
            assert size & (size - 1) == 0
        assert launch.block_head_dim >= head_dim


@pytest.mark.parametrize("impl", ["reference", "blockwise"])
@pytest.mark.parametrize(("batch", "queries"), [(0, 5), (2, 0)])
def test_no_queries_give_no_output(impl: str, batch: int, queries: int) -> None:
    p = problem(batch=batch, queries=queries, keys=5)
    found = outputs_and_gradients(p, impl=impl)
    assert found["output"].shape == p.q.shape
    assert found["remainder"].shape == p.q.shape[:3]
    assert found["dk"].shape == p.k.shape
    assert (found["dk"] == 0).all()
