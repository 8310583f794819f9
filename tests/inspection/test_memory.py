"""Memory grows with the length, the longest length is the last that fits, and slots are as large as the adapter's."""

import dataclasses
import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from source_tree import ROOT
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig

from sbeval.caches.choice import parse_cache
from sbeval.errors import UserError
from sbeval.inspection import memory
from sbeval.inspection.command import inspect
from sbeval.inspection.description import describe
from sbeval.model_adapters.generate.slots.schedule import slot_bytes
from sbeval.models import SbevalConfig, SbevalForCausalLM, preset
from sbeval.models.entmax.attention import block_bytes
from tests.models.small import VARIANTS, small_model
from tests.scoring.live_bytes import peak_bytes

DEVICES = st.sampled_from(["cpu", "cuda"])
TOKENS = st.integers(1, 2**21)


def sizes(name: str) -> memory.Sizes:
    with torch.device("meta"):
        found = memory.sizes_of(SbevalForCausalLM(preset(name)).bfloat16())
    return found


SIZES = {name: sizes(name) for name in ("350m", "moe-6.5b")}


@given(name=st.sampled_from(sorted(SIZES)), tokens=TOKENS, more=TOKENS, device=DEVICES)
def test_a_longer_window_and_a_longer_text_take_no_less(name: str, tokens: int, more: int, device: str) -> None:
    shorter, longer = (memory.needs(SIZES[name], length, device=device) for length in (tokens, tokens + more))
    assert shorter.all_targets <= longer.all_targets
    assert shorter.generation <= longer.generation
    assert shorter.last_targets <= shorter.all_targets


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_quantized_token_takes_its_bits_and_two_numbers_a_group(bits: int) -> None:
    of_model = SIZES["350m"]
    full = memory.cache_size(of_model, None).full
    assert full == memory.text_bytes(of_model, 128) / 128
    quantized = memory.cache_size(of_model, parse_cache(f"quantized:{bits}:32"))
    assert quantized.full == full
    assert quantized.replaced == full / 16 * (bits + 2 * 16 / 32)
    assert memory.cache_size(of_model, parse_cache("offloaded")).replaced == full
    assert memory.cache_size(of_model, parse_cache("module:function")).replaced is None


@pytest.mark.parametrize(
    ("config", "fields", "cache", "why"),
    [
        (Gemma3TextConfig, {"sliding_window": 16}, "quantized:4", "layers with a sliding window or a recurrent state"),
        (SbevalConfig, {"attention": "rope"}, "static", "takes every cached position for a token"),
        (SbevalConfig, {"attention": "forgetting"}, "quantized:4", "forgetting attention or token shifts"),
        (SbevalConfig, {"attention": "rope"}, "quantized:4", None),
        (Gemma3TextConfig, {"sliding_window": 16}, "static", None),
    ],
)
def test_a_cache_that_a_run_refuses_has_no_bytes_but_the_reason(config, fields, cache, why, tmp_path) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {**small, "head_dim": 8, "intermediate_size": 48, "vocab_size": 70}
    AutoModelForCausalLM.from_config(config(**sizes, **fields)).save_pretrained(tmp_path)
    answer = inspect(str(tmp_path), check=lambda run: False, share=list, model_args={"cache": cache})
    size, line = answer.to_json()["memory"]["cache"], answer.to_text().splitlines()[-1]
    assert size["full"] > 0
    assert (size["replaced"] is None) == (why is not None)
    assert why is None or (why in size["unsuited"] and line.endswith(f"{size['unsuited']}."))


@given(name=st.sampled_from(sorted(SIZES)), gibibytes=st.integers(1, 4096), device=DEVICES)
def test_the_longest_length_is_the_last_that_fits(name: str, gibibytes: int, device: str) -> None:
    room = gibibytes * 2**30 * (1 - memory.KEPT_FREE) - SIZES[name].weight_bytes
    window, text = memory.longest_tokens(SIZES[name], gibibytes * 2**30, device)
    of_text = lambda length: memory.needs(SIZES[name], length, device=device).generation  # noqa: E731
    for longest, takes in ((window, lambda n: memory.window_bytes(SIZES[name], n, n, device)), (text, of_text)):
        assert longest == 0 or takes(longest) <= room
        assert takes(longest + 1) > room - 1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_a_text_s_keys_take_what_the_adapter_s_slots_do(variant: str, tokens: int) -> None:
    model = small_model(**VARIANTS[variant])
    found = memory.sizes_of(model)
    if any(getattr(module, "reads_previous_position", False) for module in model.modules()):
        # no slots: its cache holds more than keys and values of head_dim
        assert memory.text_bytes(found, tokens) > slot_bytes(model, -(-tokens // 64) * 64)
        return
    assert memory.text_bytes(found, tokens) == slot_bytes(model, -(-tokens // 64) * 64)


def peaks_measured() -> dict[tuple[str, str], set[int]]:
    """MiB above the weights of a window of 65,536 tokens on an H200, by question and model."""
    found: dict[tuple[str, str], set[int]] = {}
    for line in (ROOT / "benchmarks/results/harness_h200.md").read_text().splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if len(row) == 10 and row[1] == "sb" and re.fullmatch(r"\d+", row[9]):
            found.setdefault((row[0], row[2]), set()).add(int(row[9]))
    return found


@pytest.mark.parametrize(("question", "model"), [("large", "stickbreaking"), ("skipping", "checkpoint")])
def test_a_window_s_memory_is_within_a_tenth_of_what_a_gpu_measured(question: str, model: str) -> None:
    folder = ROOT / "sbeval/demo/checkpoints/stickbreaking"
    found = sizes("3b") if question == "large" else describe(folder).sizes
    # the benchmark counts cuBLAS's workspace with the weights
    estimated = (memory.window_bytes(found, 65536, 65536, "cuda") - memory.WORKSPACE_BYTES["cuda"]) / 2**20
    assert all(abs(estimated - peak) < 0.1 * peak for peak in peaks_measured()[question, model])


@pytest.mark.parametrize("rows", [1, 2])
def test_a_batch_takes_what_its_tensors_take(rows: int) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    ids = torch.zeros(rows, 2048 // rows, dtype=torch.long)
    counted = peak_bytes(lambda: model.model(input_ids=ids, use_cache=False))
    found = memory.sizes_of(model)
    assert found is not None
    assert memory.window_bytes(found, 2048, 1, "cpu", rows=rows) == pytest.approx(counted, rel=0.04)


def peaks_of_released_models() -> list[tuple[str, str, str, int, int]]:
    """Runs on an H100: the model, what ran, the extrapolation, the estimate and the peak in MiB."""
    lines = (ROOT / "benchmarks/results/inspection.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(*row[:3], int(row[3]), int(row[4])) for row in rows if len(row) == 5 and row[4].isdigit()]  # type: ignore[misc]


RELEASED: dict[str, PretrainedConfig] = {
    "SmolLM2-135M": LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
    ),
    "Gemma 3 270M": Gemma3TextConfig(
        hidden_size=640,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        intermediate_size=2048,
        vocab_size=262144,
        sliding_window=512,
    ),
}


@pytest.fixture(scope="module", params=RELEASED)
def released(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model's name, and a checkpoint of its sizes whose numbers take no place on the disk."""
    folder = tmp_path_factory.mktemp("released")
    config = RELEASED[request.param]
    config.tie_word_embeddings, config.dtype = True, "bfloat16"
    config.save_pretrained(folder)
    with torch.device("meta"):
        weights = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    header, end = {}, 0
    for name, weight in weights.items():
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [end, end + 2 * weight.numel()]}
        end += 2 * weight.numel()
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return request.param, str(folder)


def test_an_estimate_is_within_a_tenth_of_a_released_model_s_peaks(released: tuple[str, str]) -> None:
    model, folder = released
    rows = [row[1:] for row in peaks_of_released_models() if row[0] == model]
    assert rows
    for run, extrapolation, stated, peak in rows:
        arguments = {} if extrapolation == "none" else {"extrapolation": extrapolation}
        tokens = int(re.findall(r"[\d,]{6,}", run)[0].replace(",", ""))
        settings = {"memory": "80GB", "lengths": str(tokens), "model_args": arguments}
        inspection = inspect(folder, check=lambda _: False, share=list, **settings)
        (need,), sizes = inspection.needs or (), inspection.description.sizes
        assert sizes is not None
        of_run = need.prefill + 8 * need.further_text if "generated" in run else need.batch
        estimated = (sizes.weight_bytes + of_run) / 2**20
        assert abs(estimated - stated) < 1, run
        assert abs(estimated - peak) < 0.1 * peak, run


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("24 GB", 24 * 10**9), ("512M", 512 * 2**20), ("1.5TiB", 3 * 2**39), ("4096", 4096)],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert memory.read_memory(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "80 GiBs", "1e9", "0", "80gib", "nan", "9" * 400 + "GiB"])
def test_what_is_no_size_is_one_sentence(text: str) -> None:
    with pytest.raises(UserError, match="--memory"):
        memory.read_memory(text)


@given(texts=st.integers(1, 8), tokens=st.integers(1, 128))
def test_the_logits_of_entmax_in_a_batch_are_those_of_each_text(texts: int, tokens: int) -> None:
    assert block_bytes(4, 2, 8, texts * tokens, "cpu", batch=texts) == texts * block_bytes(4, 2, 8, tokens, "cpu")


@pytest.mark.parametrize("weights", ["ssmax", "asentmax"])
def test_scaled_queries_take_no_less_memory(weights: str) -> None:
    with torch.device("meta"):
        model = SbevalForCausalLM(preset("350m", attention="rope", attention_weights=weights)).bfloat16()
    scaled = memory.sizes_of(model)
    without = dataclasses.replace(scaled, scaled_queries=False)
    for tokens in (64, 4096):
        bytes_scaled, bytes_without = (memory.window_bytes(s, tokens, 1, "cuda") for s in (scaled, without))
        assert bytes_scaled >= bytes_without
