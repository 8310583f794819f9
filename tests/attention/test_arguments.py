"""Inputs that do not fit are refused in one sentence."""

import numpy as np
import pytest
import torch
from attention_problems import outputs_and_gradients, problem

from sbeval.attention import effective_span, stickbreaking_attention
from sbeval.attention.impl.triton.launch import backward_parameters, forward_parameters, training_block_keys

P = problem(batch=2, heads=4, groups=2, queries=5, keys=7)
NESTED = torch.nested.as_nested_tensor([*P.v], layout=torch.jagged)


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
        ({"seq_start": torch.zeros(3, dtype=torch.int32)}, "2 integers"),
        ({"seq_start": torch.zeros(2, dtype=torch.bool)}, "2 integers"),
        ({"seq_start": torch.zeros(2, dtype=torch.complex64)}, "2 integers"),
        ({"seq_start": torch.zeros(2, dtype=torch.int32, device="meta")}, "seq_start must be on"),
        ({"seq_start": [0, 0]}, "seq_start must be a tensor, got list"),
        ({"cu_seqlens": [0, 7]}, "cu_seqlens must be a tensor, got list"),
        ({"k": P.k.tolist()}, "k must be a tensor, got list"),
        ({"v": P.v.to("meta")}, "share one device"),
        ({"v": P.v.half()}, "share one dtype, got torch.float64 for q and torch.float16 for v"),
        ({"q": P.q.to_sparse()}, "q must be a dense tensor, got torch.sparse_coo"),
        ({"v": NESTED}, "got a nested one"),
        ({name: getattr(P, name)[..., :0] for name in "qkv"}, "head_dim must be at least 1"),
        ({"k": P.k[:, :0], "v": P.v[:, :0]}, "multiple of key/value heads"),
        ({"skip_threshold": float("nan")}, "between 0 and 1"),
        ({"impl": "fast"}, "impl must be"),
        ({"impl": "triton"}, "fp64"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes, message):
    arguments = {"q": P.q, "k": P.k, "v": P.v, **changes}
    with pytest.raises(ValueError, match=message):
        stickbreaking_attention(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": P.q[..., :0], "k": P.k[..., :0]}, "head_dim must be at least 1"),
        ({"q": P.q[:, :0]}, "multiple of key/value heads"),
        ({"k": P.k.to_sparse()}, "k must be a dense tensor"),
    ],
)
def test_spans_refuse_what_attention_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        effective_span(**{"q": P.q, "k": P.k, **changes})


@pytest.mark.parametrize("impl", ["reference", "blockwise", "triton"])
@pytest.mark.parametrize("queries", [2, 30], ids=["decode", "all"])
@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor, int], ids=lambda kind: kind.__name__)
def test_numbers_of_other_kinds_are_numbers(impl, queries, kind):
    p = problem(queries=queries, keys=600 if queries == 2 else 30, dtype=torch.float32, logit_scale=0.1)
    scale, skip_threshold = (2, None) if kind is int else (0.5, 2**-10)
    expected = stickbreaking_attention(p.q, p.k, p.v, scale=scale, skip_threshold=skip_threshold, impl=impl)
    changed = {"scale": kind(scale), "skip_threshold": None if skip_threshold is None else kind(skip_threshold)}
    assert torch.equal(stickbreaking_attention(p.q, p.k, p.v, **changed, impl=impl).output, expected.output)


@pytest.mark.parametrize("head_dim", [1, 16, 32, 50, 64, 96, 128, 200, 256])
@pytest.mark.parametrize("queries", [1, 17, 64, 1_000_000])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("shared_memory_bytes", [99 * 1024, 227 * 1024])
def test_launch_parameters_are_powers_of_two_that_cover_the_head(head_dim, queries, element_bytes, shared_memory_bytes):
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


@pytest.mark.parametrize("impl", ["reference", "blockwise", "triton"])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 0, 0), (0, 1, 600), (2, 0, 600)])
def test_no_queries_give_no_output(impl, batch, queries, keys):
    p = problem(batch=batch, queries=queries, keys=keys, dtype=torch.float32)
    with torch.no_grad():  # where there are few queries for the keys, the decode kernels
        assert stickbreaking_attention(p.q, p.k, p.v, impl=impl).output.shape == p.q.shape
    found = outputs_and_gradients(p, impl=impl)
    assert (found["output"].shape, found["remainder"].shape) == (p.q.shape, p.q.shape[:3])
    assert found["dk"].shape == p.k.shape
    assert (found["dk"] == 0).all()
