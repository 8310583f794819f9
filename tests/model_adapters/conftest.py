"""Small random checkpoints, saved as a user's would be."""

from pathlib import Path

import pytest
import torch
import transformers
from corpus_problems import sharpened

from sbeval.corpora import Layout, TokenizedCorpus, local_corpus, tokenize_corpus
from tests.model_adapters.small import ARCHITECTURES, Checkpoints, english, tiny_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    made: dict[tuple[str, bool], Path] = {}

    def make(architecture: str, *, adds_bos: bool = False) -> Path:
        key = (architecture, adds_bos)
        if key not in made:
            folder = tmp_path_factory.mktemp(architecture) / architecture
            tokenizer = tiny_tokenizer(adds_bos=adds_bos)
            torch.manual_seed(0)
            config = ARCHITECTURES[architecture](len(tokenizer))
            config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 2
            sharpened(transformers.AutoModelForCausalLM.from_config(config), 8.0).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenizedCorpus:
    """The text of `english`, cut into tokens."""
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "tokens"))
    (text := tmp_path / "text.txt").write_text(english())
    return tokenize_corpus(local_corpus(text), tiny_tokenizer(adds_bos=False), Layout())
