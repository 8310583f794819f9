"""`revision` picks among the versions of a checkpoint on the hub, which lie in huggingface_hub's cache here."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from lm_eval.models.huggingface import HFLM

from sbeval.errors import UserError
from sbeval.model_adapters.record import run_settings
from tests.checkpoints.layouts import dolomite
from tests.model_adapters.small import Checkpoints, english, likelihoods, load_lm, save_lora, tiny_tokenizer
from tests.model_adapters.test_released import GROUPED, folder_with_tokenizer

PAIRS = [(line[:9], line[9:]) for line in english().splitlines()[2:6]]
COMMITS = {"main": "a" * 40, "trained-longer": "b" * 40}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """huggingface_hub's cache, without a network behind it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def keep(cache: Path, name: str, revision: str, folder: Path) -> None:
    """Puts a checkpoint where downloading it would."""
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
    """Folders by revision."""
    if kind == "dolomite":
        return {
            name: folder_with_tokenizer(place / name, *dolomite(**GROUPED), seed) for seed, name in enumerate(COMMITS)
        }
    return {"main": checkpoint("llama"), "trained-longer": retrained(place / "more", checkpoint("llama"))}


@pytest.mark.parametrize("kind", ["huggingface", "dolomite", "adapter"])
def test_a_branch_that_has_moved_is_another_model_to_the_response_cache(
    kind: str, checkpoint: Checkpoints, cache: Path, tmp_path: Path
) -> None:
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
        stamps.append(run_settings(lm)["inputs"]["peft: revision" if kind == "adapter" else "revision"])
        if kind == "dolomite":
            assert len(lm.get_model_info()["sbeval"]["checkpoint_sha256"]) == 64
    assert stamps == list(COMMITS.values())


@pytest.mark.parametrize("kind", ["huggingface", "dolomite"])
def test_a_revision_is_the_one_asked_for(kind: str, checkpoint: Checkpoints, cache: Path, tmp_path: Path) -> None:
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
