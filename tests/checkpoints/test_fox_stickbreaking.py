"""Stick-breaking models of a fork of the Forgetting Transformer: the forward pass of its code is the definition."""

from pathlib import Path
from typing import Any

import pytest
import torch
from other_machines import assert_equal_but_for_rounding
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from torch.testing import assert_close
from written_out import rotated, stick_breaking

from sbeval.checkpoints import convert_checkpoint, load_checkpoint
from sbeval.errors import UserError
from sbeval.inspection.description import describe
from tests.checkpoints.layouts import HEAD_DIM, HEADS, INNER, LAYERS, VOCAB, D, Made, affine, drawn, save, tokens

THETA = 100.0


def fox_stickbreaking(**keys: Any) -> Made:
    """Returns a configuration and tensors as `save_pretrained` of `StickbreakingForCausalLM` writes them."""
    rand = drawn(0)
    config = {"model_type": "stickbreaking", "architectures": ["StickbreakingForCausalLM"], "vocab_size": VOCAB}
    config |= {"hidden_size": D, "num_heads": HEADS, "num_hidden_layers": LAYERS, "norm_eps": 1e-6, "hidden_ratio": 4}
    config |= {"intermediate_size": None, "max_position_embeddings": None, "hidden_act": "swish", "rope_base": THETA}
    config |= {"normalize_attention": True, "use_k_shift": False, "use_v_shift": False, "window_size": None, **keys}
    kv_width = (config.get("num_kv_heads") or HEADS) * HEAD_DIM
    t = {"model.embeddings.weight": rand(VOCAB, D), "model.norm.weight": rand(D, mean=1.0)}
    if not config.get("tie_word_embeddings"):
        t["lm_head.weight"] = rand(VOCAB, D)
    for layer in range(LAYERS):
        h, a = f"model.layers.{layer}", f"model.layers.{layer}.attn"
        t |= {f"{h}.attn_norm.weight": rand(D, mean=1.0), f"{h}.mlp_norm.weight": rand(D, mean=1.0)}
        t |= {f"{a}.o_proj.weight": rand(D, D), f"{h}.mlp.down_proj.weight": rand(D, INNER)}
        t |= {f"{h}.mlp.{name}_proj.weight": rand(INNER, D) for name in ("gate", "up")}
        for name, rows in (("q", D), ("k", kv_width), ("v", kv_width)):
            t[f"{a}.{name}_proj.weight"] = rand(rows, D)
            if config.get("attention_bias"):
                t[f"{a}.{name}_proj.bias"] = rand(rows)
            if config.get("qk_norm") and name != "v":
                shared = config.get("qk_norm_share_param_across_head")
                t[f"{a}.{name}_norm.weight"] = rand(HEAD_DIM if shared else rows, mean=1.0)
    return config, t


def rotated_in_the_fork(heads_HLD: Tensor) -> Tensor:
    """RoPE whose length is the second dimension of [batch, ., ., head_dim], where the fork's code has the heads."""
    return rotated(heads_HLD, THETA)


def normed_in_the_fork(heads_HLD: Tensor, weight: Tensor) -> Tensor:
    if len(weight) == HEAD_DIM:
        return rms_norm(heads_HLD, (HEAD_DIM,), weight, 1e-6)
    rows_LE = heads_HLD.transpose(0, 1).flatten(1)
    return rms_norm(rows_LE, (len(weight),), weight, 1e-6).unflatten(1, (-1, HEAD_DIM)).transpose(0, 1)


def fork_logits(config: dict[str, Any], t: dict[str, Tensor]) -> Tensor:
    x = t["model.embeddings.weight"][tokens()[0]]
    for layer in range(LAYERS):
        h, a = f"model.layers.{layer}", f"model.layers.{layer}.attn"
        normed = rms_norm(x, (D,), t[f"{h}.attn_norm.weight"], 1e-6)
        q, k, v = (affine(normed, t, f"{a}.{name}_proj").unflatten(1, (-1, HEAD_DIM)).transpose(0, 1) for name in "qkv")
        if config.get("use_rope"):
            q, k = rotated_in_the_fork(q), rotated_in_the_fork(k)
        if config.get("qk_norm"):
            q, k = normed_in_the_fork(q, t[f"{a}.q_norm.weight"]), normed_in_the_fork(k, t[f"{a}.k_norm.weight"])
        group = HEADS // (config.get("num_kv_heads") or HEADS)
        rows = (q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0))
        # the operation returns the remainder too, which the code drops; it divides by no sum of weights
        heads, _ = stick_breaking(
            *(x.transpose(0, 1) for x in rows), HEAD_DIM**-0.5, attend_current=config.get("attend_current", False)
        )
        x = x + affine(heads.flatten(1), t, f"{a}.o_proj")
        normed = rms_norm(x, (D,), t[f"{h}.mlp_norm.weight"], 1e-6)
        inner = silu(affine(normed, t, f"{h}.mlp.gate_proj")) * affine(normed, t, f"{h}.mlp.up_proj")
        x = x + affine(inner, t, f"{h}.mlp.down_proj")
    return rms_norm(x, (D,), t["model.norm.weight"], 1e-6) @ t.get("lm_head.weight", t["model.embeddings.weight"]).T


QK = {"qk_norm": True}
SHARED = {**QK, "qk_norm_share_param_across_head": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, current key": {"tie_word_embeddings": True, "attend_current": True},
    "grouped, biases": {"num_kv_heads": 2, "attention_bias": True},
    "norm over heads": QK,
    "norm over heads, grouped, rotating": {**QK, "num_kv_heads": 2, "use_rope": True, "attention_bias": True},
    "shared norm": {**SHARED, "num_kv_heads": 1},
    "shared norm, rotating": {**SHARED, "use_rope": True},
    "rotating": {"use_rope": True},
    "grouped, rotating": {"num_kv_heads": 2, "use_rope": True},
    "what the code does not compute": {
        **{"normalize_attention": False, "use_k_shift": True, "use_v_shift": True, "window_size": 3},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_logits_are_those_of_the_fork_written_out_and_stay_when_converted(layout: str, tmp_path: Path) -> None:
    config, tensors = fox_stickbreaking(**LAYOUTS[layout])
    loaded = load_checkpoint(save(tmp_path / "theirs", config, tensors))
    assert (loaded.format, loaded.attention, loaded.training_length_tokens) == (
        "fox:stickbreaking",
        "stickbreaking",
        None,
    )
    found = loaded.model(tokens()).logits[0]
    assert_close(found, fork_logits(config, tensors), rtol=1e-4, atol=1e-4)
    convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert_equal_but_for_rounding(load_checkpoint(tmp_path / "ours").model(tokens()).logits[0], found)


def test_rotation_by_the_head_s_index_changes_something_but_only_where_keys_are_shared_or_normed() -> None:
    def changes(**keys: Any) -> bool:
        plain, turned = (fox_stickbreaking(**keys, use_rope=use_rope) for use_rope in (False, True))
        return not torch.allclose(fork_logits(*plain), fork_logits(*turned), atol=1e-3)

    assert [changes(), changes(num_kv_heads=2), changes(**SHARED)] == [False, True, True]


def test_inspect_says_how_the_format_is_known_and_which_keys_its_code_passes_over(tmp_path: Path) -> None:
    described = describe(save(tmp_path, *fox_stickbreaking(use_rope=True, num_kv_heads=2)))
    assert (described.format, described.sizes.key_value_heads) == ("fox:stickbreaking", 2)
    told = str(described)
    assert "tensor names of Lanni-ni/forgetting-transformer" in told
    assert "its code does not compute normalize_attention, use_rope as the names say" in told


def test_every_tensor_has_its_place(tmp_path: Path) -> None:
    config, tensors = fox_stickbreaking(qk_norm=True)
    for name in sorted(set(tensors) - {"model.embeddings.weight"}):
        without = {other: tensor for other, tensor in tensors.items() if other != name}
        with pytest.raises(UserError, match=f"lacks the tensor {name}"):
            load_checkpoint(save(tmp_path, config, without))
    with pytest.raises(UserError, match=r"not part of the fox:stickbreaking format: model.layers.0.attn.k_shift"):
        load_checkpoint(save(tmp_path, config, tensors | {"model.layers.0.attn.k_shift": torch.zeros(4)}))
    with pytest.raises(UserError, match="hidden_act 'relu'"):
        load_checkpoint(save(tmp_path, {**config, "hidden_act": "relu"}, tensors))
