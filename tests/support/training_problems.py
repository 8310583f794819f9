"""Models, recipes and extensions small enough to train in a second, and token arrays of this project's own sources."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sbeval.models import SbevalConfig, SbevalForCausalLM
from sbeval.training.recipe import DataSettings, Extension, OptimizationSettings, TrainRecipe
from sbeval.training.tokenizer import save_tokenizer, train_tokenizer

LENGTH_TOKENS = 64
CONTEXT_TOKENS = 128
STEPS = 20
SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}


def tiny_recipe(attention: str = "stickbreaking", steps: int = STEPS, save_every_steps: int = 100) -> TrainRecipe:
    return TrainRecipe(
        name=f"tiny_{attention}",
        model={
            **{"attention": attention, **SIZES, "num_hidden_layers": 2, "tie_word_embeddings": True},
            **{"training_length_tokens": LENGTH_TOKENS, "bos_token_id": 0, "eos_token_id": 0},
        },
        data=DataSettings(folder="unused", recall_share=0.1),
        optimization=OptimizationSettings(
            learning_rate=1e-2, total_tokens=steps * 256, batch_tokens=256, warmup_steps=min(3, steps)
        ),
        precision="float32",
        log_every_steps=5,
        save_every_steps=save_every_steps,
    )


def assert_same_weights(found: Path, expected: Path, *, rtol: float = 0, atol: float = 0) -> None:
    """Compares two checkpoints, bit by bit unless a tolerance is given."""
    state, other = (SbevalForCausalLM.from_pretrained(checkpoint).state_dict() for checkpoint in (found, expected))
    for name, tensor in other.items():
        torch.testing.assert_close(state[name], tensor, rtol=rtol, atol=atol)


def json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def parts_of(out: Path) -> list[tuple[int, int]]:
    """Returns the first and last step of each process that worked on a run."""
    return [(part["first_step"], part["last_step"]) for part in json_lines(out / "runs.jsonl")]


def losses(out: Path) -> list[float]:
    return [point["loss_nats"] for point in json_lines(out / "training_log.jsonl")]


def record_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "training_record.json").read_text())


def tiny_model(attention: str, **changes: Any) -> SbevalForCausalLM:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 2, "training_length_tokens": 64}
    return SbevalForCausalLM(SbevalConfig(attention=attention, eos_token_id=0, **sizes, **changes))


def save_parent(folder: Path, data_folder: Path, attention: str = "stickbreaking", **changes: Any) -> Path:
    """Writes a checkpoint of this family with the data's tokenizer."""
    tiny_model(attention, **changes).save_pretrained(folder)
    copy_tokenizer(data_folder, folder)
    return folder


def tiny_extension(parent: Path, data: Path, *, steps: int = 3, **changes: Any) -> Extension:
    settings: dict[str, Any] = {
        "checkpoint": str(parent),
        "data": data,
        "context_tokens": CONTEXT_TOKENS,
        "optimization": OptimizationSettings(
            **{"learning_rate": 3e-3, "total_tokens": steps * 512, "batch_tokens": 512, "micro_batch_tokens": 256},
            **{"warmup_steps": 2, "schedule": "extension"},
        ),
        "precision": "float32",
        "log_every_steps": 1,
    }
    return Extension(**(settings | changes))


def save_tiny_llama(folder: Path, data_folder: Path) -> None:
    """Writes a checkpoint of another family with the data's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=1, max_position_embeddings=64, eos_token_id=0, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder)
    copy_tokenizer(data_folder, folder)


def copy_tokenizer(data_folder: Path, folder: Path) -> None:
    """Copies the data's tokenizer into a checkpoint's folder."""
    shutil.copytree(data_folder / "tokenizer", folder, dirs_exist_ok=True)


@pytest.fixture(scope="session")
def source_texts() -> list[str]:
    return [file.read_text(encoding="utf-8") for file in sorted((Path(__file__).parents[2] / "sbeval").glob("*/*.py"))]


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory, source_texts) -> Path:
    """Token arrays of this project's own sources."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = train_tokenizer(source_texts, SIZES["vocab_size"])
    tokenizer.encode_special_tokens = True  # as plain text
    encoded = tokenizer.encode_batch_fast(source_texts, add_special_tokens=False)
    tokens = np.concatenate([[*encoding.ids, 0] for encoding in encoded]).astype(np.uint16)
    recall = tokens[: 40 * (LENGTH_TOKENS + 1)].reshape(40, LENGTH_TOKENS + 1)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "recall.npy", recall)
    save_tokenizer(tokenizer, folder / "tokenizer")
    (folder / "record.json").write_text(json.dumps({"unique_tokens": len(tokens), "tokens_sha256": "0" * 64}))
    return folder
