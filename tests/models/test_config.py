import json
import logging
import re

import pytest
import torch
from other_machines import assert_equal_but_for_rounding
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from sbeval.errors import UserError
from sbeval.models import SbevalConfig, SbevalForCausalLM, preset
from tests.models.small import VARIANTS, small_config, small_model, tokens


@pytest.mark.parametrize(
    ("name", "parameters", "head_dim"),
    [
        ("350m", 367_526_912, 32),
        ("1b", 1_208_083_968, 64),
        ("3b", 3_513_473_280, 64),
        ("moe-6.5b", 6_541_063_680, 128),
        ("moe-28.6b", 28_642_631_680, 128),
    ],
)
def test_presets_have_the_papers_parameter_counts(name, parameters, head_dim):
    config = preset(name)
    with torch.device("meta"):
        model = SbevalForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert config.head_dim == head_dim


def test_preset_overrides_take_effect():
    config = preset("350m", attention="rope", training_length_tokens=1024)
    assert (config.attention, config.max_position_embeddings) == ("rope", 1024)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    with pytest.raises(UserError, match="350m, 1b, 3b"):
        preset("7b")


@pytest.mark.parametrize(("name", "active_billions"), [("moe-6.5b", 1.3), ("moe-28.6b", 6.0)])
def test_mixtures_use_as_many_parameters_a_token_as_the_paper_says(name, active_billions):
    config = preset(name, attention="rope")
    assert (config.remainder, config.head_norm) == ("none", False)
    with torch.device("meta"):
        sizes = {name: tensor.numel() for name, tensor in SbevalForCausalLM(preset(name)).named_parameters()}
    experts = sum(size for name, size in sizes.items() if re.search(r"mlp\.(gate|up|down)_proj", name))
    idle = experts * (1 - config.num_experts_per_token / config.num_experts)
    assert round((sum(sizes.values()) - idle) / 1e9, 1) == active_billions


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attention": "linear"}, "attention must be one of"),
        ({"sliding_window": 8}, "sliding_window is for the softmax schemes"),
        ({"attention": "rope", "remainder": "value"}, "belong to stick-breaking"),
        (
            {"attention_weights": "ssmax"},
            "attention_weights='ssmax' needs attention to be one of rope, .*'stickbreaking'",
        ),
        ({"attention": "fire", "attention_weights": "entmax15"}, "one of rope, nope, alibi, nape, got 'fire'"),
        ({"attention": "nape", "attention_weights": "sparsemax"}, "attention_weights must be one of softmax, ssmax"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"hidden_size": 30}, "set head_dim"),
        ({"num_hidden_layers": 0}, "positive integer"),
        ({"training_length_tokens": -1}, "positive integer"),
        ({"bias": ["mlp", "embedding"]}, "bias must be"),
        ({"extended_from": {"name": "parent"}}, "extended_from"),
        ({"attention": "rope", "rope_parameters": {"rope_type": "banana", "rope_theta": 1e4}}, "rope_type"),
        ({"num_experts": 4}, "num_experts_per_token must be at least 1 and at most num_experts 4, got None"),
        ({"num_experts": 4, "num_experts_per_token": 5}, "at most num_experts 4, got 5"),
        ({"shared_intermediate_size": 8}, "need a mixture of experts: set num_experts"),
        ({"num_experts": 4, "num_experts_per_token": 2, "bias": ["mlp"]}, "experts have no bias"),
        ({"layer_overrides": [{}]}, "one object for each of the 2 layers, got 1"),
        ({"layer_overrides": [{}, {"vocab_size": 3}]}, "layer 1 may override only attention, .*; remove 'vocab_size'"),
        ({"layer_overrides": [{}, {"intermediate_size": "wide"}]}, "intermediate_size must be a positive integer"),
        ({"layer_overrides": [{}, {"intermediate_size": 0}]}, "intermediate_size must be a positive integer, got 0"),
        ({"layer_overrides": [{"attention": "alibi"}, {}]}, "stickbreaking, rope or nope only, got 'alibi'"),
        ({"layer_overrides": [{"attention": "rope"}, {}], "remainder": "value"}, "belong to stick-breaking attention"),
    ],
)
def test_configurations_without_meaning_are_refused(fields, words):
    with pytest.raises(UserError, match=words):
        small_config(**fields)


def test_the_name_of_a_scheme_says_how_logits_become_weights():
    assert small_config(attention="nape").scheme == "nape"
    assert small_config(attention="rope", attention_weights="ssmax").scheme == "rope-ssmax"
    both = small_config(attention="rope", attention_weights="entmax15", layer_overrides=[{}, {"attention": "nope"}])
    assert (both.scheme, both.schemes) == ("rope-entmax15+nope-entmax15", ["rope", "nope"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_and_loaded_models_are_the_same(variant, tmp_path):
    model = small_model(**VARIANTS[variant], extended_from={"name": "p", "sha256": "0", "training_length_tokens": 16})
    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is SbevalForCausalLM
    for name, value in vars(small_config(**VARIANTS[variant])).items():
        if not name.startswith("_") and name not in ("architectures", "dtype", "transformers_version", "extended_from"):
            assert getattr(loaded.config, name) == value, name
    assert loaded.config.extended_from == model.config.extended_from
    with torch.no_grad():
        assert_equal_but_for_rounding(loaded(tokens(2, 20)).logits, model(tokens(2, 20)).logits)


def test_unknown_keys_are_refused_when_made_and_when_loaded(tmp_path):
    with pytest.raises(UserError, match="head_dimension"):
        small_config(head_dimension=8)
    small_config(pad_token_id=0).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).pad_token_id == 0
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_widow": 8}))
    with pytest.raises(UserError, match="sliding_widow"):
        AutoConfig.from_pretrained(tmp_path)


def test_transformers_own_keys_are_accepted():
    config = SbevalConfig(torch_dtype="bfloat16", architectures=["SbevalForCausalLM"], rope_theta=5e5, attention="rope")
    assert config.dtype == torch.bfloat16
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


def test_pickled_weights_are_refused(tmp_path):
    model = small_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path, use_safetensors=False)


def test_kernels_are_never_saved_and_those_of_a_softmax_model_are_refused(tmp_path):
    model = small_model()
    model.save_pretrained(tmp_path / "before")
    model.set_kernels(impl="reference", skip_threshold=None)
    model.save_pretrained(tmp_path / "after")
    assert (tmp_path / "before/config.json").read_text() == (tmp_path / "after/config.json").read_text()
    model = small_model(attention="rope")
    model.set_kernels()
    with pytest.raises(UserError, match="attention='rope'"):
        model.set_kernels(skip_threshold=1e-4)


@pytest.mark.parametrize(("kind", "factor"), [("linear", 4.0), ("dynamic", 4.0), ("yarn", 4.0), ("yarn", 8.0)])
def test_a_scaled_checkpoint_states_its_original_length_without_a_warning(kind, factor, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    own = {"rope_type": kind, "factor": factor, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    small_config(attention="rope", rope_parameters=own, training_length_tokens=64).save_pretrained(tmp_path)
    found = SbevalConfig.from_pretrained(tmp_path)
    assert found.rope_parameters == own
    assert "ignore_keys_at_rope_validation" not in found.to_dict()
    assert caplog.text == ""


def test_what_transformers_says_of_other_models_is_still_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="transformers")
    # numbers of its own: transformers says a sentence once
    scaling = {"rope_type": "yarn", "factor": 7.5, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    LlamaConfig(max_position_embeddings=48, rope_parameters=scaling).save_pretrained(tmp_path)
    assert "(implicit factor = " in caplog.text
