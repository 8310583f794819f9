"""The demo tokenizer: byte-level BPE trained on the training text, saved as a Hugging Face fast tokenizer."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

END_OF_TEXT = "<|endoftext|>"
Tokens = NDArray[np.uint16 | np.uint32]
"""Token ids, in the smaller type where the vocabulary allows it."""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Trains a byte-level BPE `tokenizers.Tokenizer` of so many entries, the special token included.

    Digits are tokens of their own, so that a number can be copied digit by digit. `<|endoftext|>` has id 0, is the
    only special token, and is never added by the tokenizer itself.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # recipes are read without

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
    """Writes a `tokenizers.Tokenizer` as a folder that `AutoTokenizer.from_pretrained` reads."""
    from transformers import PreTrainedTokenizerFast  # as above, and takes seconds

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
    """Returns the type that holds every token id of a vocabulary."""
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32
