import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from other_machines import assert_equal_but_for_rounding
from torch import Tensor
from torch.testing import assert_close

from sbeval.checkpoints import load_checkpoint
from sbeval.errors import UserError
from tests.checkpoints.layouts import dolomite, dolomite_logits, logits, save

MUP = {"m_emb": 3.0, "m_residual": 0.4, "m_width": 2.5, "attention_multiplier": 0.2}
PLAIN = {"norm": "layernorm", "activation": "gelu_pytorch_tanh", "attention_bias": True, "mlp_bias": True}
C: dict[str, Any] = {"head_bias": True, "head_norm": True}

CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "A1": ({}, "A1", "interleave", "value"),
    "A1-without-remainder-defaults": ({"sb_remainder": False, **PLAIN}, "A1", "interleave", "none"),
    "A1-unscaled": ({"scale_attn_weights": False, "tied": False}, "A1", "interleave", "value"),
    "A2": ({"head_bias": True, **MUP}, "A2", "interleave", "head_bias"),
    "A2-remainder-off": ({"head_bias": True, "sb_remainder": False}, "A2", "interleave", "none"),
    "A3-gqa": ({"head_bias": True, "kv_heads": 2}, "A3", "tile", "head_bias"),
    "A4-gqa": ({**C, "kv_heads": 2, **MUP}, "A4", "tile", "head_bias"),
    "A4-mqa": ({**C, "kv_heads": 1}, "A4", "tile", "head_bias"),
    "C-gqa": ({**C, "model_type": "gpt_dolomite", "kv_heads": 2, **MUP}, "C", "interleave", "head_bias"),
    "C-mha": ({**C, "model_type": "gpt_dolomite", **PLAIN, "tied": False}, "C", "interleave", "head_bias"),
    "C''-gqa": ({**C, "model_type": "gpt_base", "kv_heads": 2, "mlp_bias": True}, "C''", "interleave", "head_bias"),
    "C''-rope-named": ({**C, "model_type": "gpt_base", "position_embedding_type": "rope"}, "C''", "tile", "head_bias"),
    "softmax-rope": ({"model_type": "gpt_dolomite", "mixer": "softmax", "kv_heads": 2}, "softmax", "interleave", ""),
    "softmax-flat": (
        {"model_type": "gpt_dolomite", "mixer": "softmax", "flat": True, "rope_theta": 500, **MUP},
        "softmax",
        "interleave",
        "",
    ),
    "softmax-nope-C''": (
        {"model_type": "gpt_base", "mixer": "softmax", "position_embedding_type": "nope", "kv_heads": 1},
        "C'' softmax",
        "interleave",
        "",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_generation_gives_its_layouts_logits(case: str, tmp_path: Path) -> None:
    fields, generation, kv, remainder = CASES[case]
    config, tensors = dolomite(**fields)
    loaded = load_checkpoint(save(tmp_path, config, tensors))
    assert (loaded.format, loaded.training_length_tokens) == (f"dolomite:{generation}", 64)
    expected = dolomite_logits(config, tensors, kv=kv, remainder=remainder)
    assert_close(logits(loaded.model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv", ["tile", "interleave"])
@pytest.mark.parametrize("model_type", ["stickbreaking", "gpt_dolomite"])
def test_the_sharing_of_grouped_heads_can_be_given(kv: Any, model_type: str, tmp_path: Path) -> None:
    config, tensors = dolomite(**C, model_type=model_type, kv_heads=2, attention_bias=True, mlp_bias=True)
    loaded = load_checkpoint(save(tmp_path, config, tensors), kv_expand=kv)
    expected = dolomite_logits(config, tensors, kv=kv, remainder="head_bias")
    assert_close(logits(loaded.model), expected, rtol=1e-4, atol=1e-4)
    other = load_checkpoint(tmp_path, kv_expand="interleave" if kv == "tile" else "tile")
    assert (logits(other.model) - expected).abs().max() > 0.01


@pytest.mark.parametrize(
    ("fields", "kv_expand", "line"),
    [
        (
            {"head_bias": True},
            "auto",
            "kv_expand=auto chooses tile, which all checkpoints of dolomite's generation A3 use",
        ),
        (C, "auto", "kv_expand=auto chooses tile, which all checkpoints of dolomite's generation A4 use"),
        (
            {**C, "model_type": "gpt_dolomite"},
            "auto",
            "kv_expand=auto chooses interleave, .* compare the NLL of a text",
        ),
        ({**C, "model_type": "gpt_base"}, "auto", "kv_expand=auto chooses interleave, .* compare the NLL of a text"),
        (C, "interleave", "kv_expand=interleave, as set by the user"),
    ],
)
def test_the_log_says_how_grouped_heads_are_shared_and_why(
    fields: Any,
    kv_expand: Any,
    line: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    with caplog.at_level(logging.INFO, "lm_eval"):
        load_checkpoint(save(tmp_path, *dolomite(**fields, kv_heads=2)), kv_expand=kv_expand)
    assert re.search(line, caplog.text)


def test_defaults_of_dolomite_apply_to_absent_keys(tmp_path: Path) -> None:
    config, tensors = dolomite(**PLAIN, kv_heads=1)
    for name in ("normalization_function", "activation_function", "attention_head_type", "add_bias"):
        del config[name]
    loaded = load_checkpoint(save(tmp_path, config, tensors))
    full, _ = dolomite(**PLAIN, kv_heads=1)
    expected = dolomite_logits(full, tensors, kv="tile", remainder="value")
    assert_close(logits(loaded.model), expected, rtol=1e-4, atol=1e-4)


def test_rope_scaling_of_a_softmax_model_is_yarn(tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 16}
    config, tensors = dolomite(model_type="gpt_dolomite", mixer="softmax", rope_scaling={"type": "linear", **scaling})
    loaded = load_checkpoint(save(tmp_path, config, tensors))
    assert loaded.training_length_tokens == 16
    assert loaded.model.config.rope_parameters == {"rope_type": "yarn", "rope_theta": 10000.0, **scaling}


FLAT, SOFTMAX = dolomite(**C), dolomite(model_type="gpt_dolomite", mixer="softmax")
BLOCKS = dolomite(**C, model_type="gpt_dolomite")
MIXERS, MLPS = "sequence_mixer_blocks", "mlp_blocks"
WPE, ROTARY = "transformer.wpe.weight", "transformer.h.1.sequence_mixer.rotary.weight"
PROJECTION, BIAS = "transformer.h.1.attn.c_proj.weight", "transformer.h.1.attn.head_bias"


def second_layer(blocks: str, **fields: Any) -> dict[str, Any]:
    """A configuration whose second layer has other fields."""
    layer = BLOCKS[0][blocks][0]
    return BLOCKS[0] | {blocks: [layer, layer | fields]}


def without(name: str) -> dict[str, Tensor]:
    return {other: tensor for other, tensor in FLAT[1].items() if other != name}


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        (FLAT[0], FLAT[1] | {WPE: torch.zeros(3)}, WPE),
        (FLAT[0], FLAT[1] | {ROTARY: torch.zeros(3)}, ROTARY),
        (FLAT[0], without(PROJECTION), PROJECTION),
        (FLAT[0], without(BIAS), "head_bias must be the same in all layers, but is True in layer 0 and False in"),
        (
            FLAT[0] | {"head_norm": False},
            FLAT[1],
            r"head_norm is False in config.json, but the checkpoint has tensors named attn\.norm",
        ),
        (SOFTMAX[0] | {"rope_dim": 4}, SOFTMAX[1], "rope_dim 4 is not supported for a softmax model"),
        (second_layer(MIXERS, sequence_mixer_type="mamba2"), BLOCKS[1], "'mamba2' of layer 1"),
        (second_layer(MLPS, mlp_type="Hash"), BLOCKS[1], "'Hash' of layer 1"),
        (
            second_layer(MLPS, intermediate_size=99),
            BLOCKS[1],
            r"h\.1\.mlp_block\.c_proj\.weight should have the shape \[32, 99\]",
        ),
        (
            second_layer(MIXERS, num_attention_heads=2, num_key_value_heads=2),
            BLOCKS[1],
            "is 4 in layer 0 and 2 in layer",
        ),
        (second_layer(MLPS, activation_function="mish"), BLOCKS[1], "'mish'"),
        (BLOCKS[0] | {"attention_blocks": []}, BLOCKS[1], "attention_blocks"),
        (BLOCKS[0] | {"num_layers": 3}, BLOCKS[1], "num_layers is 3"),
        (BLOCKS[0] | {"vocab_size": 99}, BLOCKS[1], r"wte.weight should have the shape \[99, 32\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_parts_and_tensors_that_a_configuration_does_not_describe_are_refused_by_name(
    config: dict[str, Any], tensors: dict[str, Tensor], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        load_checkpoint(save(tmp_path, config, tensors))


def test_what_a_configuration_says_without_need_is_taken_and_other_orders_of_heads_are_refused(tmp_path: Path) -> None:
    load_checkpoint(save(tmp_path, FLAT[0] | {"head_norm": True}, FLAT[1]))
    with pytest.raises(UserError, match="kv_expand"):
        load_checkpoint(tmp_path, kv_expand="alternate")  # type: ignore[arg-type]
    load_checkpoint(save(tmp_path, SOFTMAX[0] | {"rope_dim": 8}, SOFTMAX[1]))


@pytest.mark.parametrize("fields", [{}, {"model_type": "gpt_base"}, {"model_type": "gpt_dolomite", "flat": True}])
@pytest.mark.parametrize("said", [True, False])
def test_biases_against_the_configuration_are_refused(fields: dict[str, Any], said: bool, tmp_path: Path) -> None:
    mixer = "softmax" if fields.get("flat") else "stickbreaking"
    bias = {"attention_bias": not said, "mlp_bias": not said}
    config, tensors = dolomite(**({} if fields.get("flat") else C), **fields, **bias, mixer=mixer)
    load_checkpoint(save(tmp_path, config, tensors))
    for place in config.get("sequence_mixer_blocks", [config]):
        place["add_bias"] = said
    found = "lacks" if said else "has"
    with pytest.raises(UserError, match=rf"add_bias is {said} in config.json, .* {found} .*\.0\.\w+\.c_attn\.bias"):
        load_checkpoint(save(tmp_path, config, tensors))


def test_another_architecture_of_the_same_name_is_refused_for_what_it_is(tmp_path: Path) -> None:
    config = {"model_type": "stickbreaking", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4}
    config |= {"num_kv_heads": None, "hidden_ratio": 4, "use_rope": False, "qk_norm": False, "use_k_shift": False}
    names = ["embed_tokens.weight", "layers.0.attn.q_proj.weight", "layers.1.attn.q_proj.weight"]
    folder = save(tmp_path, config, {f"model.{name}": torch.zeros(32, 32) for name in names})
    with pytest.raises(UserError, match="another architecture with the same name, which is not supported"):
        load_checkpoint(folder)


def test_the_remainder_and_the_norm_stay_with_stickbreaking_layers(tmp_path: Path) -> None:
    config, tensors = dolomite(**C, model_type="gpt_base", kv_heads=2, position_embedding_type="rope")
    blocks = config["sequence_mixer_blocks"]
    config["sequence_mixer_blocks"] = [blocks[0], {**blocks[1], "sequence_mixer_type": "softmax_attention"}]
    extra = [name for name in tensors if re.match(r"transformer\.h\.1\.sequence_mixer\.(head_bias|norm)", name)]
    with pytest.raises(UserError, match=re.escape(extra[0])):
        load_checkpoint(save(tmp_path / "more", config, tensors))
    for name in extra:
        del tensors[name]
    loaded = load_checkpoint(save(tmp_path, config, tensors))
    assert (loaded.format, loaded.attention) == ("dolomite:C''", "stickbreaking+rope")
    expected = dolomite_logits(config, tensors, kv="interleave", remainder="head_bias")
    assert_close(logits(loaded.model), expected, rtol=2e-5, atol=2e-5)
    loaded.model.save_pretrained(tmp_path / "ours")
    again = load_checkpoint(tmp_path / "ours")
    assert again.attention == "stickbreaking+rope"
    assert_equal_but_for_rounding(logits(again.model), logits(loaded.model))
