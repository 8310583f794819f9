"""Tokens for context extension: the project's token arrays, or any text, in the checkpoint's own tokenizer."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import local_corpus
from sbeval.corpora.tokenizers import separator_ids, tokenizer_sha256
from sbeval.errors import UserError
from sbeval.training.settings import OptimizationSettings
from sbeval.training.windows import load_arrays


def extension_tokens(source: Path, tokenizer: Any) -> tuple[NDArray[Any], int, dict[str, Any]]:
    """Reads the text to extend on.

    Args:
        source: a folder of token arrays (`sbeval.training.tokenised`), a .txt or .jsonl file, or a folder of those.
        tokenizer: the checkpoint's.

    Returns:
        [tokens] joined documents, each followed by the separator; the separator's id; where the text comes from.

    Raises:
        UserError: nothing is there, or the arrays were made with another tokenizer.
    """
    (separator,) = separator_ids(tokenizer, None)
    if (source / "tokens.npy").is_file():
        from transformers import AutoTokenizer

        arrays = load_arrays(source)
        theirs = tokenizer_sha256(AutoTokenizer.from_pretrained(arrays.tokenizer))
        if theirs != (ours := tokenizer_sha256(tokenizer)):
            raise UserError(
                f"expected token arrays made with the checkpoint's tokenizer ({ours[:12]}), found {theirs[:12]} in "
                f"{source}; tokenise the text again or give the text itself"
            )
        return arrays.tokens, separator, arrays.record
    corpus = local_corpus(source)
    parts = []
    for document in corpus.documents():
        parts.append(np.asarray([*tokenizer.encode(document.text, add_special_tokens=False), separator], np.int32))
    tokens = np.concatenate(parts)
    record = {
        "source": source.name,
        "files": len(parts),
        "unique_tokens": len(tokens),
        "tokens_sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
    }
    return tokens, separator, record


def check_documents(tokens: NDArray[Any], separator: int, context_tokens: int) -> None:
    """Refuses text of which no document fills a context.

    Args:
        tokens: joined documents.
        separator: id of the token between them.
        context_tokens: the new context.
    """
    ends = np.flatnonzero(np.asarray(tokens) == separator)
    longest = int(np.diff(ends, prepend=-1).max()) - 1 if len(ends) else len(tokens)
    if longest < context_tokens:
        raise UserError(
            f"expected at least one document of {context_tokens} tokens, found the longest has {longest}; "
            "give longer documents, a shorter --context, or --documents joined"
        )


def check_epochs(epochs: float, *, found_tokens: int, optimization: OptimizationSettings) -> None:
    """Refuses a run that sees windows of the text twice."""
    if epochs > 1:
        raise UserError(
            f"expected text for {optimization.steps} steps of {optimization.batch_tokens} tokens, found "
            f"{found_tokens} tokens: that is {epochs:.2f} epochs; give more text, fewer --steps, or --allow-repeat"
        )
