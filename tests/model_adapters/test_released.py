"""Checkpoints in released formats give their model's outputs, and `revision` chooses a version on the hub."""

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from huggingface_hub import constants
from lm_eval.models.huggingface import HFLM

from sbeval.checkpoints import load_checkpoint
from sbeval.errors import UserError
from sbeval.model_adapters.record import run_settings
from tests.checkpoints import test_moduleformer
from tests.checkpoints.layouts import VOCAB, dolomite, fla, save
from tests.model_adapters.small import LINES, Checkpoints, generated, likelihoods, load_lm, save_lora, tiny_tokenizer

GROUPED: dict[str, Any] = {"model_type": "gpt_dolomite", "kv_heads": 2, "head_bias": True, "head_norm": True}
WORDS = [line.split(" ", 2) for line in LINES[:6]]
FLA: dict[str, Any] = {"qkv_bias": True, "qk_norm": True, "attend_current": True, "kv_heads": 2, "tied": False}
PAIRS = [(f"{first} {second}", f" {rest}") for first, second, rest in WORDS]


def folder_with_tokenizer(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], seed: int = 1
) -> Path:
    """Saves the checkpoint with as many embeddings as the tokenizer has entries."""
    tokenizer = tiny_tokenizer(adds_bos=False)
    config["vocab_size"] = len(tokenizer)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.shape[0] in (VOCAB, test_moduleformer.VOCAB) and re.search("wte|embed|lm_head", name):
            tensors[name] = 0.5 * torch.randn(len(tokenizer), tensor.shape[1], generator=generator)
    save(folder, config, tensors)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def direct_scores(model: Any) -> list[float]:
    tokenizer = tiny_tokenizer(adds_bos=False)
    found = []
    for context, continuation in PAIRS:
        cut = len(tokenizer.encode(context))
        ids = torch.tensor([tokenizer.encode(context + continuation)])
        assert ids[0, :cut].tolist() == tokenizer.encode(context)
        logprobs = model(ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
        found.append(float(logprobs[torch.arange(cut - 1, ids.shape[1] - 1), ids[0, cut:]].sum()))
    return found


@pytest.mark.parametrize("order", ["tile", "interleave"])
def test_scores_are_the_loaded_models_and_kv_expand_reaches_it(order, tmp_path):
    folder = folder_with_tokenizer(tmp_path / "released", *dolomite(**GROUPED))
    found = likelihoods(load_lm(folder, kv_expand=order), PAIRS)
    assert found == pytest.approx(direct_scores(load_checkpoint(folder, kv_expand=order).model), rel=1e-5)
    other = load_checkpoint(folder, kv_expand="interleave" if order == "tile" else "tile").model
    assert found != pytest.approx(direct_scores(other), rel=1e-3)


FORMATS: dict[str, tuple[Any, str, int | None, str]] = {
    "dolomite": (lambda: dolomite(**GROUPED), "dolomite:C", 64, "stickbreaking"),
    "dolomite-softmax": (lambda: dolomite(model_type="gpt_dolomite", mixer="softmax"), "dolomite:softmax", 64, "rope"),
    "fla": (lambda: fla(**FLA), "fla:stickbreaking_attn", None, "stickbreaking"),
    "moduleformer": (lambda: test_moduleformer.checkpoint("mlp"), "moduleformer", 32, "stickbreaking"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_found_logged_recorded_and_run(name, tmp_path, caplog, monkeypatch):
    make, format_found, length, attention = FORMATS[name]
    folder = folder_with_tokenizer(tmp_path / "released", *make())
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    with caplog.at_level(logging.INFO, "lm_eval"):
        lm = load_lm(folder)
    # one record each: other tests load a record twice
    lines = [record.getMessage() for record in dict.fromkeys(caplog.records) if "format" in record.getMessage()]
    assert lines == [f"{folder} is a checkpoint of the format {format_found}"]
    assert likelihoods(lm, PAIRS) == pytest.approx(direct_scores(load_checkpoint(folder).model), rel=1e-5)
    assert len(generated(lm, [(PAIRS[0][0], {"until": ["\n"], "max_gen_toks": 3})])) == 1
    record = lm.get_model_info()["sbeval"]
    assert (record["format"], record["attention"]) == (format_found, attention)
    assert record["training_length_tokens"] == length
    assert record["kernels"] == ("blockwise" if attention == "stickbreaking" else "sdpa")


def test_a_released_checkpoint_has_the_dtype_asked_for_and_takes_a_lora_adapter(tmp_path):
    folder = folder_with_tokenizer(tmp_path / "released", *dolomite(**GROUPED))
    plain = likelihoods(load_lm(folder), PAIRS)
    assert load_lm(folder, dtype="bfloat16").get_model_info()["sbeval"]["dtype"] == "bfloat16"
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(load_checkpoint(folder).model, config).eval()
    adapted.save_pretrained(tmp_path / "lora", save_embedding_layers=False)
    found = likelihoods(load_lm(folder, peft=str(tmp_path / "lora")), PAIRS)
    assert found == pytest.approx(direct_scores(adapted), rel=1e-5)
    assert found != pytest.approx(plain, rel=1e-3)


def test_arguments_without_a_meaning_for_the_format_are_refused(checkpoint, tmp_path):
    folder = folder_with_tokenizer(tmp_path / "released", *dolomite(**GROUPED))
    with pytest.raises(UserError, match="load_in_8bit cannot be used with the checkpoint format dolomite:C"):
        load_lm(folder, load_in_8bit=True)
    with pytest.raises(UserError, match=r"kv_expand=tile is only for .* is none"):
        load_lm(checkpoint("llama"), kv_expand="tile")


COMMITS = {"main": "a" * 40, "trained-longer": "b" * 40}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """huggingface_hub's cache, without a network behind it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def keep(cache: Path, name: str, revision: str, folder: Path) -> None:
    """Writes a checkpoint to the place where a download would be."""
    place = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, place / "snapshots" / COMMITS[revision])
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / revision).write_text(COMMITS[revision])


def retrained(folder: Path, parent: Path) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(parent)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tiny_tokenizer(adds_bos=False).save_pretrained(folder)
    return folder


def versions(kind: str, checkpoint: Checkpoints, place: Path) -> dict[str, Path]:
    if kind == "dolomite":
        return {
            name: folder_with_tokenizer(place / name, *dolomite(**GROUPED), seed) for seed, name in enumerate(COMMITS)
        }
    return {"main": checkpoint("llama"), "trained-longer": retrained(place / "more", checkpoint("llama"))}


@pytest.mark.parametrize("kind", ["huggingface", "dolomite", "adapter"])
def test_a_branch_that_has_moved_is_another_model_to_the_response_cache(kind, checkpoint, cache, tmp_path):
    if kind == "adapter":
        for seed, revision in enumerate(COMMITS):
            save_lora(tmp_path / revision, checkpoint("llama"), "q_proj", seed=seed)
    folders = {name: tmp_path / name for name in COMMITS} if kind == "adapter" else versions(kind, checkpoint, tmp_path)
    for revision, folder in folders.items():
        keep(cache, "someone/small", revision, folder)
    stamps = []
    for commit in COMMITS.values():
        (cache / "models--someone--small" / "refs" / "main").write_text(commit)
        lm = load_lm(checkpoint("llama"), peft="someone/small") if kind == "adapter" else load_lm("someone/small")
        stamps.append(run_settings(lm.session)["inputs"]["peft: revision" if kind == "adapter" else "revision"])
        if kind == "dolomite":
            assert len(lm.get_model_info()["sbeval"]["checkpoint_sha256"]) == 64
    assert stamps == list(COMMITS.values())


@pytest.mark.parametrize("kind", ["huggingface", "dolomite"])
def test_a_revision_is_the_one_asked_for(kind, checkpoint, cache, tmp_path):
    folders = versions(kind, checkpoint, tmp_path)
    for revision, folder in folders.items():
        keep(cache, "someone/small", revision, folder)
    found = {name: likelihoods(load_lm("someone/small", revision=name), PAIRS) for name in folders}
    assert found["main"] == likelihoods(load_lm("someone/small"), PAIRS)
    assert found["main"] != pytest.approx(found["trained-longer"], rel=1e-3)
    for revision, folder in folders.items():
        assert found[revision] == likelihoods(load_lm(folder), PAIRS)
        if kind == "huggingface":
            hf = HFLM("someone/small", revision=revision, device="cpu", dtype="float32")
            assert found[revision] == pytest.approx(likelihoods(hf, PAIRS))
    with pytest.raises(UserError, match="someone/small is no folder here, and cannot be loaded from the hub"):
        load_lm("someone/small", revision="unknown")
