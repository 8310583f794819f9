"""Attention written out one query and one key at a time, for definitions of models and of layouts."""

import torch
from torch import Tensor


def stick_breaking(
    q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, scale: float, *, attend_current: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the heads, and what is left of each stick [L, H, 1]."""
    output_LHD, stick_LH1 = torch.zeros_like(q_LHD), torch.ones_like(q_LHD[..., :1])
    for j in range(len(q_LHD)):
        for i in reversed(range(j + attend_current)):
            beta_H1 = (scale * (q_LHD[j] * k_LHD[i]).sum(-1, keepdim=True)).sigmoid()
            output_LHD[j] += stick_LH1[j] * beta_H1 * v_LHD[i]
            stick_LH1[j] *= 1 - beta_H1
    return output_LHD, stick_LH1


def softmax(
    q_LHD: Tensor,
    k_LHD: Tensor,
    v_LHD: Tensor,
    scale: float,
    *,
    window: int | None = None,
    log_gates_LH: Tensor | None = None,
) -> Tensor:
    """Each query sees the newest `window` keys, itself among them; a key's logit gets the log gates behind it."""
    output_LHD = torch.zeros_like(q_LHD)
    for j in range(len(q_LHD)):
        seen = range(max(0, j + 1 - (window or len(q_LHD))), j + 1)
        logits = [scale * (q_LHD[j] * k_LHD[i]).sum(-1) for i in seen]
        if log_gates_LH is not None:
            logits = [logit + log_gates_LH[i + 1 : j + 1].sum(0) for logit, i in zip(logits, seen, strict=True)]
        weights_KH1 = torch.stack(logits).softmax(0)[..., None]
        output_LHD[j] = (weights_KH1 * v_LHD[seen.start : j + 1]).sum(0)
    return output_LHD


def rotated(x_LHD: Tensor, theta: float) -> Tensor:
    """Turns each pair of channels by its position, as complex numbers."""
    first, second = x_LHD.chunk(2, -1)
    frequencies = theta ** -(torch.arange(first.shape[-1], dtype=torch.float64) / first.shape[-1])
    angles = torch.arange(len(x_LHD), dtype=torch.float64)[:, None, None] * frequencies
    turned = torch.complex(first.double(), second.double()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1).to(x_LHD.dtype)
