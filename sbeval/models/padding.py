"""From an attention mask to where each sequence starts: the decoder knows left padding and nothing else."""

import torch
from torch import Tensor

from sbeval.errors import UserError


def sequence_starts(attention_mask: Tensor | None, *, keys: int, has_past: bool) -> Tensor | None:
    """Returns how many padding positions precede each sequence, [B] integers, or None where nothing is padded.

    Positions of padding after a sequence need no mask under causal attention, so long as nothing follows them.

    Args:
        attention_mask: [B, keys], nonzero for tokens, or None.
        keys: number of cached and new positions.
        has_past: whether some positions come from a cache.

    Raises:
        UserError: the mask has another shape, has a hole, or pads on the right where more tokens follow.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] != keys:
        raise UserError(
            f"attention_mask must have the shape [batch, cached and new tokens = {keys}], "
            f"got {list(attention_mask.shape)}"
        )
    token = attention_mask.bool()
    if bool(token.all()):
        return None
    position = torch.arange(keys, device=token.device)
    start = torch.where(token, position, keys).amin(-1)
    stop = torch.where(token, position + 1, 0).amax(-1)
    if bool((token.sum(-1) != (stop - start).clamp_min(0)).any()):
        raise UserError("attention_mask has padding inside a sequence; pad on the left (padding_side='left')")
    if has_past and bool((stop != keys).any()):
        raise UserError("attention_mask pads on the right of cached tokens; pad on the left (padding_side='left')")
    start = start.clamp_max(keys - 1)
    return start if bool(start.any()) else None
