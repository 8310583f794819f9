"""The Forgetting Transformer and its baselines: every layout of the authors gives the definition's output."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from other_machines import assert_equal_but_for_rounding
from torch import Tensor
from torch.nn.functional import logsigmoid, rms_norm, silu
from torch.testing import assert_close
from written_out import rotated, softmax, stick_breaking

from sbeval.checkpoints import convert_checkpoint, load_checkpoint
from sbeval.errors import UserError
from tests.checkpoints.layouts import HEAD_DIM, HEADS, INNER, LAYERS, VOCAB, D, Made, affine, drawn, save, tokens

PRO = {"use_k_shift": True, "use_v_shift": True, "qk_norm": True, "use_output_gate": True, "use_output_norm": True}


def fox(*, model_type: str = "forgetting_transformer-project_fox", **keys: Any) -> Made:
    """Returns a configuration and tensors as `save_pretrained` of the authors' classes writes them."""
    rand = drawn(0)
    config = {"model_type": model_type, "vocab_size": VOCAB, "hidden_size": D, "num_heads": HEADS, "norm_eps": 1e-6}
    config |= {"num_hidden_layers": LAYERS, "max_position_embeddings": None, "hidden_act": "swish", **keys}
    kv_width = (config.get("num_kv_heads") or HEADS) * HEAD_DIM
    gates = "none" if model_type.startswith("transformer") else config.get("fgate_type", "full")
    t = {"model.embeddings.weight": rand(VOCAB, D), "model.norm.weight": rand(D, mean=1.0)}
    if not config.get("tie_word_embeddings"):
        t["lm_head.weight"] = rand(VOCAB, D)
    for layer in range(LAYERS):
        h, a = f"model.layers.{layer}", f"model.layers.{layer}.attn"
        t |= {f"{h}.attn_norm.weight": rand(D, mean=1.0), f"{h}.mlp_norm.weight": rand(D, mean=1.0)}
        t |= {f"{a}.q_proj.weight": rand(D, D), f"{a}.o_proj.weight": rand(D, D)}
        for name in "kv":
            shifts = config.get(f"use_{name}_shift")
            t[f"{a}.{name}_proj.{'linear.' if shifts else ''}weight"] = rand(kv_width, D)
            if shifts:
                t[f"{a}.{name}_proj.shift_proj.weight"] = rand(HEADS, D)
        if gates == "full":
            t |= {f"{a}.fgate_proj.weight": rand(HEADS, D), f"{a}.fgate_proj.bias": rand(HEADS)}
        elif gates != "none":
            t[f"{a}.fgate_bias"] = rand(HEADS, mean=1.0)
        if config.get("qk_norm"):
            width = HEAD_DIM if config.get("qk_norm_share_param_across_head") else D
            t |= {f"{a}.{name}_norm.weight": rand(width, mean=1.0) for name in "qk"}
        if config.get("use_output_gate"):
            t[f"{a}.ogate_proj.weight"] = rand(D, D)
        if config.get("use_output_norm"):
            t[f"{a}.output_norm.weight"] = rand(D, mean=1.0)
        t |= {f"{h}.mlp.gate_proj.weight": rand(2 * INNER, D), f"{h}.mlp.down_proj.weight": rand(D, INNER)}
    return config, t


def fla_forgetting(*, kv_heads: int | None = None, **keys: Any) -> Made:
    """Returns the same model in flash-linear-attention's layout, with its names and keys."""
    config, t = fox(
        model_type="forgetting_transformer",
        num_kv_heads=kv_heads,
        **{"tie_word_embeddings": False, "qk_norm": True, "use_output_gate": True, **keys},
    )
    rand = drawn(1)
    for name in list(t):
        for old, new in (("fgate_proj", "f_proj"), ("ogate_proj", "g_proj")):
            if old in name:
                t[name.replace(old, new)] = t.pop(name)
    for layer in range(LAYERS):
        h, a = f"model.layers.{layer}.mlp", f"model.layers.{layer}.attn"
        t[f"{h}.gate_proj.weight"], t[f"{h}.up_proj.weight"] = t[f"{h}.gate_proj.weight"].chunk(2)
        if kv_heads and config["qk_norm"]:
            t[f"{a}.k_norm.weight"] = t[f"{a}.k_norm.weight"][: kv_heads * HEAD_DIM]
        if config.get("qkv_bias"):
            for name in "qkv":
                t[f"{a}.{name}_proj.bias"] = rand(len(t[f"{a}.{name}_proj.weight"]))
    return config, t


def forgetting_logits(config: dict[str, Any], t: dict[str, Tensor]) -> Tensor:
    """Checks the logits of `tokens()` in all these layouts, and in flash-linear-attention's for stick-breaking."""
    x = t["model.embeddings.weight"][tokens()[0]]
    length, group = len(x), HEADS // (config.get("num_kv_heads") or HEADS)
    sticks, softmax_type = (config["model_type"].startswith(start) for start in ("stickbreaking", "transformer"))
    theta, scale = config.get("rope_base", 500000.0), HEAD_DIM**-0.5
    for layer in range(LAYERS):
        h, a = f"model.layers.{layer}", f"model.layers.{layer}.attn"
        normed = rms_norm(x, (D,), t[f"{h}.attn_norm.weight"], 1e-6)
        q, k, v = (
            affine(normed, t, f"{a}.{name}_proj", f"{a}.{name}_proj.linear").view(length, -1, HEAD_DIM)
            for name in "qkv"
        )
        shifted = []
        for name, rows in (("k", k), ("v", v)):
            if f"{a}.{name}_proj.shift_proj.weight" in t:
                share = affine(normed, t, f"{a}.{name}_proj.shift_proj").sigmoid()[..., None]
                rows = share * torch.cat([torch.zeros_like(rows[:1]), rows[:-1]]) + (1 - share) * rows
            shifted.append(rows)
        k, v = shifted
        if config.get("qk_norm"):
            q, k = (
                rms_norm(rows, (HEAD_DIM,), None, 1e-6 if sticks else 1e-5)
                * t[f"{a}.{name}_norm.weight"].view(-1, HEAD_DIM)
                for name, rows in (("q", q), ("k", k))
            )
        if config.get("use_rope", softmax_type):
            q, k = rotated(q, theta), rotated(k, theta)
        k, v = (rows.repeat_interleave(group, 1) for rows in (k, v))
        if sticks:
            heads, _ = stick_breaking(q, k, v, scale, attend_current=config["attend_current"])
        else:
            log_gates = None
            if f"{a}.fgate_bias" in t:
                log_gates = logsigmoid(t[f"{a}.fgate_bias"]).expand(length, -1)
            elif not softmax_type and config.get("fgate_type") != "none":
                log_gates = logsigmoid(affine(normed, t, f"{a}.fgate_proj", f"{a}.f_proj"))
            heads = softmax(q, k, v, scale, window=config.get("window_size"), log_gates_LH=log_gates)
        if f"{a}.output_norm.weight" in t:
            heads = rms_norm(heads, (HEAD_DIM,), None, 1e-6) * t[f"{a}.output_norm.weight"].view(HEADS, HEAD_DIM)
        mixed = heads.flatten(1)
        if config.get("use_output_gate"):
            mixed = mixed * affine(normed, t, f"{a}.ogate_proj", f"{a}.g_proj").sigmoid()
        x = x + affine(mixed, t, f"{a}.o_proj")
        normed = rms_norm(x, (D,), t[f"{h}.mlp_norm.weight"], 1e-6)
        rows = [
            affine(normed, t, f"{h}.mlp.{name}_proj") for name in ("gate", "up") if f"{h}.mlp.{name}_proj.weight" in t
        ]
        gate, up = torch.cat(rows, -1).chunk(2, -1)
        x = x + affine(silu(gate) * up, t, f"{h}.mlp.down_proj")
    return rms_norm(x, (D,), t["model.norm.weight"], 1e-6) @ t.get("lm_head.weight", t["model.embeddings.weight"]).T


SOFTMAX = "transformer-project_fox"
FOX, FLA = (("fox:forgetting_transformer", "forgetting"), ("fla:forgetting_transformer", "forgetting"))
LAYOUTS: dict[str, tuple[Made, str, str]] = {
    "llama": (fox(), *FOX),
    "pro": (fox(**PRO), *FOX),
    "tied, one norm": (fox(tie_word_embeddings=True, qk_norm=True, qk_norm_share_param_across_head=True), *FOX),
    "rotating": (fox(use_rope=True, rope_base=100.0), *FOX),
    "gate alone": (fox(use_output_gate=True), *FOX),
    "norm alone": (fox(use_output_norm=True), *FOX),
    "learned decay": (fox(fgate_type="bias_only"), *FOX),
    "fixed decay": (fox(fgate_type="fixed", fgate_bias_init=True, decay_time_min=2.0, decay_time_max=64.0), *FOX),
    "softmax, pro": (fox(fgate_type="none", use_rope=True, **PRO), FOX[0], "rope"),
    "softmax": (fox(model_type=SOFTMAX), "fox:transformer", "rope"),
    "softmax, window, grouped": (
        fox(model_type=SOFTMAX, window_size=5, num_kv_heads=2, use_rope=False),
        "fox:transformer",
        "nope",
    ),
    "fla": (fla_forgetting(), *FLA),
    "fla, grouped, biases": (fla_forgetting(kv_heads=2, qkv_bias=True, tie_word_embeddings=True), *FLA),
    "fla, plain": (fla_forgetting(qk_norm=False, use_output_gate=False), *FLA),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_logits_are_those_of_the_layout_written_out_and_stay_when_converted(layout: str, tmp_path: Path) -> None:
    (config, tensors), name, attention = LAYOUTS[layout]
    loaded = load_checkpoint(save(tmp_path / "theirs", config, tensors))
    assert (loaded.format, loaded.attention, loaded.training_length_tokens) == (name, attention, None)
    found = loaded.model(tokens()).logits[0]
    assert_close(found, forgetting_logits(config, tensors), rtol=1e-4, atol=1e-4)
    convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert_equal_but_for_rounding(load_checkpoint(tmp_path / "ours").model(tokens()).logits[0], found)


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (lambda: fox(hidden_act="sigmoid"), "hidden_act 'sigmoid'"),
        (lambda: fox(use_output_gate=True, ogate_act="silu"), "ogate_act 'silu'"),
        (lambda: fox(window_size=64), "window_size 64"),
        (lambda: fox(attention_bias=True), "attention_bias True"),
        (lambda: fox(fgate_type="vector"), "fgate_type 'vector'"),
        (lambda: fla_forgetting(attnres_block_size=2), "attnres_block_size 2"),
        (lambda: fla_forgetting(window_size=64), "window_size 64"),
        (lambda: fox(model_type=SOFTMAX, use_k_shift=False), "use_k_shift"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(make: Callable[[], Made], refusal: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=refusal):
        load_checkpoint(save(tmp_path, *make()))


def test_every_tensor_has_its_place(tmp_path: Path) -> None:
    config, tensors = fox(**PRO)
    for name in sorted(tensors):
        without = {other: tensor for other, tensor in tensors.items() if other != name}
        with pytest.raises(UserError, match=f"lacks the tensor {name}"):
            load_checkpoint(save(tmp_path, config, without))
    with pytest.raises(UserError, match=r"not part of the .* format: model.layers.0.attn.fgate_bias"):
        load_checkpoint(save(tmp_path, config, tensors | {"model.layers.0.attn.fgate_bias": torch.zeros(4)}))
