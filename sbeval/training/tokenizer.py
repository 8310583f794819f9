"""Trains a small byte-level BPE tokenizer and saves it as a Hugging Face fast tokenizer."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

END_OF_TEXT = "<|endoftext|>"
Tokens = NDArray[np.uint16 | np.uint32]
"""Token ids: uint16 if the vocabulary fits, else uint32."""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Trains a byte-level BPE `tokenizers.Tokenizer` with `vocabulary` entries, its special token included.

    Each digit is one token, so a model can copy a number digit by digit. The only special token is `<|endoftext|>`; it
    has id 0, and the tokenizer never adds it to a text.
    """
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )  # slow import that reading a recipe does not need

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path, *, model_max_length: int = 1 << 30) -> None:
    """Saves a `tokenizers.Tokenizer` as a folder that `AutoTokenizer.from_pretrained` reads."""
    from transformers import PreTrainedTokenizerFast  # takes seconds to import

    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
    )
    fast.save_pretrained(folder)


def token_dtype(vocabulary: int) -> type[np.uint16 | np.uint32]:
    """Returns the NumPy type for token ids of a vocabulary of this size."""
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32
