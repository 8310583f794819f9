"""Generation: a cache in memory that is not copied for every token, and which of PyTorch's attentions a step uses."""

from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from sbeval.attention.impl.triton import decode as triton_decode
from sbeval.model_adapters.generate import growing_cache as module
from sbeval.model_adapters.generate.growing_cache import (
    MOST_NEW_TOKENS,
    GrowingLayer,
    growing_cache,
    steps_without_plans,
)
from tests.marks import exhaustive
from tests.model_adapters.small import ARCHITECTURES, generated, load_lm
from tests.model_adapters.small import LINES as ALL_LINES

LINES = ALL_LINES[:6]
OF_EACH_KIND = ("llama", "gemma3", "gpt2", "stickbreaking", "forgetting", "mixture beside rope")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 9)),
        st.tuples(st.just("crop"), st.integers(1, 4)),
        st.tuples(st.just("reorder"), st.just(0)),
        st.tuples(st.just("repeat"), st.just(2)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_any_sequence_of_steps_leaves_what_transformers_own_layer_holds(steps):
    layers = (GrowingLayer(), DynamicLayer())
    rows = 2
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for step, amount in [("append", 3), *steps]:
            if step == "append":
                new = torch.randn(2, rows, 2, amount, 4, generator=generator)
                found, expected = (layer.update(new[0], new[1]) for layer in layers)
                assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
            elif layers[0].get_seq_length() > amount:
                rows *= 2 if step == "repeat" and rows < 8 else 1
                for layer in layers:
                    if step == "crop":
                        layer.crop(-amount)
                    elif step == "reorder":
                        layer.reorder_cache(torch.arange(rows - 1, -1, -1))
                    elif step == "repeat" and layer.keys.shape[0] < rows:
                        layer.batch_repeat_interleave(2)
                    elif step == "reset":
                        layer.reset()
            assert layers[0].get_seq_length() == layers[1].get_seq_length()


@torch.no_grad()
def test_tokens_one_by_one_are_written_in_place(monkeypatch):
    monkeypatch.setattr(module, "GROWTH_TOKENS", 8)
    layer = GrowingLayer()
    token = torch.ones(1, 2, 1, 4)
    places = set()
    for _ in range(36):
        keys, _ = layer.update(token, token)
        places.add(keys.data_ptr())
    assert keys.shape == (1, 2, 36, 4)
    assert len(places) == 4  # 1 + 8 tokens, then nine more each time


def test_gradients_flow_through_it():
    layer, first, second = GrowingLayer(), *(torch.ones(1, 1, 2, 4, requires_grad=True) for _ in range(2))
    layer.update(first, first)
    keys, values = layer.update(second, second)
    (keys.sum() + 2 * values.sum()).backward()
    assert torch.equal(first.grad, torch.full_like(first, 3.0))
    assert torch.equal(second.grad, first.grad)


@pytest.mark.parametrize("architecture", [*OF_EACH_KIND, *exhaustive(*sorted({*ARCHITECTURES} - {*OF_EACH_KIND}))])
def test_generation_uses_it_and_gives_the_tokens_of_transformers_own_cache(architecture, checkpoint, monkeypatch):
    monkeypatch.setattr(module, "GROWTH_TOKENS", 5)
    lm = load_lm(checkpoint(architecture), batch_size=3)
    cache = growing_cache(lm.model, None)
    assert (cache is None) == (architecture == "mistral")  # all of whose layers have a window
    setting = {"until": ["\n\n"], "max_gen_toks": 20}
    requests = [(line, setting) for line in LINES]
    if cache is not None:
        lm.model.generate(torch.arange(3, 9)[None], min_new_tokens=3, max_new_tokens=3, past_key_values=cache)
        layer = next(layer for layer in cache.layers if isinstance(layer, GrowingLayer))
        assert layer.keys.shape[-2] == 8
        assert layer.keys.untyped_storage().nbytes() > layer.keys.nbytes
    found = generated(lm, requests)
    monkeypatch.setattr("sbeval.model_adapters.generate.batches.growing_cache", lambda *_: None)
    assert found == generated(lm, requests)


def test_beams_and_samples_are_those_of_transformers_own_cache(checkpoint, monkeypatch):
    lm = load_lm(checkpoint("stickbreaking"), batch_size=3)
    for extra in ({"num_beams": 3}, {"do_sample": True, "temperature": 0.7}):
        requests = [(line, {"until": ["\n\n"], "max_gen_toks": 10, **extra}) for line in LINES]
        texts = []
        for change in (False, True):
            with monkeypatch.context() as patch:
                if change:
                    patch.setattr("sbeval.model_adapters.generate.batches.growing_cache", lambda *_: None)
                transformers.set_seed(0)
                texts.append(generated(lm, requests))
        assert texts[0] == texts[1]


def test_another_kind_of_cache_is_used_where_one_is_asked_for(checkpoint):
    lm = load_lm(checkpoint("llama"))
    assert growing_cache(lm.model, "static") is None
    request = (LINES[0], {"until": ["\n\n"], "max_gen_toks": 3, "cache_implementation": "static"})
    assert len(generated(lm, [request])) == 1


def test_decoding_runs_the_decode_kernel_on_the_cache_as_it_lies(checkpoint, monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU the kernels run in Triton's interpreter
    prompts = ["Beautiful is better than ugly. " * 2, "Explicit is better than implicit."]
    requests = [(prompt, {"until": ["\n\n"], "max_gen_toks": 5}) for prompt in prompts]
    calls: list[tuple[int, bool, bool]] = []
    own = triton_decode.decode

    def watched(q: Any, k: Any, v: Any, scale: float, current: bool, seq_start: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((q.shape[2], k.is_contiguous(), seq_start is not None))
        return own(q, k, v, scale, current, seq_start, *args, **kwargs)

    monkeypatch.setattr(
        "sbeval.model_adapters.generate.slots.served.why_not_model", lambda opened: "this is another loop"
    )
    monkeypatch.setattr(triton_decode, "FEWEST_KEYS", 16)  # so that short prompts will do
    monkeypatch.setattr("sbeval.attention.impl.triton.function.decode", watched)
    texts = []
    for kernels in ("triton", "reference"):
        lm = load_lm(checkpoint("stickbreaking"), device=device, batch_size=2, kernels=kernels)
        texts.append(generated(lm, requests))
    assert len(calls) >= 2 * lm.model.config.num_hidden_layers
    assert set(calls) == {(1, False, True)}
    assert texts[0] == texts[1]


class Model(nn.Module):
    """Remembers whether cuDNN's attention was allowed."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.allowed: list[bool] = []

    def forward(self, input_ids: Tensor) -> int:
        self.allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        if len(self.allowed) == 4:
            raise self.error
        return input_ids.shape[-1]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_cudnn_is_left_out_of_steps_alone_and_allowed_again_after_each(error):
    model, token = Model(error), torch.zeros(2, 1)
    prompt = torch.zeros(2, MOST_NEW_TOKENS + 1)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with steps_without_plans(model):
        assert model(input_ids=prompt) == MOST_NEW_TOKENS + 1
        assert (model(input_ids=token), model(token)) == (1, 1)
        assert torch.backends.cuda.cudnn_sdp_enabled()
        with pytest.raises(type(error)):
            model(token)
    assert model.allowed == [True, False, False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()
    model(token)
    assert model.allowed[-1]


def test_steps_of_a_model_with_a_lora_adapter_are_found():
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES["llama"](64)).eval()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    allowed: list[bool] = []
    base.lm_head.register_forward_hook(lambda *_: allowed.append(torch.backends.cuda.cudnn_sdp_enabled()))
    with steps_without_plans(model):
        model.generate(input_ids=torch.arange(20)[None], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert allowed == [True, False, False]
