"""Position schemes that add a bias to the attention logits: ALiBi, NAPE and FIRE.

Shape suffixes: B batch, H heads, R rows (queries of a block), C keys a block can see.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, relu

from sbeval.models.flex import ScoreMod, whole_blocks

FIRE_WIDTH = 32
FIRE_INITIAL_SCALE = 0.1
FIRE_INITIAL_THRESHOLD = 512.0
_FIRE_EPS = 1e-6


def alibi_slopes(heads: int) -> list[float]:
    """Returns one slope for each head (Press et al. 2022, arXiv 2108.12409).

    If the number of heads n is a power of two, the slopes are the geometric sequence with first term and ratio
    2^(-8/n). Otherwise they are the slopes of the largest power of two p < n, followed by the 1st, 3rd, 5th, ... slope
    of 2p heads.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (index + 1) / power) for index in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * index + 1) / power) for index in range(heads - power)]


def nape_slopes(heads: int) -> list[float]:
    """Returns the slopes of NAPE (Vasylenko et al. 2025, arXiv 2506.16640): ALiBi in one half of the heads only.

    The first heads // 2 heads have the slopes 1, 1/2, 1/3, ..., as in the authors' code. The other heads have no
    positions, which is a slope of 0.
    """
    with_alibi = heads // 2
    return [1.0 / (index + 1) for index in range(with_alibi)] + [0.0] * (heads - with_alibi)


class AlibiBias(nn.Module):
    """ALiBi: adds minus the distance times the head's fixed slope to each logit; has no parameters.

    `slopes` has one number for each head; None means those of `alibi_slopes`.
    """

    by_distance = True

    def __init__(self, heads: int, slopes: list[float] | None = None) -> None:
        super().__init__()
        self.slopes = alibi_slopes(heads) if slopes is None else slopes
        self.channels = heads
        self._slopes_on_gpus: dict[torch.device, Tensor] = {}

    def forward(self, position_BR: Tensor | None, distance_RC: Tensor) -> Tensor:
        """Returns [1, H, R, C] in fp32."""
        return AlibiOfHeads(self.slopes_on(distance_RC.device))(position_BR, distance_RC)

    def slopes_on(self, device: torch.device) -> Tensor:
        """Returns the slopes on a device, [H] in fp32."""
        # a CUDA graph cannot capture a transfer from the host, and its replays read the tensor of the capture
        if device in self._slopes_on_gpus:
            return self._slopes_on_gpus[device]
        with torch.inference_mode(False):
            slope_H = torch.tensor(self.slopes, dtype=torch.float32, device=device)
        if slope_H.is_cuda:
            self._slopes_on_gpus[device] = slope_H
        return slope_H

    def score_mod(self, position_Q: Tensor | None, device: torch.device) -> ScoreMod:
        """Returns the bias as a FlexAttention `score_mod`, computed in fp32."""
        slope_H = self.slopes_on(device)

        def add(logit: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return logit - slope_H[head] * (query - key)

        return add


class AlibiOfHeads:
    """ALiBi's bias for heads with these slopes, [H] in fp32."""

    by_distance = True

    def __init__(self, slope_H: Tensor) -> None:
        self._slope_H = slope_H

    def __call__(self, position_BR: Tensor | None, distance_RC: Tensor) -> Tensor:
        """Returns [1, H, R, C] in fp32."""
        return alibi(self._slope_H, distance_RC[None])


def alibi(slope_H: Tensor, distance_BQK: Tensor) -> Tensor:
    """Returns ALiBi's bias, [B, H, Q, K]; at negative distances, of newer keys, the caller masks it."""
    return -slope_H[:, None, None] * distance_BQK[:, None]


class FireBias(nn.Module):
    """FIRE: a learned bias of the log-distance divided by the log-position (Li et al. 2023, arXiv 2310.04418).

    b(j, i) = f(psi(j - i) / psi(max(j, threshold))) with psi(x) = log(c x + 1), f an MLP with one hidden layer, and
    learned c and threshold. The ratio stays in [0, 1], however long the context. The parameter is the threshold as a
    multiple of FIRE_INITIAL_THRESHOLD: with a learning rate that suits the other parameters, a parameter with a value
    of hundreds of tokens would hardly move.
    """

    by_distance = False

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.channels = max(heads, FIRE_WIDTH)
        self.scale = nn.Parameter(torch.empty(()))
        self.threshold_multiple = nn.Parameter(torch.empty(()))
        self.hidden = nn.Linear(1, FIRE_WIDTH)
        self.output = nn.Linear(FIRE_WIDTH, heads)

    def forward(self, position_BR: Tensor | None, distance_RC: Tensor) -> Tensor:
        """Returns [B or 1, H, R, C] in fp32; `position_BR` is each query's position in its text, from 0."""
        assert position_BR is not None
        with torch.autocast(distance_RC.device.type, enabled=False):
            scale = self.scale.float().abs()
            log_distance_RC = (scale * distance_RC.clamp_min(0)).log1p()
            reach_BR = torch.maximum(position_BR.float(), self.threshold_tokens())
            ratio_BRC = log_distance_RC / ((scale * reach_BR).log1p() + _FIRE_EPS)[..., None]
            inner = relu(linear(ratio_BRC[..., None], self.hidden.weight.float(), self.hidden.bias.float()))
            return linear(inner, self.output.weight.float(), self.output.bias.float()).permute(0, 3, 1, 2)

    def threshold_tokens(self) -> Tensor:
        """Returns the threshold in tokens, a scalar: queries before it divide by it, later ones by their position."""
        return FIRE_INITIAL_THRESHOLD * self.threshold_multiple.float().abs()

    def score_mod(self, position_Q: Tensor | None, device: torch.device) -> ScoreMod:
        """Returns the bias as a FlexAttention `score_mod`, computed in fp32."""
        assert position_Q is not None
        scale = self.scale.detach().float().abs()
        added = whole_blocks(len(position_Q)) - len(position_Q)
        reach_Q = torch.maximum(pad(position_Q.float(), (0, added)), self.threshold_tokens().detach())
        per_log_distance_Q = 1.0 / ((scale * reach_Q).log1p() + _FIRE_EPS)
        inner_2W = torch.stack([self.hidden.weight.detach().float()[:, 0], self.hidden.bias.detach().float()])
        output = (self.output.weight.detach().float(), self.output.bias.detach().float()[:, None])
        outer_HW = torch.cat(output, dim=1)  # column FIRE_WIDTH is the bias

        def add(logit: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            ratio = (scale * (query - key).clamp_min(0)).log1p() * per_log_distance_Q[query]
            bias = outer_HW[head, FIRE_WIDTH]
            for unit in range(FIRE_WIDTH):
                bias = bias + outer_HW[head, unit] * relu(inner_2W[0, unit] * ratio + inner_2W[1, unit])
            return logit + bias

        return add
