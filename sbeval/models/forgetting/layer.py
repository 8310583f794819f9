"""What a layer of the Forgetting Transformer (Lin et al. 2025, arXiv 2503.02130) has beside attention.

Its forget gates become a bias, held in extra channels of keys and queries; its "pro" layers shift keys and values.

With forget gates f, the logit of query j and key i gets log f_(i+1) + ... + log f_j = S_j - S_i, where S sums log gates
from the beginning of a text. A softmax does not notice S_j, which is the same for a whole row, so one number for each
key is enough. As a channel of the keys, which all queries multiply by one number, it needs no mask: every kernel of
plain softmax attention computes it with its gradient, over packed and padded texts alike, and a cache holds it with the
keys. Three channels hold it, eight bits of the mantissa each, so that bfloat16 has all bits of a float32.

Shape suffixes: B batch, H query heads, G key/value heads, M query heads of a key head, Q new positions, K cached and
new positions, D head_dim, C extra channels, P parts of a number, E hidden_size.
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
"""What a query's channels hold: it keeps the keys' within the range of float16."""
_MULTIPLE = 8  # kernels read rows of 16 bytes


class ForgetGate(nn.Linear):
    """The logits of one gate for each head, a linear map of the layer's input."""

    def sums(self, hidden_BQE: Tensor, positions: Positions, older_BH1: Tensor | None) -> Tensor:
        """Returns [B, H, Q]: log gates summed from the beginning of each text, in fp32 or better.

        `older_BH1` are the sums of the newest cached position, None without a cache.
        """
        logits_BHQ = self(hidden_BQE).transpose(1, 2)
        wide = torch.promote_types(logits_BHQ.dtype, torch.float32)
        # no key lies before a text's first position, which is where padding is put as well
        first_B1Q = (positions.position_ids == 0)[:, None]
        # the sum of 64K numbers is rounded once
        log_gates_BHQ = logsigmoid(logits_BHQ.to(wide)).masked_fill(first_B1Q, 0.0)
        sums_BHQ = log_gates_BHQ.double().cumsum(-1)
        if positions.cu_seqlens is not None:
            index_T = torch.arange(sums_BHQ.shape[2], device=sums_BHQ.device)
            sums_BHQ = sums_BHQ - sums_BHQ[..., index_T - positions.position_ids[0]]
        elif older_BH1 is not None:
            sums_BHQ = sums_BHQ + older_BH1
        return sums_BHQ.to(wide)


def decay_channels(members: int, dtype: torch.dtype) -> int:
    """Returns how many channels hold the sums of the query heads that share a key head."""
    return -(-members * _parts(dtype) // _MULTIPLE) * _MULTIPLE


def with_decay(
    q_BHQD: Tensor, k_BGQD: Tensor, v_BGQD: Tensor, sums_BHQ: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values [..., D + C], whose plain softmax attention has the bias in it.

    Values get as many zeros, since most kernels take heads of one size. `sums_BHQ` are from `ForgetGate.sums`.
    """
    groups, members = k_BGQD.shape[1], q_BHQD.shape[1] // k_BGQD.shape[1]
    parts, width = _parts(k_BGQD.dtype), decay_channels(members, k_BGQD.dtype)
    channel_BHQP = _split(sums_BHQ / (-_UNIT * scale), parts)
    batch, _, length, _ = channel_BHQP.shape
    channel_BGMQP = channel_BHQP.view(batch, groups, members, length, parts)
    channel_BGQC = channel_BGMQP.transpose(2, 3).flatten(3).to(k_BGQD.dtype)
    k_BGKD = torch.cat([k_BGQD, pad(channel_BGQC, (0, width - members * parts))], dim=-1)
    # each query head reads the channels of its own sums
    own_MC = pad(torch.eye(members, device=q_BHQD.device).repeat_interleave(parts, 1), (0, width - members * parts))
    own_HC = (_UNIT * own_MC).repeat(groups, 1).to(q_BHQD.dtype)
    own_BHQC = own_HC[None, :, None].expand(q_BHQD.shape[0], -1, q_BHQD.shape[2], -1)
    return torch.cat([q_BHQD, own_BHQC], dim=-1), k_BGKD, pad(v_BGQD, (0, width))


def sums_in(k_BGKC: Tensor, head_dim: int, members: int, scale: float) -> Tensor:
    """Returns [B, H, K]: the sums of log gates that keys from `with_decay` hold."""
    parts = _parts(k_BGKC.dtype)
    held_BGKC = k_BGKC[..., head_dim : head_dim + members * parts]
    wide = torch.promote_types(k_BGKC.dtype, torch.float32)
    held_BGMK = held_BGKC.to(wide).reshape(*k_BGKC.shape[:3], members, parts).sum(-1).transpose(2, 3)
    return held_BGMK.flatten(1, 2) * (-_UNIT * scale)


def _parts(dtype: torch.dtype) -> int:
    # three for float32 as well: its products may round to TF32, which has as many bits as float16
    return 1 if dtype == torch.float64 else 3


def _split(x: Tensor, parts: int) -> Tensor:
    """Returns [..., P]: numbers that add up to x; but for a single one, they are bfloat16's."""
    pieces = []
    for _ in range(parts - 1):
        pieces.append(x.to(torch.bfloat16).to(x.dtype))
        x = x - pieces[-1]
    return torch.stack([*pieces, x if parts == 1 else x.to(torch.bfloat16).to(x.dtype)], dim=-1)


class TokenShift(nn.Linear):
    """For each head a linear map of the layer's input, whose sigmoid is the share of the position before."""

    def shifted(self, x_BGQD: Tensor, hidden_BQE: Tensor, position_ids: Tensor, older_BG1C: Tensor | None) -> Tensor:
        """Returns [B, G, Q, D]: each position with its share of the one before, none at a text's beginning.

        `older_BG1C` is what was cached last, which ends in x as it was before its own shift; None without a cache.
        """
        share_BGQ1: Tensor = self(hidden_BQE).transpose(1, 2)[..., None]
        share_BGQ1 = share_BGQ1.to(torch.promote_types(x_BGQD.dtype, torch.float32)).sigmoid()
        first_BG1D = torch.zeros_like(x_BGQD[:, :, :1])
        if older_BG1C is not None:
            first_BG1D = older_BG1C[..., -x_BGQD.shape[3] :]
        before_BGQD = torch.cat([first_BG1D, x_BGQD[:, :, :-1]], dim=2)
        before_BGQD = before_BGQD.masked_fill((position_ids == 0)[:, None, :, None], 0.0)
        return (share_BGQ1 * before_BGQD + (1.0 - share_BGQ1) * x_BGQD).to(x_BGQD.dtype)


def cached_channels(config: SbevalConfig, dtype: torch.dtype) -> int:
    """Returns how many numbers a key head keeps of a position: key and value, the decay, and both before a shift."""
    members = config.num_attention_heads // config.num_key_value_heads
    decay = decay_channels(members, dtype) if config.attention == "forgetting" else 0
    return 2 * (config.head_dim + decay) + config.head_dim * (config.key_shift + config.value_shift)


def cached_last(cache: Cache | None, layer_index: int) -> tuple[Tensor | None, Tensor | None]:
    """Returns keys and values [B, G, 1, ...] as they were cached; Nones without a cache or for an empty one.

    Raises:
        ValueError: the cache is of slots, which do not tell their newest positions.
    """
    if isinstance(cache, SlotCache):
        raise ValueError("slots do not tell a layer what came last, which forget gates and token shifts need")
    if cache is None or not cache.get_seq_length(layer_index):
        return None, None
    layer: Any = cache.layers[layer_index]
    return layer.keys[:, :, -1:], layer.values[:, :, -1:]
