"""The model argument `cache`: its values, refusals, the fingerprint, and caches that fail the self-test."""

import hashlib

import pytest
import torch
from transformers.cache_utils import QuantoQuantizedLayer

from sbeval.caches.build import CacheBuilder
from sbeval.caches.choice import cache_parts, parse_cache
from sbeval.errors import UserError
from sbeval.fingerprint.evaluation import run_inputs
from sbeval.model_adapters.record import run_settings
from tests.model_adapters.small import NEEDS_QUANTIZED_CACHES, instances, load_lm, t5, windows

pytest.importorskip("hqq", reason="the extra sbeval[cache] brings it")
pytest.importorskip("optimum.quanto", reason="the extra sbeval[cache] brings it")


@pytest.mark.parametrize(
    "value", ["quantized:4", "quantized:8:32", "quantized:2:64:quanto", "static", "offloaded", "a.b:c"]
)
def test_a_cache_is_written_as_it_was_read(value):
    assert str(parse_cache(value)) == value
    assert parse_cache(parse_cache(value)) == parse_cache(value)


@pytest.mark.parametrize(
    "value",
    [
        *("", "quantized", "quantized:", "quantized:5", "quantized:4:0", "quantized:4:x", "quantized:4:64:gptq"),
        *("quantized:8:64:quanto", "quantized:4:64:hqq", "quantized:4:64:quanto:1", "dynamic"),
        *("a:b:c", "a b:c", ":f", "m:"),
    ],
)
def test_other_values_are_refused(checkpoint, value):
    with pytest.raises(UserError, match="Expected cache to be quantized:BITS"):
        load_lm(checkpoint("llama"), cache=value)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        pytest.param(
            "llama",
            {"cache": "quantized:4:3"},
            "groups of 3 numbers, but the model's heads have 8 channels",
            marks=NEEDS_QUANTIZED_CACHES,
        ),
        ("llama", {"cache_chunk": 4}, "cache_chunk=4 is only for cache=MODULE:FUNCTION: pass cache too"),
        ("llama", {"cache": "static", "cache_chunk": 4}, "found cache=static"),
        ("llama", {"cache": "offloaded"}, "the model is on cpu: pass device=cuda"),
        ("llama", {"cache": "no_such_module:f"}, "cannot be imported"),
        ("llama", {"cache": "transformers:no_such_function"}, "has no function no_such_function"),
        ("rope", {"cache": "static"}, "cache=static does not work with models of this project"),
        ("forgetting", {"cache": "quantized:4"}, "does not work with forgetting attention or token shifts"),
        ("gemma3", {"cache": "quantized:4"}, "layers with a sliding window or a recurrent state"),
        ("rope", {"cache": "quantized:4", "extrapolation": "self_extend:4:16"}, "does not work with extrapolation"),
        ("rope", {"cache": "quantized:4", "draft_tokens": 2}, "does not work with draft_tokens"),
    ],
)
def test_a_cache_that_does_not_suit_is_refused_in_a_sentence(checkpoint, model, arguments, message):
    with pytest.raises(UserError, match=message):
        load_lm(checkpoint(model), **arguments)


def test_a_model_on_the_cpu_is_not_offloaded_where_there_is_a_gpu(checkpoint, monkeypatch):
    model = load_lm(checkpoint("llama")).model
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match="but the model is on cpu"):
        CacheBuilder.of(model, parse_cache("offloaded"))


def test_quantized_caches_need_a_transformers_that_rounds_chunks(checkpoint, monkeypatch):
    model = load_lm(checkpoint("llama")).model
    monkeypatch.setattr("sbeval.checkpoints.versions.transformers.__version__", "5.19.2")
    with pytest.raises(UserError, match=r"cache=quantized:4 needs transformers 5\.20 or newer, and 5\.19\.2 is"):
        CacheBuilder.of(model, parse_cache("quantized:4"))


@NEEDS_QUANTIZED_CACHES
def test_a_quantized_cache_that_reads_chunks_unrounded_fails_and_another_is_recommended(checkpoint, monkeypatch):
    class Unrounded(QuantoQuantizedLayer):
        """Counts an update as one token, as transformers did before 5.20."""

        def update(self, key_states, value_states, *args, **kwargs):
            residual, first = self.residual_length, not self.is_initialized
            held = 0 if first or self.keys.dim() < 4 else self.keys.shape[-2]
            self.residual_length = 0 if held + 1 >= residual else 10**6
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            self.residual_length = residual
            return keys, values

    monkeypatch.setattr("transformers.cache_utils.QuantoQuantizedLayer", Unrounded)
    with pytest.raises(
        UserError, match=r"failed the self-test .*targets read one by one.*: use another cache, or"
    ) as info:
        load_lm(checkpoint("llama"), cache="quantized:2")
    assert "cache_chunk" not in str(info.value)


def test_models_with_an_encoder_are_refused(tmp_path):
    with pytest.raises(UserError, match="cache=static does not work with an encoder-decoder model"):
        load_lm(t5(tmp_path), cache="static")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "to return a transformers.Cache, found NoneType"),
        ("fails", "no cache today"),
        ("restless", "failed the self-test .*the same text read again"),
        ("breaks_update", "breaks_update cannot be read with LlamaForCausalLM .'no update'.: correct the function"),
        ("breaks_length", "breaks_length cannot be read with LlamaForCausalLM .no length.: correct the function"),
        ("breaks_sizes", "breaks_sizes cannot be read with LlamaForCausalLM .no sizes.: correct the function"),
        ("uncounted", "to count the .* tokens that the model has read"),
    ],
)
def test_a_function_that_is_wrong_is_refused(checkpoint, my_caches, function, message):
    with pytest.raises(UserError, match=message):
        load_lm(checkpoint("llama"), cache=f"{my_caches}:{function}")


@NEEDS_QUANTIZED_CACHES
def test_requests_without_a_context_are_refused(checkpoint, corpus):
    lm = load_lm(checkpoint("llama"), cache="quantized:4")
    with pytest.raises(UserError, match="no meaning for rolling log-likelihoods"):
        lm.loglikelihood_rolling(instances("loglikelihood_rolling", [("the fox",)]), disable_tqdm=True)
    requests = instances("token_logprobs", windows(corpus, [(0, 20, 20)]))
    assert len(lm.token_logprobs(requests, disable_tqdm=True)) == 1
    for request in requests:
        request.protocol = "stream"
    with pytest.raises(UserError, match="no meaning for the protocol stream"):
        lm.token_logprobs(requests, disable_tqdm=True)
    with pytest.raises(UserError, match="Attention spans are those of a model without a cache"):
        lm.attention_span(instances("attention_span", [("key", 8, 2)]), disable_tqdm=True)


def test_the_fingerprint_holds_the_cache_and_the_file_of_the_function(checkpoint, my_caches, tmp_path):
    folder = str(checkpoint("llama"))

    def inputs(cache):
        return run_inputs({"model_args": {"pretrained": folder, "cache": cache}, "tasks": []})

    first = inputs(f"{my_caches}:full")
    assert first.settings["model_args.cache"] == f"{my_caches}:full"
    assert (
        inputs("quantized:4").parts.items() >= {"optimum-quanto": cache_parts("quantized:4")["optimum-quanto"]}.items()
    )
    settings = run_settings(load_lm(folder, cache=f"{my_caches}:full").session)
    (tmp_path / "my_caches.py").write_text((tmp_path / "my_caches.py").read_text() + "\n# changed\n")
    changed = inputs(f"{my_caches}:full")
    assert changed.parts.keys() == first.parts.keys()
    assert {name for name in first.parts if first.parts[name] != changed.parts[name]} == {"cache"}
    assert settings["cache"] != run_settings(load_lm(folder, cache=f"{my_caches}:full").session)["cache"]
    assert run_settings(load_lm(folder).session)["cache"] is None


def test_the_record_holds_the_file_of_the_function_and_its_chunks(checkpoint, my_caches, tmp_path):
    facts = load_lm(checkpoint("llama"), cache=f"{my_caches}:full", cache_chunk=5).session.cache_facts
    assert facts["chunk_tokens"] == 5
    assert facts["function_sha256"] == hashlib.sha256((tmp_path / "my_caches.py").read_bytes()).hexdigest()
