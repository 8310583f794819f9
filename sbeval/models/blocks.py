"""One block of the decoder: attention and MLP, each behind a norm and added to the residual stream."""

from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from sbeval.models.attention import Attention, Positions
from sbeval.models.config import SbevalConfig
from sbeval.models.mlp.dense import MLP
from sbeval.models.mlp.experts import Mixture


def make_norm(config: SbevalConfig) -> nn.Module:
    """Returns the norm a configuration asks for, over the residual stream."""
    kind = nn.RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps)


class DecoderBlock(GradientCheckpointingLayer):  # type: ignore[no-untyped-call]
    """Attention and MLP, each normed before and scaled by the residual multiplier after."""

    def __init__(self, config: SbevalConfig, layer_index: int) -> None:
        super().__init__()
        self.residual_multiplier = config.residual_multiplier
        self.input_norm = make_norm(config)
        self.self_attn = Attention(config, layer_index)
        self.post_attention_norm = make_norm(config)
        self.mlp = MLP(config, config.intermediate_size) if config.num_experts is None else Mixture(config)

    def forward(self, hidden: Tensor, positions: Positions, past_key_values: Cache | None = None) -> Tensor:
        """[B, L, hidden_size] to the same."""
        hidden = hidden + self._scaled(self.self_attn(self.input_norm(hidden), positions, past_key_values))
        return hidden + self._scaled(self.mlp(self.post_attention_norm(hidden)))

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.residual_multiplier is None else branch * self.residual_multiplier
