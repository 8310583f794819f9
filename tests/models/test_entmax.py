"""Entmax attention, SSMax, ASEntmax and NAPE against their definitions in fp64."""

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import softplus
from torch.testing import assert_close

from sbeval.models import SbevalForCausalLM
from sbeval.models.biases import AlibiBias, nape_slopes
from sbeval.models.entmax import attention as blocks
from sbeval.models.entmax import kernel
from sbeval.models.entmax.attention import entmax_attention, entmax_decode
from sbeval.models.entmax.definition import exact_entmax15, reference_attention
from sbeval.models.entmax.scales import SSMaxScale
from sbeval.models.entmax.weights import all_newton_steps, compiled_thresholds, entmax15, thresholds
from sbeval.models.softmax import rows_of_a_block
from tests.models.small import VARIANTS, small_config, small_model, tokens, written_out

HAS_ADASPLASH = torch.cuda.is_available() and importlib.util.find_spec("adasplash") is not None
needs_adasplash = pytest.mark.skipif(not HAS_ADASPLASH, reason="needs a GPU and the package adasplash")


def halved(logits: Tensor) -> Tensor:
    """Weights of one row from a threshold that 200 halvings of an interval find."""
    low, high = float(logits.max()) / 2 - 1, float(logits.max()) / 2
    for _ in range(200):
        middle = (low + high) / 2
        total = float((logits / 2 - middle).clamp_min(0).square().sum())
        low, high = (middle, high) if total > 1 else (low, middle)
    return (logits / 2 - low).clamp_min(0).square()


@pytest.mark.parametrize("apart", [0.0, 0.3, -1.9, 1.999, 2.5, 40.0])
def test_two_logits_have_the_weights_of_the_closed_form(apart: float) -> None:
    half = min(max(apart / 2, -1.0), 1.0)
    tau = (half - (2 - half * half) ** 0.5) / 2
    expected = torch.tensor([max(half - tau, 0.0) ** 2, max(-tau, 0.0) ** 2], dtype=torch.float64)
    assert_close(exact_entmax15(torch.tensor([apart, 0.0], dtype=torch.float64)), expected)


@settings(max_examples=100, deadline=None)
@given(
    keys=st.sampled_from([1, 2, 3, 17, 400]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 30.0, 1e6]),
    hidden=st.integers(0, 16),
    seed=st.integers(0, 1000),
)
def test_weights_are_those_of_the_definition(keys: int, spread: float, hidden: int, seed: int) -> None:
    logits = spread * torch.randn(3, keys, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    logits[1, 1 : 1 + hidden] = -torch.inf
    exact = exact_entmax15(logits)
    assert_close(entmax15(logits), exact, rtol=1e-9, atol=1e-12)
    assert_close(exact.sum(-1), torch.ones(3, dtype=torch.float64))
    assert_close(exact[1], halved(logits[1]), rtol=1e-6, atol=1e-9)
    assert_close(entmax15(logits.float()).double(), exact, rtol=1e-4, atol=1e-5)


def rows_that_need_many_steps() -> list[Tensor]:
    """z = 0, and ever more z ever closer to the lowest threshold."""
    rows = []
    for share in (0.5, 1.0, 2.0):
        for power in (2.0, 2.5, 3.0):
            for ratio in (1.5, 2.0, 4.0):
                counts = [min(int(share * ratio ** (power * k)), 20_000) for k in range(1, 12)]
                parts = [torch.full((count,), ratio**-k - 1) for k, count in enumerate(counts, 1) if count]
                rows.append(torch.cat([torch.zeros(1), *parts]).double()[None])
    return rows


def test_newton_steps_end_at_the_threshold_even_of_bad_rows() -> None:
    for z in rows_that_need_many_steps():
        expected = exact_entmax15(2 * z)
        for tau in (thresholds(z), all_newton_steps(z)):
            assert_close((z - tau).clamp_min(0).square(), expected, rtol=1e-7, atol=1e-9)
        assert_close(thresholds(z.float()).double(), thresholds(z), rtol=0, atol=1e-5)


def test_the_threshold_is_compiled_once_for_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(all_newton_steps, dynamic=True, fullgraph=True, backend=backend)
    monkeypatch.setattr("sbeval.models.entmax.weights.compiled_once", lambda function: compiled)
    for shape in [(2, 3, 6), (2, 1, 3, 3), (2, 1, 3, 9), (1, 1, 5, 7), (2, 4, 1, 6), (3, 2, 1, 4, 5, 6)]:
        z = torch.randn(shape)
        z = z - z.amax(-1, keepdim=True)
        assert_close(compiled_thresholds(z), thresholds(z), rtol=0, atol=1e-5)
    assert len(graphs) == 1


def test_gradients_are_those_of_the_weights() -> None:
    torch.manual_seed(0)
    logits = (2 * torch.randn(4, 9, dtype=torch.float64)).requires_grad_()
    assert (entmax15(logits) == 0).any()
    assert torch.autograd.gradcheck(entmax15, logits)
    seen = torch.ones(4, 9).tril(5).bool()
    assert torch.autograd.gradcheck(lambda x: entmax15(x.masked_fill(~seen, -torch.inf)), logits)


BIASES = {"none": None, "alibi": AlibiBias(4), "nape": AlibiBias(4, nape_slopes(4))}


@settings(max_examples=80, deadline=None)
@given(
    queries=st.integers(1, 40),
    older=st.integers(0, 12),
    group=st.sampled_from([1, 2, 4]),
    window=st.none() | st.integers(1, 9),
    padded=st.booleans(),
    scheme=st.sampled_from(list(BIASES)),
    elements=st.sampled_from([1, 600, 4000, 1 << 20]),
    spread=st.sampled_from([0.2, 3.0]),
    short_tokens=st.sampled_from([0, 128]),
    shortest_chunk=st.sampled_from([1, 64]),
)
def test_blocks_of_queries_equal_the_definition(
    queries, older, group, window, padded, scheme, elements, spread, short_tokens, shortest_chunk
):
    torch.manual_seed(0)
    keys, heads = queries + older, 4
    q, k, v = torch.randn(2, heads, queries, 8), *torch.randn(2, 2, heads // group, keys, 8)
    q = q * spread
    start = torch.tensor([0, keys // 2]) if padded else None
    bias = BIASES[scheme]
    slopes = None if bias is None else torch.tensor(bias.slopes, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(blocks.BLOCK_ELEMENTS, "cpu", elements)
        patch.setattr(blocks, "SHORT_TOKENS", short_tokens)
        patch.setattr(blocks, "FEW_QUERIES", short_tokens)
        patch.setattr(blocks, "SHORTEST_CHUNK", shortest_chunk)
        options: dict[str, Any] = {"scale": 0.7, "sliding_window": window, "seq_start_B": start}
        output = entmax_attention(q, k, v, **options, bias=bias)
        expected = reference_attention(q.double(), k.double(), v.double(), **options, slope_H=slopes)
    assert_close(output.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scheme", ["alibi", "nape"])
@pytest.mark.parametrize("longer", [0, 1])
def test_the_longest_short_text_and_the_next_longer_one_equal_the_definition(
    scheme: str, longer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    tokens = blocks.SHORT_TOKENS + longer
    double = [torch.randn(2, heads, tokens, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    single = [x.detach().float().requires_grad_() for x in double]
    head_counts: set[int] = set()

    def counted(logits_BGNMRC: Tensor) -> Tensor:
        head_counts.add(logits_BGNMRC.shape[1] * logits_BGNMRC.shape[3])
        return entmax15(logits_BGNMRC)

    monkeypatch.setattr(blocks, "entmax15", counted)
    bias = AlibiBias(4, [4.0, 1.0, 0.25, 0.06] if scheme == "alibi" else nape_slopes(4))
    output = entmax_attention(*single, scale=0.7, bias=bias)
    exact = reference_attention(*double, scale=0.7, slope_H=torch.tensor(bias.slopes, dtype=torch.float64))
    if longer:
        assert head_counts == {2}  # two heads with similar reaches, and two that see all keys
    else:
        assert head_counts == {4}
    assert_close(output.double(), exact, rtol=1e-4, atol=1e-5)
    gradient = torch.randn_like(exact)
    gradients = torch.autograd.grad(output, single, gradient.float())
    exact_gradients = torch.autograd.grad(exact, double, gradient)
    for computed, expected in zip(gradients, exact_gradients, strict=True):
        assert_close(computed.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scheme", list(BIASES))
@pytest.mark.parametrize("short_tokens", [0, 128])
def test_gradients_through_blocks_are_those_of_the_definition(
    scheme: str, short_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(blocks, "SHORT_TOKENS", short_tokens)
    monkeypatch.setattr(blocks, "FEW_QUERIES", short_tokens)
    monkeypatch.setattr(blocks, "SHORTEST_CHUNK", 1)
    bias = BIASES[scheme]
    slopes = None if bias is None else torch.tensor(bias.slopes, dtype=torch.float64)
    q, k, v = (torch.randn(2, heads, 16, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    monkeypatch.setitem(blocks.BLOCK_ELEMENTS, "cpu", 600)
    assert rows_of_a_block(16, 16, 16, 600 // (blocks.TENSORS_OF_A_BLOCK * 8)) < 16
    output = entmax_attention(q, k, v, scale=0.9, bias=bias)
    exact = reference_attention(q, k, v, scale=0.9, slope_H=slopes)
    gradient = torch.randn_like(output)
    found, expected = (torch.autograd.grad(y, (q, k, v), gradient) for y in (output, exact))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_backward_keeps_the_weights_of_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blocks.BLOCK_ELEMENTS, "cpu", 4 * 4 * 256 * 8)
    q, k, v = (torch.randn(1, 4, 256, 8, requires_grad=True) for _ in range(3))
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        entmax_attention(q, k, v, scale=0.4)
    assert sum(kept.values()) < 4 * 256 * 256


@settings(max_examples=200, deadline=None)
@given(
    queries=st.integers(1, 3000),
    older=st.sampled_from([0, 1, 500]),
    share=st.floats(0.001, 1.0),
    elements=st.sampled_from([1, 3000, 1 << 17, 1 << 24]),
    copied=st.sampled_from([0, 16]),
    batched=st.booleans(),
)
@example(queries=682, older=1, share=0.375, elements=1 << 17, copied=0, batched=True)
def test_blocks_cover_each_query_once_and_windows_save_logits(
    queries: int, older: int, share: float, elements: int, copied: int, batched: bool
) -> None:
    keys = queries + older
    window = max(1, round(share * keys))
    made = blocks._blocks(queries, keys, window, elements, batched=batched, copied_elements=copied)
    ends = [max(0, block.first_query) for block in made] + [queries]
    assert ends[0] == 0
    assert ends[1:] == [block.end_query for block in made]
    without_window = blocks._blocks(queries, keys, keys, elements, batched=True)
    assert blocks._logits(made) <= blocks._logits(without_window)
    for block in made:
        assert block.columns >= min(block.rows + window - 1, block.end_key)
        needed = block.chunks * (block.rows * block.columns + copied * (block.rows + block.columns))
        assert block.chunks == 1 or needed <= elements


@torch.no_grad()
def test_heads_with_alibi_compute_only_keys_that_may_have_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 300, 8)
    widths: list[int] = []
    monkeypatch.setattr(blocks, "entmax15", lambda logits: widths.append(logits.shape[-1]) or entmax15(logits))
    monkeypatch.setitem(blocks.BLOCK_ELEMENTS, "cpu", 4 * 300 * 16)
    output = entmax_attention(q, k, v, scale=0.35, bias=AlibiBias(4, [2.0, 1.0, 0.0, 0.0]))
    with_slope = [width for width in widths if width <= 100]
    assert with_slope
    assert max(widths) == 300
    slopes = torch.tensor([2.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    expected = reference_attention(*(x.double() for x in (q, k, v)), scale=0.35, slope_H=slopes)
    assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
    q[..., 7, 3] = torch.nan
    assert not entmax_attention(q, k, v, scale=0.35, bias=AlibiBias(4)).isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("slopes", [None, [1.0, 0.5, 0.0, 0.0]])
def test_a_decode_step_is_the_definition_for_each_slot(
    slopes: list[float] | None, queries: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    lengths = [3, 20, 9]
    q, k, v = torch.randn(3, 4, queries, 8).to(dtype), *torch.randn(2, 3, 2, 24, 8).to(dtype)
    slope_H = None if slopes is None else torch.tensor(slopes)
    output = entmax_decode(q, k, v, torch.tensor(lengths), scale=0.8, slope_H=slope_H)
    assert output.dtype == dtype
    tolerance = {} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    for slot, length in enumerate(lengths):
        one = (q[slot, None], *(x[slot, None, :, :length] for x in (k, v)))
        expected = reference_attention(*(x.double() for x in one), scale=0.8, slope_H=slope_H)
        assert_close(output[slot, None].double(), expected, **tolerance)


def test_half_of_nape_s_heads_have_harmonic_slopes_and_the_others_none() -> None:
    assert nape_slopes(8) == [1.0, 1 / 2, 1 / 3, 1 / 4, 0.0, 0.0, 0.0, 0.0]
    assert nape_slopes(3) == [1.0, 0.0, 0.0]
    assert nape_slopes(1) == [0.0]


def factors(variant: dict[str, Any], hidden: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The factor of each head's queries, [L, heads], as the papers have them."""
    count = torch.arange(1, len(hidden) + 1, dtype=torch.float64)[:, None].clamp_max(variant.get("sliding_window", 99))
    if variant["attention_weights"] == "ssmax":
        scaled = weights["query_scale.factor.multiple"] * count.log()
    else:
        raw = hidden @ weights["query_scale.factor.weight"].T + weights["query_scale.factor.bias"]
        beta, gamma = raw.chunk(2, dim=1)
        scaled = 1 + softplus(beta) * (count + 1).log() ** (2 * gamma.tanh())
    return torch.cat([torch.ones(len(hidden), 4 - scaled.shape[1], dtype=torch.float64), scaled], dim=1)


@pytest.mark.parametrize("position", ["nope", "nape"])
@pytest.mark.parametrize("weights", ["softmax", "ssmax", "entmax15", "asentmax"])
@torch.no_grad()
def test_a_model_equals_its_definition_written_out(position: str, weights: str) -> None:
    fields: dict[str, Any] = {"attention": position, "attention_weights": weights, "sliding_window": 9}
    model, ids = small_model(num_hidden_layers=1, initializer_range=0.4, **fields).double(), tokens(1, 14)[0]

    def mix(q: Tensor, k: Tensor, v: Tensor, normed: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        if weights in ("ssmax", "asentmax"):
            factor = factors(fields, normed, tensors)
            assert (factor[5] == 1).sum() == (2 if position == "nape" else 0)
            q = q * factor[..., None]
        slopes = torch.tensor([1.0, 0.5, 0.0, 0.0] if position == "nape" else [0.0] * 4, dtype=torch.float64)
        options: dict[str, Any] = {"entmax": "entmax" in weights, "sliding_window": 9, "slope_H": slopes}
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        return reference_attention(*heads, scale=8**-0.5, **options)[0].transpose(0, 1)

    assert_close(model(ids[None]).logits[0], written_out(model, ids, mix), rtol=1e-6, atol=1e-6)


def test_ssmax_begins_with_a_mean_factor_of_one() -> None:
    config = small_config(attention="rope", attention_weights="ssmax", training_length_tokens=1024)
    (scale, *_) = [module for module in SbevalForCausalLM(config).modules() if isinstance(module, SSMaxScale)]
    factor = scale(torch.empty(0), torch.arange(1, 1025)[None])
    assert_close(factor.mean(), torch.tensor(1.0), rtol=1e-4, atol=1e-4)
    assert scale.multiple.tolist() == pytest.approx([0.1685] * 4, abs=1e-4)


ENTMAX_OR_SCALED = [name for name, fields in VARIANTS.items() if "attention_weights" in fields]


@pytest.mark.parametrize("variant", ENTMAX_OR_SCALED)
@torch.no_grad()
def test_packed_texts_have_the_logits_of_each_alone(variant: str) -> None:
    model, lengths = small_model(**VARIANTS[variant]), [5, 1, 12]
    ids = tokens(1, sum(lengths))
    packed = model(ids, cu_seqlens=torch.tensor([0, 5, 6, 18], dtype=torch.int32), use_cache=False).logits
    alone = [model(text).logits for text in ids.split(lengths, dim=1)]
    assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-4)


@needs_adasplash
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("length", "group", "head_dim", "scale"),
    [
        (128, 1, 64, 0.125),
        (1024, 2, 64, 0.125),
        (1500, 1, 64, 0.4),
        (9000, 1, 64, 0.125),
        (700, 1, 32, 32**-0.5),
        (700, 2, 128, 128**-0.5),
    ],
)
def test_adasplash_gives_the_definition_s_values(
    dtype: torch.dtype, length: int, group: int, head_dim: int, scale: float
) -> None:
    torch.manual_seed(0)
    shapes = [(2, heads, length, head_dim) for heads in (4, 4 // group, 4 // group)]
    q, k, v = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    assert kernel.suits_adasplash(q, k, v)
    output = kernel.adasplash_attention(q, k, v, scale=scale)
    assert output is not None
    exact = reference_attention(*(x.double() for x in (q, k, v)), scale=scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "suits_adasplash", lambda *heads: False)
        in_pytorch = entmax_attention(q, k, v, scale=scale)
    error, error_in_pytorch = ((x.double() - exact).square().mean().sqrt() for x in (output, in_pytorch))
    assert error <= max(2 * error_in_pytorch, 1e-5)


@pytest.mark.parametrize("length", [1, 64, 127])
def test_adasplash_is_not_used_for_texts_that_its_backward_pass_overruns(length: int) -> None:
    class OnGpu:
        is_cuda = True

        def __getattr__(self, name: str) -> Any:
            return getattr(torch.empty(1, 2, length, 64), name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "is_installed", lambda: True)
        q: Any = OnGpu()
        assert not kernel.suits_adasplash(q, q, q)


@pytest.mark.parametrize(
    ("head_dim", "scale", "dtype"), [(64, 0.125, "bf16"), (32, 32**-0.5, "bf16"), (64, 0.4, "fp32")]
)
def test_a_scale_rounds_no_query_before_adasplash_does(
    head_dim: int, scale: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def sparse_attn(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        seen.extend((q, k, v))
        return q

    module = types.SimpleNamespace(sparse_attn=sparse_attn)
    monkeypatch.setitem(sys.modules, "adasplash.adasplash_v2", module)
    q, k, v = (torch.randn(1, 2, 128, head_dim).bfloat16() for _ in range(3))
    output = kernel.adasplash_attention(q, k, v, scale=scale)
    assert output is not None
    assert output.dtype == torch.bfloat16
    assert {x.dtype for x in seen} == {torch.bfloat16 if dtype == "bf16" else torch.float32}
    assert_close(seen[0].double(), q.double() * scale * head_dim**0.5, rtol=1e-6, atol=0)


@needs_adasplash
@pytest.mark.parametrize("length", [128, 700, 1024])
def test_adasplash_gives_the_definition_s_gradients(length: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, 64, device="cuda", requires_grad=True) for heads in (4, 2, 2))
    output = kernel.adasplash_attention(q, k, v, scale=0.125)
    assert output is not None
    gradient = torch.randn_like(output)
    found = torch.autograd.grad(output, (q, k, v), gradient)
    double = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(reference_attention(*double, scale=0.125), double, gradient.double())
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= 1e-3 * other.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
@pytest.mark.parametrize("scheme", ["alibi", "nape"])
@pytest.mark.parametrize("padded", [False, True])
def test_heads_with_alibi_have_the_definition_s_values_on_a_gpu(scheme: str, padded: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 3000, 32, device="cuda") for heads in (4, 2, 2))
    start = torch.tensor([0, 700], device="cuda") if padded else None
    bias = BIASES[scheme]
    assert bias is not None
    slope_H = torch.tensor(bias.slopes, dtype=torch.float64, device="cuda")
    output = entmax_attention(q, k, v, scale=0.2, seq_start_B=start, bias=bias)
    double = (x.double() for x in (q, k, v))
    exact = reference_attention(*double, scale=0.2, seq_start_B=start, slope_H=slope_H)
    assert (output.double() - exact).square().mean().sqrt() <= 1e-3 * exact.square().mean().sqrt()
