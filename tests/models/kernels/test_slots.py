"""Kernels of a decode step in slots: softmax over the cached keys, writing new keys, and linear layers of one row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu, linear, rms_norm, silu

from sbeval.models.kernels.one_row import MapParameters, Slot, map_row
from sbeval.models.kernels.slots import kernel_softmax_decode, kernel_write
from sbeval.models.rope import rotate
from sbeval.models.slots import softmax_decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def heads(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def slot_by_slot(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    sink_H: Tensor | None = None,
    slope_H: Tensor | None = None,
) -> Tensor:
    shared = q.shape[1] // k.shape[1]
    outputs = []
    for slot, length in enumerate(lengths):
        keys, values = (x[slot, :, :length].double().repeat_interleave(shared, 0) for x in (k, v))
        seen = torch.ones(q.shape[2], length, dtype=torch.bool, device=DEVICE).tril(length - q.shape[2])
        logits = q[slot].double() @ keys.mT * 0.3
        if slope_H is not None:
            newest = torch.arange(length - q.shape[2], length, device=DEVICE)[:, None]
            logits = logits - slope_H.double()[:, None, None] * (newest - torch.arange(length, device=DEVICE))
        weights = logits.masked_fill(~seen, -torch.inf).exp()
        whole = weights.sum(-1, keepdim=True) + (0 if sink_H is None else sink_H.double().exp()[:, None, None])
        outputs.append((weights / whole @ values)[None])
    return torch.cat(outputs)


@given(
    lengths=st.lists(st.integers(4, 300), min_size=1, max_size=3), queries=st.integers(1, 4), splits=st.integers(1, 5),
    shared=st.integers(1, 3), head_dim=st.sampled_from([8, 16, 20]), sink=st.booleans(), alibi=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_however_the_keys_are_split_the_softmax_is_of_each_slot_s_own_keys(
    lengths: list[int], queries: int, splits: int, shared: int, head_dim: int, sink: bool, alibi: bool, seed: int
) -> None:
    slots = len(lengths)
    q = heads(slots, 2 * shared, queries, head_dim, seed=seed)
    k, v = heads(slots, 2, 300, head_dim, seed=seed + 1), heads(slots, 2, 300, head_dim, seed=seed + 2)
    for slot, length in enumerate(lengths):
        k[slot, :, length:], v[slot, :, length:] = torch.nan, torch.nan  # not read
    length_B = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    sink_H = heads(2 * shared, seed=seed + 3) if sink else None
    slope_H = torch.linspace(0, 1.3, 2 * shared, device=DEVICE) if alibi else None
    found = kernel_softmax_decode(q, k, v, length_B, 0.3, sink_H=sink_H, slope_H=slope_H, splits=splits)
    expected = slot_by_slot(q, k, v, lengths, sink_H, slope_H)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("alibi", [True, False])
def test_the_definition_is_the_softmax_of_each_slot_s_own_keys(alibi: bool, sink: bool, queries: int) -> None:
    q, k, v = heads(3, 4, queries, 8, seed=0), heads(3, 2, 40, 8, seed=1), heads(3, 2, 40, 8, seed=2)
    lengths, sink_H = [40, 3, 17], heads(4, seed=3) if sink else None
    length_B = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    slope_H = torch.tensor([1.0, 0.5, 0.25, 0.0], device=DEVICE) if alibi else None
    found = softmax_decode(q, k, v, length_B, scale=0.3, sink_H=sink_H, slope_H=slope_H)
    expected = slot_by_slot(q, k, v, lengths, sink_H, slope_H)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_keys_go_to_their_positions_and_round_a_ring(dtype: torch.dtype) -> None:
    k, v = (torch.zeros(3, 2, 10, 12, dtype=dtype, device=DEVICE) for _ in range(2))
    # the layout after a projection: [B, Q, G, D] transposed
    new_k, new_v = (heads(3, 2, 2, 12, seed=seed, dtype=dtype).transpose(1, 2) for seed in (0, 1))
    positions = [0, 9, 24]
    kernel_write(k, v, new_k, new_v, torch.tensor(positions, dtype=torch.int32, device=DEVICE))
    for room, new in ((k, new_k), (v, new_v)):
        for slot, position in enumerate(positions):
            for query in range(2):
                assert torch.equal(room[slot, :, (position + query) % 10], new[slot, :, query])
        assert int(room.any(-1).sum()) == 12


SMALL = MapParameters(block_outputs=16, block_inputs=32, num_warps=4, num_stages=2)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_a_norm_before_three_maps_and_biases_behind() -> None:
    x, norm = normal(1, 80, seed=0), normal(80, seed=1)
    weights = [normal(count, 80, seed=2 + count) for count in (48, 16, 16)]
    biases = [normal(len(weight), seed=len(weight)) for weight in weights]
    out = torch.full((1, 80), torch.nan, device=DEVICE)
    found = map_row(x, weights, biases, out=out, norm_E=norm, eps=1e-5, parameters=SMALL)
    normed = rms_norm(x, (80,), norm, 1e-5)
    expected = torch.cat([linear(normed, weight, bias) for weight, bias in zip(weights, biases, strict=True)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("activation", "apply"), [("silu", silu), ("gelu", gelu)])
def test_a_gated_map_writes_zeros_up_to_the_width_of_its_output(activation: str, apply: object) -> None:
    x, gate, up = normal(1, 40, seed=0), normal(50, 40, seed=1), normal(50, 40, seed=2)
    out = torch.full((1, 64), torch.nan, device=DEVICE)
    found = map_row(x, [gate, up], out=out, activation=activation, parameters=SMALL)
    torch.testing.assert_close(found[:, :50], apply(linear(x, gate)) * linear(x, up), rtol=1e-4, atol=1e-4)  # type: ignore[operator]
    assert not found[:, 50:].any()


def test_a_map_is_scaled_and_added_to_the_residual_stream() -> None:
    x, weight, hidden = normal(1, 70, seed=0), normal(33, 96, seed=1)[:, :70], normal(1, 33, seed=2)
    expected = hidden + 0.5 * linear(x, weight)
    map_row(x, [weight], out=hidden, scale=0.5, add=True, parameters=SMALL)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pairs", [0, 4, 6])
@pytest.mark.parametrize("position", [0, 9, 24])
def test_queries_and_keys_are_turned_and_keys_and_values_placed(pairs: int, position: int) -> None:
    x, norm = normal(1, 40, seed=0), normal(40, seed=1)
    weights = [normal(count * 12, 40, seed=2 + count) for count in (8, 4, 4)]  # heads of 12 numbers
    biases = [normal(len(weight), seed=len(weight)) for weight in weights]
    k, v = (torch.zeros(4, 10, 12, device=DEVICE) for _ in range(2))
    angle = normal(pairs, seed=1).cpu()
    angles = {"cos_F": angle.cos().to(DEVICE), "sin_F": angle.sin().to(DEVICE)} if pairs else {}
    slot = Slot(k_GKD=k, v_GKD=v, position_1=torch.tensor([position], dtype=torch.int32, device=DEVICE), **angles)
    found = map_row(x, weights, biases, out=x.new_empty(1, 16 * 12), norm_E=norm, eps=1e-5, slot=slot, parameters=SMALL)
    normed = rms_norm(x, (40,), norm, 1e-5)
    q_HD, k_GD, v_GD = (linear(normed, weight, bias).view(-1, 12) for weight, bias in zip(weights, biases, strict=True))
    if pairs:
        q_HD, k_GD = (
            rotate(y[None, :, None].cpu(), angle.cos(), angle.sin())[0, :, 0].to(DEVICE) for y in (q_HD, k_GD)
        )
    torch.testing.assert_close(found.view(16, 12), torch.cat([q_HD, k_GD, v_GD]), rtol=1e-4, atol=1e-4)
    for room, new in ((k, k_GD), (v, v_GD)):
        torch.testing.assert_close(room[:, position % 10], new, rtol=1e-4, atol=1e-4)
        assert int(room.any(-1).sum()) == 4
