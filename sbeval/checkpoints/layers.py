"""What the readers of foreign formats share: refusing parts by layer, tied heads, and heads in this family's order."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from sbeval.checkpoints.files import Weights
from sbeval.errors import UserError, shown

T = TypeVar("T")


def same_in_all_layers(values: Sequence[T] | Mapping[int, T], what: str) -> T:
    """Returns the value that all layers share, or all those of a mapping from layers.

    Raises:
        UserError: a layer differs from the first.
    """
    (first, expected), *others = values.items() if isinstance(values, Mapping) else enumerate(values)
    for layer, value in others:
        if value != expected:
            raise UserError(
                f"layers that differ in this are not supported: {what} is {shown(expected)} in layer {first}, "
                f"{shown(value)} in layer {layer}"
            )
    return expected


def refuse_left_over(names: list[str], layout: str) -> None:
    """Raises a UserError where tensors have no place in a layout."""
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise UserError(f"these tensors are no part of the {layout} layout: {', '.join(names[:3])}{more}")


def check_tied_head(weights: Weights, embedding: Tensor) -> None:
    """Takes the head of a model whose head is its embedding, if the files hold one all the same.

    Raises:
        UserError: it is another than the embedding.
    """
    if "lm_head.weight" not in weights:
        return
    head = weights.take("lm_head.weight", tuple(embedding.shape))
    if head.dtype != embedding.dtype or not torch.equal(head, embedding):
        raise UserError(
            "Expected lm_head.weight to be the embedding, since tie_word_embeddings is true or absent, found other "
            "numbers; mend the configuration"
        )


def tiled_head_order(heads: int, groups: int) -> Tensor:
    """Returns [heads]: which tiled query head (key/value head q % groups) each interleaved one (q // size) is."""
    return torch.arange(heads).view(heads // groups, groups).T.flatten()
