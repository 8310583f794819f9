"""A model whose layers are spread over two devices: the second is `meta`, from which nothing can be copied back."""

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import attach_align_device_hook_on_blocks
from torch.utils._python_dispatch import TorchDispatchMode

from sbeval.model_adapters.speed.spread import copy_once
from sbeval.scoring.scorer import TokenScorer

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SECOND = ["model.layers.2", "model.layers.3", "model.layers.4", "model.layers.5", "model.norm", "lm_head"]
TOKENS = torch.arange(12)[None]


def spread() -> Any:
    config = transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=False)
    model: Any = transformers.LlamaForCausalLM(config).eval()
    first = ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1"]
    for name in SECOND:
        model.get_submodule(name).to("meta")
    devices = dict.fromkeys(first, "cpu") | dict.fromkeys(SECOND, "meta")
    attach_align_device_hook_on_blocks(model, devices | {"": "cpu"}, offload=dict.fromkeys(devices, False))
    return model


class Copied(TorchDispatchMode):
    """Counts copies from a device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.device != args[0].device:
            self.counts[f"{args[0].device} to {result.device}"] += 1
        return result


def test_a_window_passes_on_once_and_nothing_comes_back() -> None:
    model = spread()
    copy_once(model)
    scorer = TokenScorer(model)
    with torch.no_grad(), Copied() as copied:
        logits = scorer._head(scorer._hidden(TOKENS))
    assert logits.is_meta
    assert logits.shape == (1, 12, 61)
    # hidden states, cosines, sines and positions
    assert copied.counts == {"cpu to meta": 4}


@pytest.mark.parametrize("change", ["written", "another"])
def test_a_copy_is_of_what_its_original_holds_now(change: str) -> None:
    model = spread()
    copy_once(model)
    cosines, sines, states = (torch.zeros(1, 12, 16), torch.zeros(1, 12, 16), torch.zeros(1, 12, 32, device="meta"))
    layer = model.model.layers[2]
    with torch.no_grad(), Copied() as copied:
        layer(states, position_embeddings=(cosines, sines))
        cosines = cosines.add_(1) if change == "written" else cosines + 1
        layer(states, position_embeddings=(cosines, sines))
    assert copied.counts == {"cpu to meta": 3}
