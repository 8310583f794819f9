"""Attention by what layers see, and scans in segments, leave the numbers of other projects' models as they were."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from sbeval.model_adapters.prepare.changes import scans, visible_keys
from sbeval.model_adapters.prepare.changes.scans import SegmentedScan, scan_in_segments
from sbeval.model_adapters.prepare.changes.visible_keys import (
    VisibleKeys,
    attention_before,
    attention_to_visible,
    see_keys,
)
from sbeval.scoring.spans import attention_spans
from tests.model_adapters.small import ARCHITECTURES, SIZES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOWS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 8, "num_hidden_layers": 6},
    "gpt_oss": {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 16},
    "cohere2": {"sliding_window": 16},
}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
SCANS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {**STATES, "layer_types": ["mamba", "attention"], "num_local_experts": 0},
    "falcon_h1": {**STATES, "mamba_d_ssm": 32, "mamba_n_heads": 4},
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8, "chunk_size": 16},
    },
}


def model_of(family: str, fields: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    special = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CONFIG_MAPPING[family](**{**SIZES, **special, "max_position_embeddings": 512, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # sharper than when training begins
            parameter.mul_(4) if parameter.dim() > 1 else parameter.add_(-1 if "A_log" in name else 0.3)
    return model.to(DEVICE)


def tokens(length: int) -> Tensor:
    return torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)


@torch.no_grad()
def outputs(model: Any, ids: Tensor) -> list[Tensor]:
    """Logits of whole texts and of padded ones, and what is generated."""
    padded = torch.ones_like(ids)
    padded[0, :5] = 0
    answers = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    return [model(ids).logits, model(ids, attention_mask=padded).logits, answers]


@pytest.mark.parametrize("family", WINDOWS)
def test_layers_that_see_windows_chunks_or_sinks_give_their_own_logits_without_a_mask_of_all_pairs(family, monkeypatch):
    model, ids, made = model_of(family, WINDOWS[family]), tokens(200), []
    before = model.config._attn_implementation
    expected = outputs(model, ids)
    monkeypatch.setattr(visible_keys, "SHORTEST_TOKENS", 100)
    monkeypatch.setattr(
        visible_keys,
        "attention_to_visible",
        lambda *heads, **options: made.append(1) or attention_to_visible(*heads, **options),
    )
    assert see_keys(model)
    for found, wanted in zip(outputs(model, ids), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert attention_before(model.config._attn_implementation) == before
    assert made


def test_a_static_cache_goes_on_as_before(monkeypatch):
    model, ids = model_of("gemma3_text", WINDOWS["gemma3_text"]), tokens(40)
    asked: Any = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    expected = model.generate(ids, **asked)
    monkeypatch.setattr(visible_keys, "SHORTEST_TOKENS", 20)
    assert see_keys(model)
    assert torch.equal(model.generate(ids, **asked), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", ["half the window", "zeros", "NaN", "fails"])
@torch.no_grad()
def test_a_kernel_that_is_wrong_for_windows_alone_is_not_used(wrong, dtype, monkeypatch):
    model = model_of("mistral", {"sliding_window": 64}).to(dtype)
    monkeypatch.setattr(visible_keys, "SHORTEST_TOKENS", 32)

    def attend(*heads: Tensor, seen: VisibleKeys, **options: Any) -> Tensor:
        if seen.window is None:
            return attention_to_visible(*heads, seen=seen, **options)
        if wrong == "fails":
            raise RuntimeError("no such kernel")
        size = 32 if wrong == "half the window" else 64
        output = attention_to_visible(*heads, seen=dataclasses.replace(seen, window=size), **options)
        if wrong != "half the window":
            output[:, :, 64:] = 0.0 if wrong == "zeros" else torch.nan
        return output

    expected = [model(tokens(length)).logits for length in (40, 200)]
    monkeypatch.setattr(visible_keys, "attention_to_visible", attend)
    see_keys(model)
    for length, wanted in zip((40, 200), expected, strict=True):  # the first fits in the window
        torch.testing.assert_close(
            model(tokens(length)).logits, wanted, rtol=0.0, atol=0.02 * float(wanted.abs().max())
        )


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_models_whose_layers_see_all_keys_or_cap_logits_stay_as_they_are(architecture):
    model = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[architecture](64))
    before = model.config._attn_implementation
    assert not see_keys(model)
    assert model.config._attn_implementation == before


def test_a_layer_that_attends_otherwise_keeps_its_attention(monkeypatch, caplog):
    model = model_of("gemma3_text", WINDOWS["gemma3_text"])
    monkeypatch.setattr(visible_keys, "attention_to_visible", lambda *heads, **_: 2 * heads[0])
    assert not see_keys(model)
    (note,) = visible_keys.notes(model)
    assert note in caplog.text
    assert note.endswith(", which keeps its own")


def test_a_mask_that_shows_more_than_a_window_or_less_is_made_as_before(monkeypatch):
    model = model_of("gemma3_text", WINDOWS["gemma3_text"])
    assert see_keys(model)
    monkeypatch.setattr(visible_keys, "SHORTEST_TOKENS", 100)
    hidden = torch.zeros(1, 120, 32, device=DEVICE)
    positions = torch.arange(120, device=DEVICE)[None]
    ask = functools.partial(create_causal_mask, model.config, hidden, None, None)
    assert isinstance(ask(position_ids=positions), VisibleKeys)
    packed = torch.cat([positions[:, :118], positions[:, :2]], dim=1)
    assert isinstance(ask(position_ids=packed), Tensor)
    several = functools.partial(create_causal_mask, model.config, hidden.expand(8, -1, -1), None, None)
    whole = positions.expand(8, -1)
    assert isinstance(several(position_ids=whole), VisibleKeys)
    assert isinstance(several(position_ids=torch.cat([whole[:3], packed, whole[4:]])), Tensor)
    assert isinstance(ask(position_ids=positions, and_mask_function=lambda b, h, q, k: k != 7), Tensor)


@given(
    length=st.integers(1, 90), heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]), size=st.none() | st.integers(1, 100),
    chunked=st.booleans(), sink=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40)
def test_whatever_is_seen_attention_is_a_softmax_over_those_keys_and_the_sink(length, heads, size, chunked, sink, seed):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, count, length, 8, dtype=torch.float64) for count in (heads[0], heads[1], heads[1]))
    sink_H = torch.randn(heads[0], dtype=torch.float64) if sink else None
    seen = VisibleKeys(window=None if chunked else size, chunk=size if chunked else None, mask=lambda few: None)
    found = attention_to_visible(q, k, v, seen=seen, scale=0.4, sink_H=sink_H)
    query, key = torch.arange(length)[:, None], torch.arange(length)
    hidden = (key > query) | (key < seen.first(query))
    k, v = (x.repeat_interleave(heads[0] // heads[1], 1) for x in (k, v))
    weights = (q @ k.mT * 0.4).masked_fill(hidden, -torch.inf).exp()
    whole = weights.sum(-1, keepdim=True) + (0 if sink_H is None else sink_H.exp()[:, None, None])
    torch.testing.assert_close(found, weights / whole @ v)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of a GPU")
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("window", [None, 100, 1024])
def test_on_a_gpu_bf16_is_as_near_as_it_rounds(head_dim, sink, window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1500, count, head_dim, device="cuda").transpose(1, 2) for count in (8, 2, 2))
    sink_H = torch.randn(8, device="cuda") if sink else None
    options: Any = {
        "seen": VisibleKeys(window=window, chunk=None, mask=lambda few: None),
        "scale": 0.1,
        "sink_H": sink_H,
    }
    expected = attention_to_visible(q, k, v, **options)
    found = attention_to_visible(q.bfloat16(), k.bfloat16(), v.bfloat16(), **options)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("family", SCANS)
def test_a_scan_in_pieces_gives_the_logits_and_answers_of_a_whole_one(family, monkeypatch):
    model, ids = model_of(family, SCANS[family]), tokens(100)
    expected = outputs(model, ids)
    segments: list[int] = []
    scans._scanning.cache_clear()
    monkeypatch.setattr(scans, "SEGMENT_TOKENS", 32)
    own = SegmentedScan.__call__
    monkeypatch.setattr(
        SegmentedScan, "__call__", lambda self, *a, **k: segments.append(self.segment_tokens) or own(self, *a, **k)
    )
    assert scan_in_segments(model)
    for found, wanted in zip(outputs(model, ids), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert 32 in segments
    scans._scanning.cache_clear()


def test_a_scan_that_begins_anew_with_every_piece_stays_whole():
    def forgetful(hidden: Tensor, *inputs: Tensor, return_final_states: bool, **options: Any) -> Any:
        return hidden.cumsum(1), torch.zeros(1)

    assert not scans._continues(forgetful)


@pytest.mark.parametrize("named", ["flex_attention", "eager"])
def test_attention_that_somebody_chose_is_left_alone(named):
    model = model_of("gemma3_text", WINDOWS["gemma3_text"])
    model.set_attn_implementation(named)
    assert not see_keys(model)


@pytest.mark.parametrize("family", ["gemma3_text", "llama4_text", "cohere2"])
def test_spans_are_those_of_a_mask_of_all_pairs(family, monkeypatch):
    """Layers with windows, with chunks, and those that see the whole text, in texts of any length."""
    model, texts = model_of(family, WINDOWS[family]), [tokens(length)[:1] for length in (60, 200)]
    expected = [attention_spans(model, text, 8) for text in texts]
    monkeypatch.setattr(visible_keys, "SHORTEST_TOKENS", 100)
    assert see_keys(model)
    for text, rows in zip(texts, expected, strict=True):
        found = torch.tensor(attention_spans(model, text, 8), dtype=torch.float64)
        torch.testing.assert_close(found, torch.tensor(rows, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    assert model.config.num_hidden_layers * model.config.num_attention_heads == len(expected[0])
