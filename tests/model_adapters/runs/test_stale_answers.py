"""Answers from before a checkpoint changed in place are never read: each change changes an answer, and is named."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.model import CachingLM
from safetensors.torch import load_file, save_file
from transformers import dynamic_module_utils

from sbeval.errors import UserError
from tests.model_adapters.small import Checkpoints, english, instances, load_lm

PROMPTS = instances(
    "generate_until",
    [(f"{line}</s>", {"until": ["\n\n\n"], "max_gen_toks": 12}) for line in english().splitlines()[2:8]],
)
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class Own(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits = found.logits * SCALE
        return found


SCALE = 1.0
"""


def changed(name: str, **keys: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))

    return change


def split_into_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    other = {name: tensor + torch.randn(tensor.shape) for name, tensor in tensors.items()}
    (folder / "parts").mkdir()
    save_file(tensors, folder / "parts/a.safetensors", metadata={"format": "pt"})
    save_file(other, folder / "parts/b.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "parts/a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def other_shards(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("parts/a", "parts/b"))


def other_weights_in_a_shard(folder: Path) -> None:
    shard = folder / "parts/a.safetensors"
    stat = shard.stat()
    shutil.copyfile(folder / "parts/b.safetensors", shard)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert shard.stat().st_size == stat.st_size


def fewer_merges(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:3]
    path.write_text(json.dumps(tokenizer))


def brings_code(folder: Path) -> None:
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    changed("config.json", model_type="own", auto_map=auto)(folder)
    (folder / "own.py").write_text(CODE)


def other_code(folder: Path) -> None:
    (folder / "own.py").write_text(CODE.replace("SCALE = 1.0", "SCALE = -1.0"))


def as_it_is(folder: Path) -> None:
    """The checkpoint as it was saved."""


CHANGES: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], str]] = {
    **{
        key: (as_it_is, changed(f"{file}.json", **{key: value}), f"{file}.json changed")
        for file, key, value in (
            ("generation_config", "repetition_penalty", 3.0),
            ("generation_config", "suppress_tokens", list(range(3, 200))),
            ("generation_config", "eos_token_id", list(range(1, 200))),
            ("tokenizer_config", "split_special_tokens", True),
            ("config", "rope_parameters", {"rope_type": "default", "rope_theta": 10.0}),
        )
    },
    "merges": (as_it_is, fewer_merges, "tokenizer.json changed"),
    "an index of other shards": (split_into_shards, other_shards, "model.safetensors.index.json changed"),
    "a shard below the folder": (split_into_shards, other_weights_in_a_shard, "weights changed"),
    "its own code": (brings_code, other_code, "own.py changed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_answers_from_before_a_change_are_refused(
    change: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    prepare, make, words = CHANGES[change]
    folder, database = tmp_path / f"own{list(CHANGES).index(change)}", str(tmp_path / "cache.db")
    shutil.copytree(checkpoint("llama"), folder)
    prepare(folder)

    def answers(cache: str | None) -> list[str]:
        lm: Any = load_lm(folder, trust_remote_code=True)
        lm = lm if cache is None else CachingLM(lm, cache)
        try:
            found: list[str] = lm.generate_until(PROMPTS)
        finally:
            if cache is not None:
                lm.dbdict.close()
        return found

    before = answers(database)
    assert answers(database) == before
    make(folder)
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        answers(database)
    assert answers(None) != before
