"""The token shift of keys and values in the Forgetting Transformer's "pro" layers.

Shape suffixes: B batch, G key/value heads, Q new positions, D head_dim, E hidden_size.
"""

import torch
from torch import Tensor, nn


class TokenShift(nn.Linear):
    """For each head a linear map of the layer's input, whose sigmoid is the share of the position before."""

    def shifted(self, x_BGQD: Tensor, hidden_BQE: Tensor, position_ids: Tensor, older_BG1D: Tensor | None) -> Tensor:
        """Returns [B, G, Q, D]: each position with its share of the one before, none at a text's beginning.

        Args:
            x_BGQD: keys or values.
            hidden_BQE: the layer's input.
            position_ids: [B or 1, Q] index of each position in its text.
            older_BG1D: what was cached last, as it was before its own shift; None without a cache.
        """
        share_BGQ1: Tensor = self(hidden_BQE).transpose(1, 2)[..., None]
        share_BGQ1 = share_BGQ1.to(torch.promote_types(x_BGQD.dtype, torch.float32)).sigmoid()
        first_BG1D = torch.zeros_like(x_BGQD[:, :, :1]) if older_BG1D is None else older_BG1D
        before_BGQD = torch.cat([first_BG1D, x_BGQD[:, :, :-1]], dim=2)
        before_BGQD = before_BGQD.masked_fill((position_ids == 0)[:, None, :, None], 0.0)
        return (share_BGQ1 * before_BGQD + (1.0 - share_BGQ1) * x_BGQD).to(x_BGQD.dtype)
