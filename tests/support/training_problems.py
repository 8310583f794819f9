"""Models, recipes and extensions small enough to train in a second, and token arrays of this project's own sources."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sbeval.models import SbevalConfig, SbevalForCausalLM
from sbeval.training.recipe import DataSettings, Extension, OptimizationSettings, TrainRecipe
from sbeval.training.text.tokenizer import encode_all, load_tokenizer, save_tokenizer, train_tokenizer

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


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return SbevalForCausalLM.from_pretrained(checkpoint).state_dict()


def tiny_model(attention: str, **changes: Any) -> SbevalForCausalLM:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 2, "training_length_tokens": 64}
    return SbevalForCausalLM(SbevalConfig(attention=attention, eos_token_id=0, **sizes, **changes))


def tiny_extension(parent: Path, data: Path, **changes: Any) -> Extension:
    settings: dict[str, Any] = {
        "checkpoint": str(parent),
        "data": data,
        "context_tokens": CONTEXT_TOKENS,
        "optimization": OptimizationSettings(
            **{"learning_rate": 3e-3, "total_tokens": 6 * 512, "batch_tokens": 512, "micro_batch_tokens": 256},
            **{"warmup_steps": 2, "schedule": "extension"},
        ),
        "precision": "float32",
        "log_every_steps": 1,
    }
    return Extension(**(settings | changes))


def save_tiny_llama(folder: Path, data_folder: Path) -> None:
    """Writes a checkpoint of another family, with the data's tokenizer beside it."""
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=1, max_position_embeddings=64, eos_token_id=0, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(load_tokenizer(data_folder / "tokenizer" / "tokenizer.json"), folder)


@pytest.fixture(scope="session")
def source_texts() -> list[str]:
    folder = Path(__file__).parents[2] / "sbeval"
    return [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*/*.py"))]


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory, source_texts) -> Path:
    """Token arrays of this project's own sources."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = train_tokenizer(source_texts, SIZES["vocab_size"])
    ended = [np.append(tokens, np.uint16(0)) for tokens in encode_all(tokenizer, source_texts)]
    tokens = np.concatenate(ended).astype(np.uint16)
    recall = tokens[: 40 * (LENGTH_TOKENS + 1)].reshape(40, LENGTH_TOKENS + 1)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "recall.npy", recall)
    save_tokenizer(tokenizer, folder / "tokenizer")
    (folder / "record.json").write_text(json.dumps({"unique_tokens": len(tokens), "tokens_sha256": "0" * 64}))
    return folder
