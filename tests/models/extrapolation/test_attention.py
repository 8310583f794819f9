"""Attention in zones is that of the papers' definitions, which were written without a look at the code."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from sbeval.models.extrapolation import ExtrapolatedAttention, Extrapolation, attention
from sbeval.models.extrapolation.attention import compiled_zones, flex_extrapolated, zone_blocks
from sbeval.models.rope import RopeFrequencies, cos_sin, rotate
from sbeval.models.softmax import softmax_attention
from tests.models.small import listed_blocks


def distance(method: str, numbers: tuple[int, ...], query: int, key: int) -> int | None:
    """By how many positions query and key are rotated apart, None where the query does not see the key."""
    if key > query:
        return None
    if method == "self_extend":
        group, window = numbers
        if query - key < window:
            return query - key
        return (query // group + window - window // group) - key // group
    if method == "dual_chunk":
        chunk, local = numbers
        apart = query // chunk - key // chunk
        rotated = [query % chunk, min(query % chunk + chunk, chunk + local - 1), chunk + local - 1][min(apart, 2)]
        return rotated - key % chunk
    if method == "sink_window":
        sink, window = numbers
        cache = sorted({*range(min(sink, query + 1)), *range(max(0, query - window + 1), query + 1)})
        return cache.index(query) - cache.index(key) if key in cache else None
    assert method == "log_length"
    return query - key


def definition(
    method: str,
    numbers: tuple[int, ...],
    q_HLD: Tensor,
    k_GLD: Tensor,
    v_GLD: Tensor,
    *,
    inv_freq_F: Tensor,
    scale: float,
    trained_at: int,
) -> Tensor:
    """Returns [H, L, D] in fp64 from the matrix of all weights."""
    q_HLD, k_HLD, v_HLD = (x.double().repeat_interleave(len(q_HLD) // len(x), dim=0) for x in (q_HLD, k_GLD, v_GLD))
    pairs, length = len(inv_freq_F), q_HLD.shape[1]

    def as_complex(x_HLD: Tensor) -> Tensor:
        return torch.complex(x_HLD[..., :pairs], x_HLD[..., pairs : 2 * pairs])

    logits_HLL = torch.full((len(q_HLD), length, length), -torch.inf, dtype=torch.float64)
    for query in range(length):
        factor = 1.0
        if method == "log_length":
            factor = max(1.0, math.log(query + 1) / math.log(trained_at))
        for key in range(length):
            apart = distance(method, numbers, query, key)
            if apart is not None:
                turn_F = torch.polar(torch.ones(pairs, dtype=torch.float64), apart * inv_freq_F.double())
                turned_HF = as_complex(q_HLD[:, query]) * turn_F * as_complex(k_HLD[:, key]).conj()
                rest_H = (q_HLD[:, query, 2 * pairs :] * k_HLD[:, key, 2 * pairs :]).sum(-1)
                logits_HLL[:, query, key] = factor * scale * (turned_HF.real.sum(-1) + rest_H)
    return logits_HLL.softmax(-1) @ v_HLD


ON_GPU = torch.cuda.is_available()
TRAINED = 16
SCALE = 0.4
# rotation angles are fp32 in the model and fp64 in the definitions
NEAR = {"rtol": 1e-4, "atol": 1e-5}
sizes = st.integers(1, 9)
OF_ZONES = st.tuples(st.sampled_from(["self_extend", "dual_chunk", "sink_window"]), st.tuples(sizes, sizes))
Asked = tuple[str, tuple[int, ...]]
METHODS = st.one_of(OF_ZONES, st.just(("log_length", ())))


def made(method: str, numbers: tuple[int, ...], pairs: int = 4) -> ExtrapolatedAttention:
    inv_freq = 1.0 / 50.0 ** (torch.arange(pairs) / pairs)
    found = Extrapolation(method=method, numbers=numbers).trained_at(None if numbers else TRAINED)
    return ExtrapolatedAttention(found, RopeFrequencies(inv_freq, 1.0))


def heads(length: int, *, batch: int = 1, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, count, length, 10, generator=generator, dtype=torch.float64) for count in (4, 2, 2)]


def expected(way: ExtrapolatedAttention, texts: list[Tensor]) -> Tensor:
    rows = zip(*texts, strict=True)
    options: dict[str, Any] = {"inv_freq_F": way.frequencies.inv_freq, "scale": SCALE, "trained_at": TRAINED}
    return torch.stack([definition(way.method.method, way.method.numbers, *row, **options) for row in rows])


@settings(max_examples=25, deadline=None)
@given(asked=METHODS, length=st.integers(1, 30), rows=st.integers(1, 50), pairs=st.integers(1, 5))
def test_it_is_the_attention_of_the_definition_whatever_the_blocks(
    asked: Asked, length: int, rows: int, pairs: int
) -> None:
    way, texts = made(*asked, pairs=pairs), heads(length, batch=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention.MASK_ELEMENTS, "cpu", rows * 2 * 4 * length)
        assert_close(way(*texts, scale=SCALE), expected(way, texts), **NEAR)


@settings(max_examples=20, deadline=None)
@given(asked=METHODS, length=st.integers(1, 20), padding=st.lists(st.integers(0, 12), min_size=1, max_size=3))
def test_left_padding_changes_nothing(asked: Asked, length: int, padding: list[int]) -> None:
    way, widest = made(*asked), length + max(padding)
    texts = heads(widest, batch=len(padding))
    # every row ends together and begins behind its padding, which holds anything
    starts = torch.tensor([widest - length - (max(padding) - own) for own in padding]).clamp_min(0)
    found = way(*texts, scale=SCALE, seq_start_B=starts)
    assert bool(found.isfinite().all())
    for row, start in enumerate(starts.tolist()):
        own = [x[row : row + 1, :, start:] for x in texts]
        assert_close(found[row : row + 1, :, start:], expected(way, own), **NEAR)


@settings(max_examples=40, deadline=None)
@given(asked=METHODS, length=st.integers(1, 30), new=st.integers(1, 30))
def test_the_last_queries_of_a_cache_are_the_last_rows_of_the_whole_text(asked: Asked, length: int, new: int) -> None:
    way, (q, k, v) = made(*asked), heads(length)
    last = q[:, :, -new:]
    assert_close(way(last, k, v, scale=SCALE), way(q, k, v, scale=SCALE)[:, :, -new:])


@settings(max_examples=20, deadline=None)
@given(asked=METHODS, lengths=st.lists(st.integers(1, 15), min_size=1, max_size=4))
def test_packed_texts_do_not_see_each_other(asked: Asked, lengths: list[int]) -> None:
    way, texts = made(*asked), heads(sum(lengths))
    found = way(*texts, scale=SCALE, lengths=tuple(lengths))
    alone = [way(*text, scale=SCALE) for text in zip(*(x.split(lengths, dim=2) for x in texts), strict=True)]
    assert_close(found, torch.cat(alone, dim=2))


@settings(max_examples=40, deadline=None)
@given(asked=METHODS)
def test_it_is_plain_attention_up_to_the_tokens_it_says_and_not_far_beyond(asked: Asked) -> None:
    way = made(*asked)
    longest, beyond = way.method.unchanged_tokens, 3 * (sum(asked[1]) + TRAINED)
    q, k, v = heads(beyond)

    def plain(length: int) -> Tensor:
        angles = cos_sin(way.frequencies, torch.arange(length)[None])
        turned = [rotate(x[:, :, :length], *angles) for x in (q, k)]
        return softmax_attention(*turned, v[:, :, :length], scale=SCALE)

    assert_close(way(q[:, :, :longest], k[:, :, :longest], v[:, :, :longest], scale=SCALE), plain(longest), **NEAR)
    method, numbers = asked
    if method != "self_extend" or numbers[0] > 1:
        assert (way(q, k, v, scale=SCALE) - plain(beyond)).abs().max() > 1e-4


@settings(max_examples=12, deadline=None)
@given(
    asked=METHODS.filter(lambda asked: asked[0] != "log_length"), length=st.integers(1, 400), scaled=st.integers(1, 40)
)
@torch.no_grad()
def test_flex_attention_in_zones_is_as_in_blocks(asked: Asked, length: int, scaled: int) -> None:
    way = made(asked[0], tuple(scaled * number for number in asked[1]))
    # a head of 16 channels is the smallest the kernel takes
    q, k, v = (torch.cat([x, x[..., :6]], dim=-1).float() for x in heads(length))
    position = torch.arange(length)[None]

    def rotated(zone: Any) -> tuple[Tensor, Tensor]:
        return tuple(
            rotate(x, *cos_sin(way.frequencies, of(position))).to("cuda" if ON_GPU else "cpu")
            for x, of in ((q, zone.query), (k, zone.key))
        )

    found = (
        compiled_zones(way.method, rotated, v.cuda(), scale=SCALE)
        if ON_GPU
        else flex_extrapolated(way.method, rotated, v, scale=SCALE)
    )
    near = {"rtol": 1e-3, "atol": 1e-3} if ON_GPU else NEAR
    assert_close(found.cpu(), way(q, k, v, scale=SCALE), **near)


@settings(max_examples=30, deadline=None)
@given(asked=METHODS, blocks=st.integers(1, 5), scaled=st.integers(1, 60))
def test_blocks_hold_every_pair_of_a_part_and_full_ones_no_other(asked: Asked, blocks: int, scaled: int) -> None:
    way = made(asked[0], tuple(scaled * number for number in asked[1]))
    position = torch.arange(128 * blocks)
    times_seen = torch.zeros(len(position), len(position), dtype=torch.int64)
    for zone in way.method.zones:
        first, stop = zone.first(position), zone.stop(position)
        seen = (position >= first[:, None]) & (position < stop[:, None])
        times_seen += seen
        partial, full = listed_blocks(zone_blocks(first.int(), stop.int()), blocks)
        tiles = seen.view(blocks, 128, blocks, 128)
        assert torch.equal(full, tiles.all(3).all(1))
        assert bool((full | partial)[tiles.any(3).any(1)].all())
    older = position[:, None] >= position
    assert not bool((times_seen > 1).any()), "a pair is in two zones"
    if asked[0] != "sink_window":
        assert torch.equal(times_seen, older.long()), "a pair is in no zone"


def test_gradients_flow_through_the_blocks() -> None:
    way, texts = made("self_extend", (2, 3)), [x.requires_grad_() for x in heads(9)]
    way(*texts, scale=SCALE).sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in texts)
