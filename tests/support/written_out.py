"""Attention computed one query at a time, as the reference for models and layouts."""

import torch
from torch import Tensor


def stick_breaking(
    q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, scale: float, *, attend_current: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the output of the heads, and the remainder of each stick [L, H, 1]."""
    output_LHD, stick_LH1 = torch.zeros_like(v_LHD), torch.ones_like(q_LHD[..., :1])
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
    """Each query sees the newest `window` keys, itself included; the log gates after a key are added to its logit."""
    output_LHD = torch.zeros_like(q_LHD)
    for j in range(len(q_LHD)):
        seen = slice(max(0, j + 1 - (window or len(q_LHD))), j + 1)
        logits_KH = scale * (q_LHD[j] * k_LHD[seen]).sum(-1)
        if log_gates_LH is not None:
            behind = log_gates_LH[seen.start + 1 : j + 1].flip(0).cumsum(0).flip(0)
            logits_KH = logits_KH + torch.cat([behind, torch.zeros_like(logits_KH[:1])])
        output_LHD[j] = (logits_KH.softmax(0)[..., None] * v_LHD[seen]).sum(0)
    return output_LHD


def rotated(x_LHD: Tensor, theta: float) -> Tensor:
    """Rotates each pair of channels by its position, as complex numbers."""
    first, second = x_LHD.chunk(2, -1)
    frequencies = theta ** -(torch.arange(first.shape[-1], dtype=torch.float64) / first.shape[-1])
    angles = torch.arange(len(x_LHD), dtype=torch.float64)[:, None, None] * frequencies
    turned = torch.complex(first.double(), second.double()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1).to(x_LHD.dtype)
