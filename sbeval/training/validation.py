"""Text kept out of a run's training, and the finished checkpoint's loss on it."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.training.settings import TrainRecipe
from sbeval.training.trainer import next_token_loss

FORWARD_TOKENS = 65536


def split_validation(tokens: NDArray[np.uint16], recipe: TrainRecipe) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Cuts the joined documents into those to train on and the last `validation_tokens`.

    Raises:
        UserError: the part kept out is shorter than a window, or leaves nothing to train on.
    """
    kept_out = recipe.data.validation_tokens
    if kept_out and not recipe.length_tokens < kept_out < len(tokens) - recipe.length_tokens:
        raise UserError(
            f"expected validation_tokens beyond a window of {recipe.length_tokens} and within the {len(tokens)} tokens "
            f"there are, found {kept_out}"
        )
    return tokens[: len(tokens) - kept_out], tokens[len(tokens) - kept_out :]


@torch.no_grad()
def validation_loss(model: Any, tokens: NDArray[np.uint16], length_tokens: int) -> dict[str, Any] | None:
    """Returns the mean loss over the disjoint windows of a text.

    Args:
        model: a causal language model of the transformers kind, left in evaluation mode.
        tokens: [tokens] the text.
        length_tokens: model inputs of a window.

    Returns:
        `nll` in nats per token, `tokens` scored and their `length_tokens`; None without text.
    """
    if not len(tokens):
        return None
    model.eval()
    starts = range(0, len(tokens) - length_tokens, length_tokens)
    device = next(model.parameters()).device
    rows = max(1, FORWARD_TOKENS // length_tokens)
    total = 0.0
    for first in range(0, len(starts), rows):
        batch = np.stack([tokens[start : start + length_tokens + 1] for start in starts[first : first + rows]])
        loss = next_token_loss(model, torch.from_numpy(batch.astype(np.int64)).to(device))
        total += loss.double().item() * len(batch)
    return {"nll": total / len(starts), "tokens": len(starts) * length_tokens, "length_tokens": length_tokens}
