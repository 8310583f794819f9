"""What context extension starts from: a model made ready for a longer context, and tokens in its own tokenizer."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import local_corpus
from sbeval.corpora.tokenizers import load_tokenizer, separator_ids, tokenizer_sha256
from sbeval.errors import UserError
from sbeval.training.recipe import OptimizationSettings
from sbeval.training.windows import load_arrays


def lengthen(model: Any, context_tokens: int, rope_scaling: str | None, parent: Mapping[str, Any]) -> None:
    """Writes the extension into the configuration, the scaling with the length it started from included.

    Args:
        model: changed in place.
        context_tokens: the new context.
        rope_scaling: scaling to train with, such as "dynamic:4"; None keeps the parent's.
        parent: what the checkpoint says of the one it came from; its `training_length_tokens` may be None.

    Raises:
        UserError: the context is no longer than the parent's, or a scaling was given for a model without RoPE.
    """
    from sbeval.models import SbevalConfig
    from sbeval.models.rope import parse_rope_scaling

    config = model.config
    original = parent["training_length_tokens"]
    if original is not None and context_tokens <= original:
        raise UserError(f"expected --context beyond the training length of {original} tokens, found {context_tokens}")
    if rope_scaling is not None:
        own = getattr(config, "rope_parameters", None)
        if own is None or "rope_theta" not in own:
            raise UserError("expected a RoPE model for --rope-scaling, found one without rotary embeddings; remove it")
        unscaled = own.get("original_max_position_embeddings", original or config.max_position_embeddings)
        scaling = parse_rope_scaling(rope_scaling)
        config.rope_parameters = own | scaling | {"original_max_position_embeddings": unscaled}
    config.max_position_embeddings = context_tokens
    config.extended_from = dict(parent)
    if isinstance(config, SbevalConfig):
        config.training_length_tokens = context_tokens


@contextlib.contextmanager
def pinned_rope(model: Any, context_tokens: int, rope_scaling: str | None, parent: Mapping[str, Any]) -> Iterator[None]:
    """Holds one set of RoPE frequencies for the whole run: a dynamic kind would follow each segment's length."""
    from sbeval.models import held_rope_frequencies
    from sbeval.models.rope import parse_rope_scaling

    scaling = None if rope_scaling is None else parse_rope_scaling(rope_scaling)
    with held_rope_frequencies(model, context_tokens, scaling, original_length_tokens=parent["training_length_tokens"]):
        yield


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
        arrays = load_arrays(source)
        theirs = tokenizer_sha256(load_tokenizer(arrays.tokenizer))
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
