"""Protocols with a replaced KV cache: those with a context score through it, the others refuse it."""

import numpy as np
import pytest
import torch
from corpus_problems import run_task, sharpened, tiny_gpt2, tiny_tokenizer, write_folder
from transformers import DynamicCache, GPT2LMHeadModel

from sbeval.corpora import resolve_tokens
from sbeval.errors import UserError
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.results.records import metric_key
from sbeval.scoring.body import cache_argument
from sbeval.scoring.requests import TokenLogprobsRequest
from tests.model_adapters.small import NEEDS_QUANTIZED_CACHES

pytest.importorskip("optimum.quanto", reason="the extra sbeval[cache] brings it")
pytestmark = NEEDS_QUANTIZED_CACHES
LENGTHS = [8, 16]


@pytest.fixture
def model_with_cache(tmp_path):
    torch.manual_seed(0)
    folder = tiny_gpt2(tmp_path / "gpt2", positions=64)
    sharpened(GPT2LMHeadModel.from_pretrained(folder), 12.0).save_pretrained(folder)  # so that the context matters
    tiny_tokenizer().save_pretrained(folder)

    def load(cache=None):
        options = {} if cache is None else {"cache": cache}
        return StickBreakingLM(str(folder), device="cpu", dtype="float32", **options)

    return load


@pytest.fixture
def options(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    texts = write_folder(tmp_path / "texts", [40 + 7 * index for index in range(6)])
    return {"tokenizer": str(tmp_path / "tokenizer"), "data_path": str(texts), "context_lengths": LENGTHS}


@pytest.mark.parametrize("protocol", ["rolling", "stream"])
def test_protocols_without_a_context_refuse_a_cache(model_with_cache, options, protocol):
    with pytest.raises(UserError, match=f"no meaning for the protocol {protocol}"):
        run_task(f"sb_stdlib_{protocol}", model_with_cache("quantized:2"), options)


@pytest.mark.parametrize("protocol", ["fixed_target", "position", "sliding"])
def test_protocols_with_a_context_score_through_the_cache(model_with_cache, options, protocol):
    full = run_task(f"sb_stdlib_{protocol}", model_with_cache(), options)["values"]
    rounded = run_task(f"sb_stdlib_{protocol}", model_with_cache("quantized:2"), options)["values"]
    numbers = [name for name in full if name.startswith("nll@") and isinstance(full[name], float)]
    assert numbers
    for name in numbers:
        assert rounded[name] != full[name]
        assert rounded[name] == pytest.approx(full[name], abs=2.0)


@torch.no_grad()
def rounded_by_hand(model, request):
    """NLL of a window's scored targets, whose context is read unrounded and then rounded to two bits a number."""
    tokens = torch.from_numpy(resolve_tokens(request.key).astype(np.int64))
    inputs, begin = torch.cat([torch.tensor([request.lead_in]), tokens[:-1]])[None], len(tokens) - request.scored
    cache = DynamicCache()
    model(inputs[:, :begin], **{cache_argument(model): cache}, use_cache=True)

    def rounded(x):  # a group is the key or value of a head: it has four evenly spaced numbers
        least, largest = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step = (largest - least) / 3
        return ((x - least) / step).round() * step + least

    pairs = [(rounded(layer.keys), rounded(layer.values)) for layer in cache.layers]
    logits = model(inputs[:, begin:], **{cache_argument(model): DynamicCache(pairs)}, use_cache=True).logits[0]
    return -logits.log_softmax(-1)[range(request.scored), tokens[-request.scored :]].sum().item()


def test_the_numbers_of_fixed_target_are_those_of_a_context_rounded_by_hand(model_with_cache, options, monkeypatch):
    lm, full = model_with_cache("quantized:2"), model_with_cache()
    windows = []

    def recording(requests, **passed):
        windows.extend(TokenLogprobsRequest(*request.args) for request in requests)
        by_hand.update({window: rounded_by_hand(full.model, window) for window in windows})
        return score(requests, **passed)

    score, by_hand = lm.token_logprobs, {}
    monkeypatch.setattr(lm, "token_logprobs", recording)
    values = run_task("sb_stdlib_fixed_target", lm, options)["values"]
    without = run_task("sb_stdlib_fixed_target", full, options)["values"]
    for length in LENGTHS:
        of_length = [window for window in windows if window.context_length == length]
        assert all(window.scored < length for window in of_length)
        expected = sum(map(by_hand.get, of_length)) / sum(window.scored for window in of_length)
        assert values[metric_key("nll", length)] == pytest.approx(expected, abs=1e-4)
        assert abs(without[metric_key("nll", length)] - expected) > 1e-2
