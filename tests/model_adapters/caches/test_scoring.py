"""Scoring through a replaced KV cache: rounding by hand, chunks, and caches of the user."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from sbeval.caches.choice import quantized_bytes
from sbeval.corpora import TokenizedCorpus, resolve_tokens
from sbeval.model_adapters.self_test import through_cache
from sbeval.scoring.requests import TargetSequence, TokenLogprobsRequest, keep_sequences
from tests.model_adapters.small import NEEDS_QUANTIZED_CACHES, copied, instances, likelihoods, load_lm, windows

FEW_BITS = {"hqq": 8, "quanto": 2}
pytest.importorskip("hqq", reason="the extra sbeval[cache] brings it")
pytest.importorskip("optimum.quanto", reason="the extra sbeval[cache] brings it")
from optimum.quanto.library.extensions.extension import get_extension  # noqa: E402

pytestmark = NEEDS_QUANTIZED_CACHES
MODELS = ("llama", "rope", "stickbreaking")
GROUP = 8  # the channels of a head
RESIDUAL = 128
Rounding = Callable[[Tensor], Tensor]


def asked(corpus: TokenizedCorpus, *places: tuple[int, int, int]) -> list[Any]:
    return instances("token_logprobs", windows(corpus, places))


def scored(lm: Any, requests: Sequence[Any]) -> list[np.ndarray]:
    return [each.logprobs for each in lm.token_logprobs(requests, disable_tqdm=True)]


def by_min_and_max(bits: int) -> Rounding:
    """Rounds each group to the nearest of 2**bits numbers, evenly spaced from its least to its largest (quanto)."""

    def rounded(x: Tensor) -> Tensor:
        groups = x.reshape(-1, GROUP)
        least, largest = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        scale = (largest - least) / (2**bits - 1)
        return (((groups - least) / scale).round() * scale + least).reshape(x.shape)

    return rounded


def half_quadratic(bits: int) -> Rounding:
    """Rounds as hqq does (Badri and Shaji 2023): moves the zero point as long as the mean error falls."""

    def rounded(x: Tensor) -> Tensor:
        groups, most = x.reshape(-1, GROUP), 2**bits - 1
        least, largest = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        inverse = (most / (largest - least)).clamp(max=2e4)
        zero, error = -least * inverse, torch.inf
        for _ in range(20):
            codes = (groups * inverse + zero).round().clamp(0, most)
            left = groups - (codes - zero) / inverse
            now = float(left.abs().mean())
            shrunk = left.sign() * (left.abs() - left.abs() ** (0.7 - 1) / 10).clamp(min=0)
            zero = (codes - (groups - shrunk) * inverse).mean(1, keepdim=True)
            if now >= error:
                break
            error = now
        codes = (groups * inverse + zero).round().clamp(0, most)
        return ((codes - zero) / inverse).reshape(x.shape)

    return rounded


@torch.no_grad()
def by_hand(lm: Any, request: TokenLogprobsRequest, rounding: Rounding) -> np.ndarray:
    """Log-probabilities of targets that read the context rounded, and chunks before theirs too."""
    tokens = resolve_tokens(request.key)
    inputs = torch.tensor([[request.lead_in, *tokens[:-1].tolist()]])
    begin = len(tokens) - request.scored
    name = "past_key_values"
    pairs: list[tuple[Tensor, Tensor]] = []
    logits = []
    while begin < len(tokens):
        cache = DynamicCache(pairs) if pairs else DynamicCache()
        stop = len(tokens) if not pairs else min(begin + RESIDUAL, len(tokens))
        if not pairs:
            lm.model(inputs[:, :begin], **{name: cache}, use_cache=True)
        else:
            logits.append(lm.model(inputs[:, begin:stop], **{name: cache}, use_cache=True).logits[0])
            begin = stop
        pairs = [(rounding(layer.keys), rounding(layer.values)) for layer in cache.layers]
    logprobs = torch.cat(logits).double().log_softmax(-1)
    return logprobs[range(request.scored), tokens[-request.scored :].tolist()].numpy()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("backend", "bits", "rounding"),
    [
        ("quanto", 4, by_min_and_max),
        ("quanto", 2, by_min_and_max),
        ("hqq", 8, half_quadratic),
    ],
)
def test_targets_see_the_context_and_earlier_chunks_as_rounded_by_hand(
    checkpoint, corpus, model, backend, bits, rounding
):
    lm, full = load_lm(checkpoint(model), cache=f"quantized:{bits}:8:{backend}"), load_lm(checkpoint(model))
    requests = asked(corpus, (90, 60, 9), (90, 250, 200))
    for found, unrounded, request in zip(scored(lm, requests), scored(full, requests), requests, strict=True):
        expected = by_hand(full, TokenLogprobsRequest(*request.args), rounding(bits))
        np.testing.assert_allclose(found, expected, atol=2e-4)
        if bits < 8:
            assert np.abs(found - unrounded).max() > 1e-2


@pytest.mark.parametrize("backend", FEW_BITS)
@pytest.mark.parametrize("model", MODELS)
def test_targets_read_one_by_one_have_the_scores_of_chunks(checkpoint, corpus, model, backend):
    lm = load_lm(checkpoint(model), cache=f"quantized:{FEW_BITS[backend]}:8:{backend}")
    requests = asked(corpus, (90, 250, 200), (10, 150, 150))
    in_chunks = scored(lm, requests)
    object.__setattr__(lm.session.scorer, "builder", lm.session.cache.with_chunk(1))
    for one_by_one, chunked in zip(scored(lm, requests), in_chunks, strict=True):
        np.testing.assert_allclose(one_by_one, chunked, atol=1e-4)


@pytest.mark.parametrize("model", ["llama", "gpt2", "gemma3", "rope", "stickbreaking"])
def test_a_full_cache_of_a_function_gives_the_numbers_without_a_cache(checkpoint, corpus, my_caches, model):
    plain, lm = load_lm(checkpoint(model)), load_lm(checkpoint(model), cache=f"{my_caches}:full")
    requests = asked(corpus, (90, 60, 9), (10, 40, 40))
    for found, expected in zip(scored(lm, requests), scored(plain, requests), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    pairs = [("the fox saw a dog", " and ran"), ("the fox saw a dog", " and"), ("a", " b c d")]
    np.testing.assert_allclose(likelihoods(lm, pairs), likelihoods(plain, pairs), rtol=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_a_cache_that_forgets_the_first_half_scores_as_if_it_were_masked(checkpoint, corpus, my_caches, model):
    plain, lm = load_lm(checkpoint(model)), load_lm(checkpoint(model), cache=f"{my_caches}:forgetting")
    requests = asked(corpus, (90, 12, 6))
    request = TokenLogprobsRequest(*requests[0].args)
    tokens = resolve_tokens(request.key)
    inputs = torch.tensor([[request.lead_in, *tokens[:-1].tolist()]])
    begin, forgotten = 6, 3
    with torch.no_grad():
        cache = DynamicCache(config=plain.model.config)
        plain.model(inputs[:, :begin], past_key_values=cache, use_cache=True)
        mask = torch.ones_like(inputs)
        mask[:, :forgotten] = 0
        logits = plain.model(
            inputs[:, begin:],
            attention_mask=mask,
            position_ids=torch.arange(begin, len(tokens))[None],
            past_key_values=cache,
            use_cache=True,
        ).logits[0]
    expected = logits.double().log_softmax(-1)[range(6), tokens[-6:].tolist()].numpy()
    (found,), (whole,) = scored(lm, requests), scored(plain, requests)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(found - whole).mean() > 1e-2


def test_targets_inside_a_sequence_are_scored_from_the_first_one_on(checkpoint, corpus):
    lm = load_lm(checkpoint("llama"), cache="quantized:2:8:quanto")
    text = np.asarray(resolve_tokens(windows(corpus, [(0, 60, 1)])[0].key), dtype=np.int64)
    (request,) = keep_sequences([TargetSequence(text[:-1], np.array([50, 55, 58]), text[[51, 56, 59]])])
    (found,) = lm.target_logprobs(instances("target_logprobs", [tuple(request)]), disable_tqdm=True)
    with torch.no_grad():
        cache = DynamicCache()
        lm.model(torch.from_numpy(text[None, :50]), past_key_values=cache, use_cache=True)
        rounding = by_min_and_max(2)
        rounded = DynamicCache([(rounding(layer.keys), rounding(layer.values)) for layer in cache.layers])
        logits = lm.model(torch.from_numpy(text[None, 50:59]), past_key_values=rounded, use_cache=True).logits[0]
    expected = logits.log_softmax(-1)[[0, 5, 8], text[[51, 56, 59]].tolist()].numpy()
    np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize(("bits", "backend"), [(4, "quanto"), (2, "quanto"), (8, "hqq")])
def test_the_bytes_of_a_token_are_those_of_the_tensors_in_the_cache(checkpoint, bits, backend):
    lm = load_lm(checkpoint("llama"), cache=f"quantized:{bits}:8:{backend}")
    channels = 2 * 2 * 2 * 8  # keys and values, layers, key heads, head_dim
    facts = lm.session.cache_facts
    assert facts["bytes_per_token"] == quantized_bytes(bits, 8, channels, 4) == channels * (bits / 8 + 1)
    assert facts["full_bytes_per_token"] == channels * 4
    assert facts["backend"] == backend
    assert facts["residual_length_tokens"] == RESIDUAL
    assert lm.get_model_info()["sbeval"]["cache"] == dict(facts)


def test_the_checks_of_the_cache_are_recorded(checkpoint, my_caches):
    lm = load_lm(checkpoint("stickbreaking"), cache="quantized:2:8")
    checks = lm.session.cache_facts["checks"]
    assert set(checks) == {
        through_cache.FULL,
        through_cache.AGAIN,
        through_cache.LATER_TARGETS,
        through_cache.ONE_BY_ONE,
    }
    assert all(check["passed"] for check in checks.values())
    assert load_lm(checkpoint("llama"), cache=f"{my_caches}:full").session.cache_facts["bytes_per_token"] == 64 * 4


@pytest.mark.parametrize(("window", "layers"), [(40, 1), (100_000, None)])
def test_a_token_s_bytes_are_those_behind_all_sliding_windows(checkpoint, my_caches, tmp_path, window, layers):
    folder = copied(checkpoint("gemma3"), tmp_path, sliding_window=window)
    facts = load_lm(folder, cache=f"{my_caches}:full").session.cache_facts
    expected = layers and layers * 2 * 2 * 8 * 4  # layers without a window, keys and values, key heads, head_dim, fp32
    assert facts["bytes_per_token"] == facts["full_bytes_per_token"] == expected
    assert facts["bytes_at_tokens"] == (layers and [40, 64])


@pytest.mark.parametrize("bits", [2, 4])
def test_quanto_unpacks_without_a_compiler(checkpoint: Callable[..., Any], bits: int) -> None:
    load_lm(checkpoint("llama"), cache=f"quantized:{bits}")
    numbers = torch.randint(2**bits, (12, 5), dtype=torch.uint8)
    places = torch.arange(8 // bits, dtype=torch.uint8)[:, None, None] * bits
    packed = (numbers.view(8 // bits, -1, 5) << places).sum(0).to(torch.uint8)
    assert torch.equal(torch.ops.quanto.unpack(packed, bits), numbers)
    assert isinstance(get_extension("quanto_cpp").lib, SimpleNamespace)
