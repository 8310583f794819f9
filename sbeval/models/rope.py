"""Rotary position embeddings whose frequencies are values passed along, never state of a module.

Shape suffixes: B batch, H heads, L positions, D head_dim, F frequencies (D / 2).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LENGTH_DEPENDENT = ("dynamic", "longrope")


class RopeFrequencies(NamedTuple):
    """What a request rotates its queries and keys with.

    Attributes:
        inv_freq: [D / 2] fp32, radians a position.
        attention_factor: factor of cosine and sine.
    """

    inv_freq: Tensor
    attention_factor: float


class _RopeSettings:
    """What transformers' frequency functions read from a configuration."""

    def __init__(self, rope_parameters: dict[str, Any], head_dim: int, original_length_tokens: int) -> None:
        self.rope_parameters = rope_parameters
        self.head_dim = head_dim
        self.max_position_embeddings = original_length_tokens

    def standardize_rope_params(self) -> None:
        pass


def rope_frequencies(
    rope_parameters: dict[str, Any], *, head_dim: int, original_length_tokens: int, length_tokens: int
) -> RopeFrequencies:
    """Returns the frequencies for one request: a function of its arguments alone.

    Args:
        rope_parameters: base and scaling in transformers' form, such as
            `{"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0}`.
        head_dim: D, even.
        original_length_tokens: training length before any scaling, unless `rope_parameters` names its own
            `original_max_position_embeddings`.
        length_tokens: length of the request, with all tokens it may still generate; the dynamic kinds depend on it.
    """
    rope_type = rope_parameters.get("rope_type", "default")
    if rope_type == "default":
        exponent_F = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return RopeFrequencies(1.0 / rope_parameters["rope_theta"] ** exponent_F, 1.0)
    original = rope_parameters.get("original_max_position_embeddings", original_length_tokens)
    parameters = {**rope_parameters, "original_max_position_embeddings": original}
    settings = _RopeSettings(parameters, head_dim, original)
    inv_freq_F, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](
        settings, torch.device("cpu"), seq_len=max(length_tokens, original)
    )
    return RopeFrequencies(inv_freq_F, float(attention_factor))


def cos_sin(frequencies: RopeFrequencies, position_ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine [B, 1, L, D / 2] in fp32 for integer positions [B, L]."""
    inv_freq_F = frequencies.inv_freq.to(position_ids_BL.device, torch.float32)
    angle_B1LF = (position_ids_BL.float()[..., None] * inv_freq_F).unsqueeze(1)
    return angle_B1LF.cos() * frequencies.attention_factor, angle_B1LF.sin() * frequencies.attention_factor


def rotate(x_BHLD: Tensor, cos_B1LF: Tensor, sin_B1LF: Tensor) -> Tensor:
    """Rotates the pairs (x_f, x_{f + D/2}) by their angles in fp32; returns x's dtype."""
    first_BHLF, second_BHLF = x_BHLD.float().chunk(2, dim=-1)
    rotated = (
        first_BHLF * cos_B1LF - second_BHLF * sin_B1LF,
        second_BHLF * cos_B1LF + first_BHLF * sin_B1LF,
    )
    return torch.cat(rotated, dim=-1).to(x_BHLD.dtype)
