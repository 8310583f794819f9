from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from sbeval.models import SbevalConfig, SbevalForCausalLM, softmax
from sbeval.models.biases import FIRE_INITIAL_THRESHOLD, AlibiBias, FireBias, alibi_slopes
from sbeval.models.softmax import chunked_causal_attention, long_causal_attention, softmax_attention

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def written_out(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, start: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The definition with an [L, L] mask; rows of padding are zero."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    k, v = k.repeat_interleave(heads // k.shape[1], 1), v.repeat_interleave(heads // v.shape[1], 1)
    logits = scale * q @ k.mT if bias is None else scale * q @ k.mT + bias
    row = torch.arange(keys - queries, keys)[:, None]
    key = torch.arange(keys)[None]
    seen = ((key <= row) & (row - key < (window or keys)))[None].expand(batch, -1, -1)
    if start is not None:
        seen = seen & (key >= start[:, None, None])
    return logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0.0) @ v


@settings(max_examples=60, deadline=None)
@given(
    queries=st.integers(1, 40),
    older=st.integers(0, 12),
    group=st.sampled_from([1, 2]),
    window=st.none() | st.integers(1, 9),
    padded=st.booleans(),
    scheme=st.sampled_from(["none", "alibi", "fire"]),
    elements=st.sampled_from([1, 50, 400, 3000, 1 << 20]),
)
def test_blocks_of_queries_equal_the_definition(queries, older, group, window, padded, scheme, elements):
    torch.manual_seed(0)
    keys, heads = queries + older, 4
    q, k, v = torch.randn(2, heads, queries, 8), *torch.randn(2, 2, heads // group, keys, 8)
    start = torch.tensor([0, keys // 2]) if padded else None
    position = torch.arange(older, keys).expand(2, -1)
    if start is not None:
        position = (position - start[:, None]).clamp_min(0)
    bias = {"none": None, "alibi": AlibiBias(heads), "fire": small_fire(heads)}[scheme]
    dense = None
    if bias is not None:
        distance = torch.arange(older, keys)[:, None] - torch.arange(keys)
        dense = bias(position, distance)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(softmax.MASK_ELEMENTS, "cpu", elements)
        options: dict[str, Any] = {"seq_start_B": start, "position_ids_BQ": position}
        output = softmax_attention(q, k, v, scale=0.7, sliding_window=window, bias=bias, **options)
        expected = written_out(q, k, v, 0.7, window, start, dense)
    assert output.isfinite().all()
    if start is not None:
        token = (torch.arange(older, keys) >= start[:, None])[:, None, :, None]
        output, expected = output * token, expected * token
    assert_close(output, expected, rtol=1e-4, atol=1e-5)


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = scale * q @ k.mT
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[2:]).triu(1).bool(), -torch.inf)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 40),
    chunk_tokens=st.integers(1, 45),
    group=st.sampled_from([1, 2]),
    spread=st.sampled_from([1.0, 300.0]),  # with the larger, nearly all weights are 0 or 1
)
def test_attention_in_pieces_of_keys_is_the_definition(length, chunk_tokens, group, spread):
    torch.manual_seed(length)
    q, k, v = (torch.randn(2, heads, length, 8, dtype=torch.float64) for heads in (4, 4 // group, 4 // group))
    pieces = chunked_causal_attention(q * spread, k, v, scale=0.7, chunk_tokens=chunk_tokens, attend=attended)
    assert_close(pieces, written_out(q * spread, k, v, 0.7, None, None, None), rtol=1e-9, atol=1e-9)


def test_many_pieces_round_no_more_than_one():
    def rounded(*arguments: Any) -> tuple[Tensor, Tensor]:
        output, log_sum = attended(*arguments)
        return output.to(torch.bfloat16), log_sum.float()

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 320, 16, dtype=torch.float64)
    exact = written_out(q, k, v, 0.25, None, None, None)
    errors = [
        (chunked_causal_attention(q, k, v, scale=0.25, chunk_tokens=tokens, attend=rounded) - exact)
        .square()
        .mean()
        .sqrt()
        for tokens in (20, 320)
    ]
    assert errors[0] <= errors[1]


@pytest.mark.skipif(not HOPPER, reason="texts are cut for the cache of compute capability 9.0")
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("texts", "length", "head_dim", "pieces"), [(1, 4096, 128, 2), (2, 3001, 64, 5), (1, 2049, 256, 3)]
)
def test_keys_that_outgrow_the_cache_change_no_more_than_rounding(dtype, texts, length, head_dim, pieces, monkeypatch):
    shape = (texts, length, 4, head_dim)  # heads as a model's projections leave them, one position after the other
    q, k, v = (torch.randn(shape, device="cuda").to(dtype).transpose(1, 2) for _ in range(3))
    k, v = k[:, :2], v[:, :2]
    whole = softmax_attention(q, k, v, scale=0.3)
    assert long_causal_attention(q, k, v, scale=0.3) is None
    monkeypatch.setattr(softmax, "CACHED_BYTES", -(-4 * length * head_dim // pieces))
    cut = softmax_attention(q, k, v, scale=0.3)
    assert not torch.equal(cut, whole)
    expected = softmax_attention(*(x.double() for x in (q, k, v)), scale=0.3)
    error, error_of_whole = ((x.double() - expected).square().mean().sqrt() for x in (cut, whole))
    assert error <= 1.5 * error_of_whole


@settings(max_examples=60, deadline=None)
@given(
    queries=st.integers(1, 50),
    older=st.sampled_from([0, 0, 1, 7, 16]),
    window=st.none() | st.integers(1, 40),
    padded=st.booleans(),
    scheme=st.sampled_from(["none", "alibi", "fire"]),
    elements=st.sampled_from([50, 400, 3000, 1 << 20]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
@torch.no_grad()
def test_rows_of_a_mask_begin_where_kernels_can_read_them(queries, older, window, padded, scheme, elements, dtype):
    keys = queries + older
    q, k, v = torch.randn(2, 2, queries, 8, dtype=dtype), *torch.randn(2, 2, 2, keys, 8, dtype=dtype)
    bias = {"none": None, "alibi": AlibiBias(2), "fire": small_fire(2)}[scheme]
    handed_over: list[Tensor] = []

    def attention(*args: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        handed_over.extend([] if attn_mask is None else [attn_mask])
        return torch.nn.functional.scaled_dot_product_attention(*args, attn_mask=attn_mask, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(softmax.MASK_ELEMENTS, "cpu", elements)
        patch.setattr(softmax, "scaled_dot_product_attention", attention)
        start, position = torch.tensor([0, keys // 2]) if padded else None, torch.arange(older, keys)[None]
        options: dict[str, Any] = {"seq_start_B": start, "position_ids_BQ": position}
        softmax_attention(q, k, v, scale=0.7, sliding_window=window, bias=bias, **options)
    assert handed_over or (bias is None and not padded and (window is None or window >= keys))
    for mask in handed_over:
        assert (mask.stride(-1), mask.data_ptr() % 16) == (1, 0)
        assert not any(stride * mask.itemsize % 16 for stride in mask.stride()[:-1])


def small_fire(heads: int) -> FireBias:
    fire = FireBias(heads)
    with torch.no_grad():
        for parameter in fire.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        fire.scale.fill_(-0.3)
        fire.threshold_multiple.fill_(4.0 / FIRE_INITIAL_THRESHOLD)
    return fire


@pytest.mark.parametrize("scheme", ["none", "alibi", "fire"])
def test_gradients_through_blocks_are_those_of_one_block(scheme, monkeypatch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    bias: Any = {"none": None, "alibi": AlibiBias(4), "fire": small_fire(4)}[scheme]
    leaves = [q, k, v, *(bias.parameters() if scheme == "fire" else [])]
    gradients = []
    for elements in (1 << 20, 100):
        monkeypatch.setitem(softmax.MASK_ELEMENTS, "cpu", elements)
        output = softmax_attention(q, k, v, scale=0.4, sliding_window=11, bias=bias)
        gradients.append(torch.autograd.grad(output.square().sum(), leaves))
    for whole, blocks in zip(*gradients, strict=True):
        assert_close(whole, blocks, rtol=1e-4, atol=1e-4)


def test_backward_keeps_no_mask_of_earlier_blocks(monkeypatch):
    monkeypatch.setitem(softmax.MASK_ELEMENTS, "cpu", 4 * 256 * 8)
    q, k, v = (torch.randn(1, 4, 256, 8, requires_grad=True) for _ in range(3))
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        softmax_attention(q, k, v, scale=0.4, bias=AlibiBias(4))
    assert sum(kept.values()) < 4 * 256 * 256


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (8, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (12, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibi_slopes_are_those_of_the_paper(heads, slopes):
    assert alibi_slopes(heads) == slopes


def test_fire_begins_with_units_that_bend_between_the_nearest_key_and_the_farthest():
    torch.manual_seed(0)
    config = SbevalConfig(attention="fire", hidden_size=32, num_hidden_layers=8, num_attention_heads=2)
    biases = [module for module in SbevalForCausalLM(config).modules() if isinstance(module, FireBias)]
    slopes = torch.cat([bias.hidden.weight.detach()[:, 0] for bias in biases])
    nearest = torch.cat([bias.hidden.bias.detach() for bias in biases])
    farthest = nearest + slopes
    assert (nearest.sign() != farthest.sign()).float().mean() > 0.15
    assert ((nearest <= 0) & (farthest <= 0)).float().mean() < 0.45
    assert all(bias.threshold_tokens() == FIRE_INITIAL_THRESHOLD for bias in biases)


def test_fire_follows_its_formula_point_by_point():
    torch.manual_seed(0)
    fire = small_fire(3).double()
    position = torch.tensor([[2, 9]])
    distance = torch.tensor([[0, 1, 2], [7, 8, 9]])
    with torch.no_grad():
        bias = fire(position, distance)
        for row, reach in enumerate((4.0, 9.0)):
            for column in range(3):
                share = torch.log1p(0.3 * distance[row, column]) / torch.log1p(torch.tensor(0.3 * reach))
                inner = (fire.hidden.weight[:, 0].float() * share + fire.hidden.bias.float()).relu()
                expected = fire.output.weight.float() @ inner + fire.output.bias.float()
                assert_close(bias[0, :, row, column], expected, rtol=1e-4, atol=1e-4)


def test_fire_learns_all_its_weights_under_bf16_autocast_as_in_fp32():
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = SbevalForCausalLM(SbevalConfig(attention="fire", num_attention_heads=2, **shape)).train()
    tokens = torch.randint(64, (4, 48))
    gradients = []
    for bf16 in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            model(input_ids=tokens, labels=tokens).loss.backward()
        of_biases = {name: weight.grad for name, weight in model.named_parameters() if ".mixer.bias." in name}
        gradients.append({name: gradient.clone() for name, gradient in of_biases.items() if gradient is not None})
    fp32, rounded = gradients
    assert len(fp32) == len(rounded) == 2 * 6
    for layer in range(2):
        # the constant of each head changes no softmax
        names = [name for name in fp32 if f"layers.{layer}." in name and not name.endswith("output.bias")]
        assert all(fp32[name].abs().max() > 0 for name in names)
        whole, other = (torch.cat([grads[name].flatten() for name in names]) for grads in gradients)
        assert torch.cosine_similarity(whole, other, dim=0) > 0.95
