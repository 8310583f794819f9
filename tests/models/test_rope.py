from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from sbeval.errors import UserError
from sbeval.models.rope import rope_frequencies, setting_rope_frequencies
from sbeval.rope_parameters import parse_rope_scaling
from tests.models.small import small_model, tokens

TRAINED = 16
SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": TRAINED, "initializer_range": 0.3}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: list[Any] = ["linear:4", "dynamic:4", "dynamic:1", "yarn:4", LLAMA3, LONGROPE, {"rope_theta": 500.0}]


def llama(**fields: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **fields})).eval()


def own_twin(model: LlamaForCausalLM) -> nn.Module:
    """This family's model with a Llama's weights."""
    twin = small_model(attention="rope", num_key_value_heads=2, training_length_tokens=TRAINED, norm_eps=1e-6)
    names = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_attention_norm"}
    weights = {}
    for name, value in model.state_dict().items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        weights[name] = value
    twin.load_state_dict(weights)
    return twin


@torch.no_grad()
def logits(model: nn.Module, length: int, **arguments: Any) -> Tensor:
    return model(tokens(1, length), use_cache=False, **arguments).logits


def rope_parameters(scaling: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"rope_theta": 10000.0, **parse_rope_scaling(scaling)}
    if own["rope_type"] in ("yarn", "llama3", "longrope"):
        own["original_max_position_embeddings"] = TRAINED
    return own


@pytest.mark.parametrize("length", [10, 16, 40])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_scaling_equals_a_fresh_transformers_model_that_has_it_built_in(scaling: Any, length: int) -> None:
    plain = llama()
    built_in = llama(rope_parameters=rope_parameters(scaling))
    built_in.load_state_dict(plain.state_dict())
    expected = logits(built_in, length)
    twin = own_twin(plain)
    with setting_rope_frequencies(plain, length, parse_rope_scaling(scaling)):
        assert_close(logits(plain, length), expected, rtol=1e-4, atol=1e-4)
    with setting_rope_frequencies(twin, length, parse_rope_scaling(scaling)):
        assert_close(logits(twin, length), expected, rtol=1e-3, atol=1e-3)
    frequencies = twin.rope_frequencies_for(length, parse_rope_scaling(scaling))
    assert_close(logits(twin, length, rope_frequencies=frequencies), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("own", [False, True])
def test_generation_holds_the_frequencies_of_the_whole_request(own: bool) -> None:
    model = own_twin(llama()) if own else llama()
    ids, scaling = tokens(2, 12), parse_rope_scaling("dynamic:3")
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with setting_rope_frequencies(model, 22, scaling):
        cached, plain = (model.generate(ids, use_cache=use_cache, **options) for use_cache in (True, False))
    assert torch.equal(cached, plain)
    if own:
        frequencies = model.rope_frequencies_for(22, scaling)
        assert torch.equal(cached, model.generate(ids, rope_frequencies=frequencies, **options))


def test_a_cache_rotated_for_another_length_is_refused() -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = small_model(attention="rope", training_length_tokens=8, rope_parameters=scaling)
    assert model.generate(tokens(1, 4), max_new_tokens=4, do_sample=False, eos_token_id=None).shape == (1, 8)
    with pytest.raises(UserError, match="rope_frequencies_for"):
        model.generate(tokens(1, 6), max_new_tokens=6, do_sample=False, eos_token_id=None)


def test_partial_rotation_and_windowed_layers_keep_their_own_frequencies() -> None:
    torch.manual_seed(0)
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(**{**SIZES, "rotary_pct": 0.5})).eval()
    before = logits(neox, 40)
    with setting_rope_frequencies(neox, 40, parse_rope_scaling("linear:1")):
        assert_close(logits(neox, 40), before)
    with setting_rope_frequencies(neox, 40, parse_rope_scaling("linear:4")):
        assert (logits(neox, 40) - before).abs().max() > 1e-3
    gemma = Gemma3ForCausalLM(
        Gemma3TextConfig(
            **{**SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
            layer_types=["sliding_attention", "full_attention"],
        )
    ).eval()
    rotary = next(module for module in gemma.modules() if hasattr(module, "rope_type"))
    local = rotary.sliding_attention_inv_freq.clone()
    before = logits(gemma, 40)
    with setting_rope_frequencies(gemma, 40, parse_rope_scaling("linear:4")):
        assert torch.equal(rotary.sliding_attention_inv_freq, local)
        assert (logits(gemma, 40) - before).abs().max() > 1e-3
    assert torch.equal(logits(gemma, 40), before)


def test_a_model_without_rotary_embeddings_is_refused() -> None:
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=61, n_positions=16))
    for model in (gpt2, small_model(attention="nope")):
        with setting_rope_frequencies(model, 10):
            pass
        with pytest.raises(UserError, match="no"), setting_rope_frequencies(model, 10, parse_rope_scaling("linear:2")):
            pass


@pytest.mark.parametrize(
    "spec", ["linear", "linear:x", "cubic:2", "yarn:0.5", "dynamic:nan", '{"rope_type": "ntk"}', "{broken", "linear:-1"]
)
def test_scalings_without_meaning_are_refused(spec: str) -> None:
    with pytest.raises(UserError, match="rope_scaling"):
        parse_rope_scaling(spec)


def test_json_scalings_are_those_of_mappings() -> None:
    expected = {"rope_type": "dynamic", "factor": 2}
    assert parse_rope_scaling('{"rope_type": "dynamic", "factor": 2}') == expected
    assert parse_rope_scaling({"type": "dynamic", "factor": 2}) == expected
    assert parse_rope_scaling("dynamic:2") == {"rope_type": "dynamic", "factor": 2.0}


def test_a_scaling_without_its_keys_names_the_missing_one() -> None:
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UserError, match="long_factor"):
        rope_frequencies(scaling, head_dim=8, original_length_tokens=16, length_tokens=32)


def test_the_original_length_that_a_scaling_names_wins_over_the_training_length() -> None:
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    named = rope_frequencies(
        {**scaling, "original_max_position_embeddings": 16}, head_dim=8, original_length_tokens=64, length_tokens=64
    )
    trained = rope_frequencies(scaling, head_dim=8, original_length_tokens=16, length_tokens=64)
    assert_close(named.inv_freq, trained.inv_freq)
    other = rope_frequencies(scaling, head_dim=8, original_length_tokens=64, length_tokens=64)
    assert not torch.allclose(named.inv_freq, other.inv_freq)
