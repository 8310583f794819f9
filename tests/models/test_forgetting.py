"""Every implementation of forgetting attention equals the definition; skipping changes outputs by at most the limit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import rms_norm
from torch.testing import assert_close
from written_out import softmax

from sbeval.errors import UserError
from sbeval.models.flex import flex_causal_attention, whole_blocks
from sbeval.models.forgetting.layer import cached_channels, decay_channels, sums_in, with_decay
from sbeval.models.forgetting.whole_text import BLOCK_TOKENS, blocks_from, decay_score_mod, oldest_blocks
from sbeval.models.softmax import softmax_attention
from tests.models.small import VARIANTS, small_model, tokens, written_out

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def by_definition(q: Tensor, k: Tensor, v: Tensor, log_gates_BHL: Tensor, scale: float) -> Tensor:
    """In fp64, text by text."""
    shared = q.shape[1] // k.shape[1]
    heads = (q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1), log_gates_BHL)
    texts = zip(*(x.double().transpose(1, 2) for x in heads), strict=True)
    return torch.stack([softmax(*text, scale, log_gates_LH=gates).transpose(0, 1) for *text, gates in texts])


def problem(length: int, heads: int = 4, groups: int = 2, seed: int = 0, forgetful: float = 1.0) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, h, length, 16, generator=random) for h in (heads, groups, groups))
    return q, k, v, -forgetful * torch.rand(2, heads, length, generator=random)


def sums_of(log_gates_BHL: Tensor) -> Tensor:
    return log_gates_BHL.double().cumsum(-1).float()


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 40), groups=st.sampled_from([1, 2, 4]), dtype=st.sampled_from(DTYPES), seed=st.integers(0))
@torch.no_grad()
def test_plain_attention_with_decay_is_the_definition(length: int, groups: int, dtype: torch.dtype, seed: int) -> None:
    q, k, v, log_gates = problem(length, groups=groups, seed=seed % 2**32, forgetful=3.0)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    sums = log_gates.double().cumsum(-1)
    found = softmax_attention(*with_decay(q, k, v, sums if dtype == torch.float64 else sums.float(), 0.3), scale=0.3)
    expected = by_definition(q, k, v, log_gates, 0.3)
    near = {torch.float64: 1e-12, torch.float32: 2e-5}.get(dtype, 8 * torch.finfo(dtype).eps)
    assert_close(found[..., :16].double(), expected, rtol=near, atol=near)
    assert not found[..., 16:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_hold_the_sums_of_65536_gates_as_float32_has_them(dtype: torch.dtype) -> None:
    sums = sums_of(-torch.rand(1, 4, 65536))
    k = torch.zeros(1, 2, 65536, 16, dtype=dtype)
    q, held, _ = with_decay(torch.zeros(1, 4, 65536, 16, dtype=dtype), k, k, sums, 16**-0.5)
    assert held.shape[3] == 16 + decay_channels(2, dtype)
    assert_close(sums_in(held, 16, 2, 16**-0.5).float(), sums, rtol=3e-7, atol=1e-4 if dtype == torch.float16 else 0.0)
    logits = (q[:, :, -1:].double() @ held.double().repeat_interleave(2, 1).mT)[:, :, 0] * 16**-0.5
    assert_close(logits, -sums.double(), rtol=3e-7, atol=1e-4)


def test_gradients_are_those_of_the_definition() -> None:
    q, k, v, log_gates = (x.double().requires_grad_() for x in problem(17))
    found = softmax_attention(*with_decay(q, k, v, log_gates.cumsum(-1), 0.3), scale=0.3)[..., :16]
    weights = torch.randn_like(found)
    expected = torch.autograd.grad((by_definition(q, k, v, log_gates, 0.3) * weights).sum(), (q, k, v, log_gates))
    for own, wanted in zip(torch.autograd.grad((found * weights).sum(), (q, k, v, log_gates)), expected, strict=True):
        assert_close(own, wanted)
    in_parts = with_decay(*(x.float() for x in (q, k, v)), log_gates.float().cumsum(-1), 0.3)
    (part,) = torch.autograd.grad((softmax_attention(*in_parts, scale=0.3)[..., :16] * weights).sum(), log_gates)
    assert_close(part, expected[3], rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@settings(max_examples=12, deadline=None)
@given(length=st.sampled_from([1, 100, 128, 300]), groups=st.sampled_from([1, 4]))
@torch.no_grad()
def test_flex_attention_adds_the_same_bias(length: int, groups: int) -> None:
    q, k, v, log_gates = problem(length, groups=groups)
    found = flex_causal_attention(
        q, k, v, scale=0.3, sliding_window=length, score_mod=decay_score_mod(sums_of(log_gates))
    )
    assert_close(found.double(), by_definition(q, k, v, log_gates, 0.3), rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@settings(max_examples=15, deadline=None)
@given(
    length=st.sampled_from([129, 500]),
    threshold=st.sampled_from([1e-6, 1e-3, 0.3]),
    forgetful=st.sampled_from([0.002, 0.05, 0.3, 2.0]),
    size=st.sampled_from([0.1, 1.0, 4.0]),
    seed=st.integers(0, 1000),
)
@torch.no_grad()
def test_what_is_skipped_changes_an_output_by_at_most_the_threshold(
    length: int, threshold: float, forgetful: float, size: float, seed: int
) -> None:
    q, k, v, log_gates = (x[:1] for x in problem(length, heads=2, groups=1, seed=seed, forgetful=forgetful))
    q = size * q
    sums = sums_of(log_gates)
    oldest = oldest_blocks(q, k, sums, scale=0.3, threshold=threshold)
    exact = [x.double() for x in (q, k, v)]
    options = {"scale": 0.3, "sliding_window": length, "score_mod": decay_score_mod(sums.double())}
    found, every = (
        flex_causal_attention(*exact, **options, block_mask=mask)
        for mask in (blocks_from(oldest, whole_blocks(length)), None)
    )
    assert (found - every).abs().max() <= threshold * v.abs().max()
    # the definition without the keys of older blocks, so that the mask is what skips them
    first = oldest.repeat_interleave(BLOCK_TOKENS, -1)[..., :length, None] * BLOCK_TOKENS
    logits = 0.3 * q.double() @ k.double().mT + sums.double()[..., None] - sums.double()[..., None, :]
    index = torch.arange(length)
    logits = logits.masked_fill((index > index[:, None]) | (index < first), -torch.inf)
    assert_close(found, logits.softmax(-1) @ v.double(), rtol=1e-4, atol=1e-5)


def test_a_text_that_forgets_quickly_needs_its_newest_blocks_alone() -> None:
    q, k, _, log_gates = problem(1024, forgetful=0.5)
    quick = oldest_blocks(q, k, sums_of(log_gates), scale=0.25, threshold=1e-5)
    slow = oldest_blocks(q, k, sums_of(log_gates * 1e-3), scale=0.25, threshold=1e-5)
    assert bool((quick[..., 4:] >= torch.arange(4, 8) - 3).all())
    assert not slow.any()
    assert oldest_blocks(q, k, sums_of(log_gates), scale=0.25, threshold=0.0) is None


@pytest.mark.parametrize("pro", [False, True])
@torch.no_grad()
def test_a_model_equals_its_definition_written_out(pro: bool) -> None:
    fields = VARIANTS["forgetting-pro"] if pro else {"attention": "forgetting"}
    model, ids = small_model(num_hidden_layers=1, **fields).double(), tokens(1, 12)[0]

    def mix(q: Tensor, k: Tensor, v: Tensor, normed: Tensor, weights: dict[str, Tensor]) -> Tensor:
        if pro:
            for name, rows in (("key", k), ("value", v)):
                share = (normed @ weights[f"{name}_shift.weight"].T).sigmoid()[..., None]
                before = torch.cat([torch.zeros_like(rows[:1]), rows[:-1]])
                rows.copy_(share * before + (1 - share) * rows.clone())
            q, k = (rms_norm(x, (8,), None, 1e-3) * weights[f"{name}_norm.weight"] for name, x in (("q", q), ("k", k)))
        log_gates = (normed @ weights["forget_gate.weight"].T + weights["forget_gate.bias"]).sigmoid().log()
        heads = softmax(q, k, v, 8**-0.5, log_gates_LH=log_gates)
        if pro:
            heads = rms_norm(heads, (8,), None, 1e-5) * weights["output_norm.weight"]
            heads = heads * (normed @ weights["head_gate.weight"].T).sigmoid().view(12, 4, 8)
        return heads

    assert_close(model(ids[None]).logits[0], written_out(model, ids, mix), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", ["forgetting", "forgetting-pro", "rope-pro", "nope"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cache_holds_as_much_as_is_said(variant: str, dtype: torch.dtype) -> None:
    model = small_model(**VARIANTS[variant]).to(dtype)
    with torch.no_grad():
        layer = model(tokens(1, 5)).past_key_values.layers[0]
    assert layer.keys.shape[3] + layer.values.shape[3] == cached_channels(model.config, dtype)


@pytest.mark.parametrize("variant", ["forgetting", "forgetting-pro", "rope-pro"])
def test_a_cropped_cache_goes_on_as_if_nothing_had_followed(variant: str) -> None:
    model, prefix, other = small_model(**VARIANTS[variant]), tokens(2, 9), tokens(2, 4, seed=2)
    with torch.no_grad():
        cache = model(prefix).past_key_values
        model(tokens(2, 6, seed=3), past_key_values=cache)
        cache.crop(-6)
        found = model(other, past_key_values=cache).logits
        assert_close(found, model(torch.cat([prefix, other], 1)).logits[:, 9:], rtol=1e-4, atol=1e-4)


def test_what_is_skipped_is_chosen_for_forgetting_attention_as_for_stick_breaking() -> None:
    model = small_model(attention="forgetting")
    model.set_kernels(skip_threshold=1e-5)
    assert {layer.self_attn.mixer.skip_threshold for layer in model.model.layers} == {1e-5}
    model.set_kernels()
    assert {layer.self_attn.mixer.skip_threshold for layer in model.model.layers} == {None}
    with pytest.raises(UserError, match="do not apply to attention='forgetting'"):
        model.set_kernels(impl="blockwise", skip_threshold=1e-5)
    with pytest.raises(UserError, match="do not apply to attention='rope'"):
        small_model(attention="rope").set_kernels(skip_threshold=1e-5)
