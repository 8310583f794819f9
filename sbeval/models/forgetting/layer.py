"""Forget gates and token shifts of the Forgetting Transformer (Lin et al. 2025, arXiv 2503.02130).

With forget gates f, the logit of query j and key i gets the bias log f_(i+1) + ... + log f_j = S_j - S_i, where S_j is
the sum of the log gates from the beginning of the text to j. S_j is the same for all keys of a query and cancels in the
softmax, so the bias is -S_i: one number for each key. It is stored in extra channels of the keys, which every query
multiplies by a constant. So plain softmax attention computes the bias and its gradient, without a mask and with packed
or padded texts, sliding windows and KV caches.

A number takes three channels, with eight bits of its mantissa each, so that bfloat16 holds it as exactly as float32.
In float32, a sum of -45,000 has an error of 0.004. So after 64K tokens, the weights of a head that halves at every step
are right to 0.4 percent, as in the authors' kernels.

The "pro" layers of the paper also shift keys and values by one position (`TokenShift`).

Shape suffixes: B batch, H query heads, G key/value heads, M query heads of a key head, Q new positions, K cached and
new positions, D head_dim, C extra channels, P channels for one number, E hidden_size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad
from transformers import Cache

from sbeval.models.config import SbevalConfig
from sbeval.models.positions import Positions
from sbeval.models.slots import SlotCache

_UNIT = 256.0
"""Constant in the queries' extra channels; dividing the keys' channels by it keeps them in float16's range."""
_MULTIPLE = 8  # kernels read rows of 16 bytes


class ForgetGate(nn.Linear):
    """Linear projection of the layer's input to the logit of one forget gate for each head."""

    def sums(self, hidden_BQE: Tensor, positions: Positions, older_BH1: Tensor | None) -> Tensor:
        """Returns the sums of log gates from the beginning of each text, [B, H, Q] in fp32 or fp64.

        `older_BH1` are the sums at the last cached position, None without a cache.
        """
        logits_BHQ = self(hidden_BQE).transpose(1, 2)
        wide = torch.promote_types(logits_BHQ.dtype, torch.float32)
        # the gate of a text's first position affects no key; position ids of padding are 0 too
        first_B1Q = (positions.position_ids == 0)[:, None]
        # in fp64, so that a sum of 64K numbers is rounded only once
        log_gates_BHQ = logsigmoid(logits_BHQ.to(wide)).masked_fill(first_B1Q, 0.0)
        sums_BHQ = log_gates_BHQ.double().cumsum(-1)
        if positions.cu_seqlens is not None:
            index_T = torch.arange(sums_BHQ.shape[2], device=sums_BHQ.device)
            sums_BHQ = sums_BHQ - sums_BHQ[..., index_T - positions.position_ids[0]]
        elif older_BH1 is not None:
            sums_BHQ = sums_BHQ + older_BH1
        return sums_BHQ.to(wide)


def decay_channels(members: int, dtype: torch.dtype) -> int:
    """Returns the number of extra channels of a key head, for the sums of `members` query heads that share it."""
    return -(-members * _channels_per_number(dtype) // _MULTIPLE) * _MULTIPLE


def with_decay(
    q_BHQD: Tensor, k_BGQD: Tensor, v_BGQD: Tensor, sums_BHQ: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Appends the extra channels with which plain softmax attention computes the bias of the forget gates.

    Args:
        q_BHQD: queries.
        k_BGQD: keys.
        v_BGQD: values, which get zeros, since most kernels need one head_dim for all three.
        sums_BHQ: from `ForgetGate.sums`.
        scale: factor of the logits.

    Returns:
        Queries, keys and values, [..., D + C] each.
    """
    groups, members = k_BGQD.shape[1], q_BHQD.shape[1] // k_BGQD.shape[1]
    parts, width = _channels_per_number(k_BGQD.dtype), decay_channels(members, k_BGQD.dtype)
    channel_BHQP = _split(sums_BHQ / (-_UNIT * scale), parts)
    batch, _, length, _ = channel_BHQP.shape
    channel_BGMQP = channel_BHQP.view(batch, groups, members, length, parts)
    channel_BGQC = channel_BGMQP.transpose(2, 3).flatten(3).to(k_BGQD.dtype)
    k_BGKD = torch.cat([k_BGQD, pad(channel_BGQC, (0, width - members * parts))], dim=-1)
    # a query head has the constant in the channels of its own sums and zeros in those of the other heads
    selector_MC = pad(
        torch.eye(members, device=q_BHQD.device).repeat_interleave(parts, 1), (0, width - members * parts)
    )
    selector_HC = (_UNIT * selector_MC).repeat(groups, 1).to(q_BHQD.dtype)
    selector_BHQC = selector_HC[None, :, None].expand(q_BHQD.shape[0], -1, q_BHQD.shape[2], -1)
    return torch.cat([q_BHQD, selector_BHQC], dim=-1), k_BGKD, pad(v_BGQD, (0, width))


def sums_in(k_BGKC: Tensor, head_dim: int, members: int, scale: float) -> Tensor:
    """Reads the sums of log gates back from keys of `with_decay`, [B, H, K]."""
    parts = _channels_per_number(k_BGKC.dtype)
    channel_BGKC = k_BGKC[..., head_dim : head_dim + members * parts]
    wide = torch.promote_types(k_BGKC.dtype, torch.float32)
    sums_BGMK = channel_BGKC.to(wide).reshape(*k_BGKC.shape[:3], members, parts).sum(-1).transpose(2, 3)
    return sums_BGMK.flatten(1, 2) * (-_UNIT * scale)


def _channels_per_number(dtype: torch.dtype) -> int:
    # three channels for float32 as well, since its matmuls may round to TF32, whose mantissa is as short as that of
    # float16
    return 1 if dtype == torch.float64 else 3


def _split(x: Tensor, parts: int) -> Tensor:
    """Splits x into P terms that add up to it, [..., P]; unless P is 1, each term is a bfloat16 number."""
    terms = []
    for _ in range(parts - 1):
        terms.append(x.to(torch.bfloat16).to(x.dtype))
        x = x - terms[-1]
    return torch.stack([*terms, x if parts == 1 else x.to(torch.bfloat16).to(x.dtype)], dim=-1)


class TokenShift(nn.Linear):
    """Mixes keys or values with those of the previous position, with a learned weight for each head and position."""

    def shifted(self, x_BGQD: Tensor, hidden_BQE: Tensor, position_ids: Tensor, older_BG1C: Tensor | None) -> Tensor:
        """Returns s * x[t - 1] + (1 - s) * x[t] for each position t, [B, G, Q, D]; x[-1] of a text is 0.

        The weight s is the sigmoid of the projected layer input. `older_BG1C` are the keys or values of the last
        cached position, whose last D channels are unshifted; None without a cache.
        """
        weight_BGQ1: Tensor = self(hidden_BQE).transpose(1, 2)[..., None]
        weight_BGQ1 = weight_BGQ1.to(torch.promote_types(x_BGQD.dtype, torch.float32)).sigmoid()
        first_BG1D = torch.zeros_like(x_BGQD[:, :, :1])
        if older_BG1C is not None:
            first_BG1D = older_BG1C[..., -x_BGQD.shape[3] :]
        before_BGQD = torch.cat([first_BG1D, x_BGQD[:, :, :-1]], dim=2)
        before_BGQD = before_BGQD.masked_fill((position_ids == 0)[:, None, :, None], 0.0)
        return (weight_BGQ1 * before_BGQD + (1.0 - weight_BGQ1) * x_BGQD).to(x_BGQD.dtype)


def cached_channels(config: SbevalConfig, dtype: torch.dtype) -> int:
    """Returns how many numbers the KV cache stores for each position and key head.

    They are key and value, extra channels for the forget gates, and the unshifted key and value for a token shift.
    """
    members = config.num_attention_heads // config.num_key_value_heads
    decay = decay_channels(members, dtype) if config.attention == "forgetting" else 0
    return 2 * (config.head_dim + decay) + config.head_dim * (config.key_shift + config.value_shift)


def newest_cached(cache: Cache | None, layer_index: int) -> tuple[Tensor | None, Tensor | None]:
    """Returns the cached keys and values of the last position, [B, G, 1, C] each; None for both if nothing is cached.

    Raises:
        ValueError: the cache is a `SlotCache`, whose texts end at different positions.
    """
    if isinstance(cache, SlotCache):
        raise ValueError(
            "forget gates and token shifts need the last cached position, which a SlotCache does not provide: use "
            "another cache"
        )
    if cache is None or not cache.get_seq_length(layer_index):
        return None, None
    layer: Any = cache.layers[layer_index]
    return layer.keys[:, :, -1:], layer.values[:, :, -1:]
