"""Methods beyond the training length, asked for in the model's arguments: of this family's models and transformers'."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import LlamaForCausalLM

from sbeval.errors import UserError
from sbeval.model_adapters.options import AdapterOptions
from sbeval.model_adapters.rope import RequestRope
from sbeval.models.extrapolation import Extrapolation, parse_extrapolation
from sbeval.scoring.requests import ATTENTION_SPAN
from tests.model_adapters.rope.test_rope_scaling import TEXTS, continuations, load, scores
from tests.model_adapters.small import instances
from tests.models.extrapolation.test_attention import definition
from tests.models.small import small_model, tokens
from tests.models.test_rope import llama

ASKED = ["self_extend:3:8", "dual_chunk:10:4", "sink_window:2:9", "log_length"]
ARCHITECTURES = ["llama", "gpt_neox", "qwen3", "rope"]


def held(model: Any, asked: str, **arguments: Any) -> Any:
    return RequestRope(model, None, None, parse_extrapolation(asked), **arguments).hold(1)


@torch.no_grad()
def attention_of_definition(model: Any, input_ids: Tensor, asked: str) -> Tensor:
    """Logits of a model of one layer whose attention is the definition's."""
    method = parse_extrapolation(asked)
    assert isinstance(method, Extrapolation)
    theirs = isinstance(model, LlamaForCausalLM)
    layer = model.model.layers[0]
    embedded = model.model.embed_tokens(input_ids)
    hidden = (layer.input_layernorm if theirs else layer.input_norm)(embedded)
    own = layer.self_attn
    q, k, v = (
        project(hidden).unflatten(-1, (-1, own.head_dim)).transpose(1, 2)
        for project in (own.q_proj, own.k_proj, own.v_proj)
    )
    frequencies = model.model.rotary_emb.inv_freq if theirs else model.rope_frequencies_for(1).inv_freq
    options = {"inv_freq_F": frequencies, "scale": own.head_dim**-0.5, "trained_at": 16}
    mixed = torch.stack(
        [definition(method.method, method.numbers, *row, **options) for row in zip(q, k, v, strict=True)]
    )
    hidden = embedded + own.o_proj(mixed.float().transpose(1, 2).flatten(2))
    hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden) if theirs else layer.post_attention_norm(hidden))
    return model.lm_head(model.model.norm(hidden))


@pytest.mark.parametrize("own", [False, True], ids=["llama", "this family"])
@pytest.mark.parametrize("asked", ASKED)
def test_a_models_attention_is_that_of_the_definition_and_its_own_again_afterwards(own, asked):
    model: Any = (
        small_model(attention="rope", num_key_value_heads=2, num_hidden_layers=1, training_length_tokens=16)
        if own
        else llama(num_hidden_layers=1)
    )
    input_ids = tokens(2, 40)
    with torch.no_grad():
        before = model(input_ids).logits
        with held(model, asked):
            found = model(input_ids).logits
            padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), input_ids], dim=1)
            mask = torch.cat([torch.zeros(2, 5, dtype=torch.long), torch.ones_like(input_ids)], dim=1)
            behind_padding = model(padded, attention_mask=mask).logits[:, 5:]
        assert torch.equal(model(input_ids).logits, before)
    assert_close(found, attention_of_definition(model, input_ids, asked), rtol=1e-3, atol=1e-3)
    assert_close(behind_padding, found, rtol=1e-4, atol=1e-4)
    assert (found - before).abs().max() > 1e-3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("asked", ASKED)
def test_answers_depend_on_no_other_request(architecture, asked, checkpoint):
    lm = load(checkpoint, architecture, extrapolation=asked, batch_size=3)
    forwards, one_by_one = scores(lm, TEXTS), [scores(lm, [text])[0] for text in TEXTS]
    assert forwards == pytest.approx(one_by_one, rel=1e-5)
    assert forwards[-1] != pytest.approx(scores(load(checkpoint, architecture), TEXTS)[-1], rel=1e-5)
    assert continuations(lm, TEXTS) == [continuations(lm, [text])[0] for text in TEXTS]


@pytest.mark.parametrize("architecture", ["llama", "rope"])
@pytest.mark.parametrize("asked", ASKED)
def test_generation_goes_on_as_whole_texts_are_scored(architecture, asked, checkpoint):
    lm = load(checkpoint, architecture, extrapolation=asked)
    prompt = torch.tensor([lm.tok_encode(TEXTS[2])])
    text = prompt
    with lm.session.rope.hold(1), torch.no_grad():
        options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        written = lm.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        for _ in range(12):
            text = torch.cat([text, lm.model(text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(written, text)


def test_the_method_is_recorded_and_part_of_what_answers_depend_on(checkpoint):
    from sbeval.model_adapters.record import run_settings

    lm = load(checkpoint, "rope", extrapolation="self_extend:3:8")
    assert lm.get_model_info()["sbeval"]["extrapolation"] == {"method": "self_extend", "group": 3, "window": 8}
    assert run_settings(lm.session)["extrapolation"] == "self_extend:3:8"
    assert load(checkpoint, "rope").get_model_info()["sbeval"]["extrapolation"] is None


@pytest.mark.parametrize("architecture", ["llama", "rope"])
def test_longropes_factors_are_a_rope_scaling(architecture, checkpoint, tmp_path):
    scaling = {"rope_type": "longrope", "factor": 4, "long_factor": [1.0, 1.5, 2.0, 4.0], "short_factor": [1.0] * 4}
    (whole := tmp_path / "whole.json").write_text(json.dumps(scaling))
    (short := tmp_path / "short.json").write_text(json.dumps({"factor": 4, "long_factor": scaling["long_factor"]}))
    expected = load(checkpoint, architecture, rope_scaling=scaling)
    for asked in (short, whole):
        lm = load(checkpoint, architecture, extrapolation=f"longrope:{asked}")
        assert scores(lm, TEXTS) == scores(expected, TEXTS)
        record = lm.get_model_info()["sbeval"]
        assert (record["rope_scaling"], record["extrapolation"]) == (scaling, None)


def test_a_method_goes_with_a_scaling(checkpoint):
    lm = load(checkpoint, "rope", extrapolation="log_length", rope_scaling="linear:2")
    alone = load(checkpoint, "rope", extrapolation="log_length")
    assert scores(lm, TEXTS)[-1] != pytest.approx(scores(alone, TEXTS)[-1], rel=1e-5)
    with lm.session.rope.hold(1):
        held_inv_freq = lm.model.model.setting_rope_frequencies.inv_freq
    assert_close(2 * held_inv_freq, lm.model.rope_frequencies_for(1).inv_freq)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("sideways:3", "extrapolation must be one of self_extend:GROUP:WINDOW"),
        ("self_extend:8", "extrapolation must be one of"),
        ("self_extend:0:8", "group and window of extrapolation=self_extend must be whole numbers of at least 1; got"),
        ("self_extend:2:99999999999", "must be whole numbers of at least 1"),
        ("self_extend:a:b", "must be whole numbers of at least 1"),
        ("log_length:3", "extrapolation must be one of"),
        ("longrope:/no/such/file", "/no/such/file"),
        (8, "extrapolation to be a method such as self_extend:8:512, found 8"),
    ],
)
def test_values_that_cannot_be_are_one_sentence(asked, said):
    with pytest.raises(UserError) as caught:
        AdapterOptions.pop({"extrapolation": asked})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("factors", "options", "said"),
    [
        ([1.0, 2.0], {}, "has no factor above 0, from which LongRoPE's attention factor is computed"),
        ({"long_factor": [1.0, 2.0]}, {}, "has no factor above 0"),
        ({"factor": 4, "long_factor": [1.0, 0.0]}, {}, "long_factor of .* must be a list of numbers"),
        ({"factor": 4, "long_factor": [2]}, {}, "must have 4 numbers, got 1"),
        ({"factor": 4, "long_factor": [1, 2, 3]}, {}, "must have 4 numbers, got 3"),
        ({"factor": 4, "long_factor": [1, 2, 3, 4]}, {"rope_scaling": "linear:2"}, "does not work with rope_scaling"),
    ],
)
def test_longropes_factors_fit_the_model_and_go_with_no_other_scaling(factors, options, said, checkpoint, tmp_path):
    (file := tmp_path / "factors.json").write_text(json.dumps(factors))
    with pytest.raises(UserError, match=said):
        load(checkpoint, "llama", extrapolation=f"longrope:{file}", **options)


def test_a_cache_with_room_behind_the_text_and_attention_spans_are_refused(checkpoint):
    lm = load(checkpoint, "llama", extrapolation="self_extend:3:8")
    tokens = torch.arange(12)[None]
    with lm.session.rope.hold(12), pytest.raises(UserError, match="leave cache_implementation out"):
        lm.model.generate(tokens, max_new_tokens=3, do_sample=False, cache_implementation="static")
    with pytest.raises(UserError, match="attends as it was trained to"):
        lm.attention_span(instances(ATTENTION_SPAN, []), disable_tqdm=True)


@pytest.mark.parametrize(
    ("architecture", "arguments", "said"),
    [
        (
            "rope",
            {"extrapolation": "self_extend:2:32"},
            "needs a training length of at least 33 tokens, and this model's is 32",
        ),
        (
            "llama",
            {"extrapolation": "dual_chunk:20:13"},
            "needs a training length of at least 33 tokens, and this model's is 32",
        ),
        (
            "rope",
            {"extrapolation": "sink_window:4:32"},
            "needs a training length of at least 36 tokens, and this model's is 32",
        ),
        ("stickbreaking", {"extrapolation": "log_length"}, "needs rotary embeddings of a known kind"),
        ("gpt2", {"extrapolation": "self_extend:2:4"}, "needs rotary embeddings of a known kind"),
        ("mistral", {"extrapolation": "self_extend:2:4"}, "whose layers all see the whole text"),
        ("gemma3", {"extrapolation": "self_extend:2:4"}, "whose layers all see the whole text"),
        ("cohere", {"extrapolation": "self_extend:2:4"}, "needs rotary embeddings of a known kind"),
    ],
)
def test_models_that_do_not_suit_are_one_sentence(architecture, arguments, said, checkpoint):
    with pytest.raises(UserError, match=said):
        load(checkpoint, architecture, **arguments)


def test_commas_are_read_where_a_command_line_lets_them_through():
    assert parse_extrapolation("self_extend:8,512") == parse_extrapolation("self_extend:8:512")
