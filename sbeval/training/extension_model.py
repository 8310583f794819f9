"""A model made ready for a longer context: its configuration, and RoPE frequencies that do not change on the way."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from sbeval.errors import UserError


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
