"""The methods as their papers define them, pair by pair in fp64: slow, and written without a look at the code."""

import math

import torch
from torch import Tensor


def distance(method: str, numbers: tuple[int, ...], query: int, key: int) -> int | None:
    """By how many positions query and key are rotated apart, None where the query does not see the key."""
    if key > query:
        return None
    if method == "self_extend":
        group, window = numbers
        if query - key < window:
            return query - key
        return (query // group + window - window // group) - key // group
    if method == "dual_chunk":
        chunk, local = numbers
        apart = query // chunk - key // chunk
        rotated = [query % chunk, min(query % chunk + chunk, chunk + local - 1), chunk + local - 1][min(apart, 2)]
        return rotated - key % chunk
    if method == "sink_window":
        sink, window = numbers
        cache = sorted({*range(min(sink, query + 1)), *range(max(0, query - window + 1), query + 1)})
        return cache.index(query) - cache.index(key) if key in cache else None
    assert method == "log_length"
    return query - key


def definition(
    method: str,
    numbers: tuple[int, ...],
    q_HLD: Tensor,
    k_GLD: Tensor,
    v_GLD: Tensor,
    *,
    inv_freq_F: Tensor,
    scale: float,
    trained_at: int,
) -> Tensor:
    """Returns [H, L, D] in fp64 from the matrix of all weights."""
    q_HLD, k_HLD, v_HLD = (x.double().repeat_interleave(len(q_HLD) // len(x), dim=0) for x in (q_HLD, k_GLD, v_GLD))
    pairs, length = len(inv_freq_F), q_HLD.shape[1]

    def as_complex(x_HLD: Tensor) -> Tensor:
        return torch.complex(x_HLD[..., :pairs], x_HLD[..., pairs : 2 * pairs])

    logits_HLL = torch.full((len(q_HLD), length, length), -torch.inf, dtype=torch.float64)
    for query in range(length):
        factor = 1.0
        if method == "log_length":
            factor = max(1.0, math.log(query + 1) / math.log(trained_at))
        for key in range(length):
            apart = distance(method, numbers, query, key)
            if apart is not None:
                turn_F = torch.polar(torch.ones(pairs, dtype=torch.float64), apart * inv_freq_F.double())
                turned_HF = as_complex(q_HLD[:, query]) * turn_F * as_complex(k_HLD[:, key]).conj()
                rest_H = (q_HLD[:, query, 2 * pairs :] * k_HLD[:, key, 2 * pairs :]).sum(-1)
                logits_HLL[:, query, key] = factor * scale * (turned_HF.real.sum(-1) + rest_H)
    return logits_HLL.softmax(-1) @ v_HLD
