"""Fixtures of training tests: token arrays of this project's own sources."""

import json
from pathlib import Path

import numpy as np
import pytest

from sbeval.training.tokenizer import save_tokenizer, train_tokenizer

VOCABULARY = 300
LENGTH_TOKENS = 64


@pytest.fixture(scope="session")
def source_texts() -> list[str]:
    folder = Path(__file__).parents[2] / "sbeval"
    return [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*/*.py"))]


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory, source_texts) -> Path:
    """Token arrays of this project's own sources."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = train_tokenizer(source_texts, VOCABULARY)
    tokenizer.encode_special_tokens = True  # as plain text
    encoded = tokenizer.encode_batch_fast(source_texts, add_special_tokens=False)
    tokens = np.concatenate([[*encoding.ids, 0] for encoding in encoded]).astype(np.uint16)
    recall = tokens[: 40 * (LENGTH_TOKENS + 1)].reshape(40, LENGTH_TOKENS + 1)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "recall.npy", recall)
    save_tokenizer(tokenizer, folder / "tokenizer")
    (folder / "record.json").write_text(json.dumps({"unique_tokens": len(tokens), "tokens_sha256": "0" * 64}))
    return folder
