"""The Forgetting Transformer and its authors' softmax baselines, in every form that their classes write."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from other_machines import assert_equal_but_for_rounding
from torch.testing import assert_close

from sbeval.checkpoints import convert_checkpoint, load_checkpoint
from sbeval.errors import UserError
from tests.checkpoints.forgetting import PRO, fla_forgetting, forgetting_logits, fox
from tests.checkpoints.layouts import Made, save, tokens

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
    with pytest.raises(UserError, match=r"no part of the .* layout: model.layers.0.attn.fgate_bias"):
        load_checkpoint(save(tmp_path, config, tensors | {"model.layers.0.attn.fgate_bias": torch.zeros(4)}))
