"""The attention layer of a block: projections, KV cache, a stick-breaking or softmax mixer, and the output projection.

Shape suffixes: B batch, H query heads, G key/value heads, Q new positions, K cached and new positions, D head_dim,
E hidden_size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache

from sbeval.attention import stickbreaking_attention, stickbreaking_decode
from sbeval.attention.api import Implementation
from sbeval.attention.context_parallel import ContextParallel
from sbeval.models.biases import AlibiBias, FireBias, nape_slopes
from sbeval.models.config import SCALED, WITH_ENTMAX, SbevalConfig
from sbeval.models.entmax.attention import entmax_attention, entmax_decode
from sbeval.models.entmax.scales import QueryScale
from sbeval.models.forgetting.layer import ForgetGate, TokenShift, newest_cached, sums_in, with_decay
from sbeval.models.forgetting.whole_text import whole_text_attention
from sbeval.models.norms import HeadNorm, PerHeadRMSNorm, make_qk_norm
from sbeval.models.packed_softmax import packed_softmax_attention, text_by_text
from sbeval.models.positions import Positions
from sbeval.models.rope import rotate
from sbeval.models.slots import SlotCache, softmax_decode
from sbeval.models.softmax import Bias, softmax_attention

BIASED: dict[str, Callable[[int], Bias]] = {
    "alibi": AlibiBias,
    "nape": lambda heads: AlibiBias(heads, nape_slopes(heads)),
    "fire": FireBias,
}
"""Attention scheme to the function that makes its bias, which takes the number of heads."""


class StickBreakingKernels(NamedTuple):
    """Options of `sbeval.stickbreaking_attention` that the user of a model chooses; a checkpoint never stores them."""

    impl: Implementation = "auto"
    skip_threshold: float | None = None


class StickBreakingMixer(nn.Module):
    """Stick-breaking attention, with an output term for the remainder, the attention weight that no key received."""

    def __init__(self, config: SbevalConfig) -> None:
        super().__init__()
        self.scale = config.attention_scale
        self.attend_current = config.attend_current
        self.remainder = config.remainder
        self.kernels = StickBreakingKernels()
        self.context_parallel: ContextParallel | None = None
        if config.remainder == "head_bias":
            self.head_bias = nn.Parameter(torch.zeros(config.num_attention_heads, config.head_dim))

    def forward(
        self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, positions: Positions, seq_start_B: Tensor | None
    ) -> Tensor:
        """Computes attention for a prefill or a training step, [B, H, Q, D]."""
        heads, options = (q_BHQD, k_BGKD, v_BGKD), self._options()
        if self.context_parallel is not None and self.context_parallel.active:
            output_BHQD, remainder_BHQ = self.context_parallel.stickbreaking_attention(*heads, **options)
        else:
            output_BHQD, remainder_BHQ = stickbreaking_attention(
                *heads, seq_start=seq_start_B, cu_seqlens=positions.cu_seqlens, **options
            )
        return self._with_remainder(output_BHQD, remainder_BHQ, v_BGKD[:, :, -q_BHQD.shape[2] :])

    def step(self, q_BHQD: Tensor, v_BGQD: Tensor, slots: SlotCache, k_BGKD: Tensor, v_BGKD: Tensor) -> Tensor:
        """Computes one decode step: attention of the newest positions to all keys in the slots.

        Args:
            q_BHQD: queries of the newest positions.
            v_BGQD: values of the newest positions, for the remainder term.
            slots: the cache, which says how many keys each slot holds.
            k_BGKD: keys in the slots.
            v_BGKD: values in the slots.

        Returns:
            [B, H, Q, D].
        """
        output_BHQD, remainder_BHQ = stickbreaking_decode(q_BHQD, k_BGKD, v_BGKD, slots.length_B, **self._options())
        return self._with_remainder(output_BHQD, remainder_BHQ, v_BGQD)

    def _options(self) -> dict[str, Any]:
        return {"scale": self.scale, "attend_current": self.attend_current, **self.kernels._asdict()}

    def _with_remainder(self, output_BHQD: Tensor, remainder_BHQ: Tensor, new_v_BGQD: Tensor) -> Tensor:
        if self.remainder == "none":
            return output_BHQD
        added = self.head_bias[:, None] if self.remainder == "head_bias" else _for_each_head(new_v_BGQD, output_BHQD)
        return (output_BHQD + remainder_BHQ[..., None] * added).to(output_BHQD.dtype)


class SoftmaxMixer(nn.Module):
    """Causal softmax or entmax attention, optionally with ALiBi, NAPE or FIRE.

    For RoPE, the caller rotates queries and keys; for SSMax and ASEntmax, it scales the queries.

    For forgetting attention, queries, keys and values have extra channels after those of the head, which hold the bias
    of the forget gates (`forgetting.layer.with_decay`). The output may then have extra channels too; the caller cuts
    them off.
    """

    def __init__(self, config: SbevalConfig) -> None:
        super().__init__()
        self.scale = config.attention_scale
        self.sliding_window = config.sliding_window
        self.context_parallel: ContextParallel | None = None
        self.head_dim = config.head_dim
        self.forgets = config.attention == "forgetting"
        self.entmax = config.attention_weights in WITH_ENTMAX
        self.skip_threshold: float | None = None
        self.bias = BIASED[config.attention](config.num_attention_heads) if config.attention in BIASED else None

    def forward(
        self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, positions: Positions, seq_start_B: Tensor | None
    ) -> Tensor:
        """Computes attention for a prefill or a training step, [B, H, Q, D]."""
        heads, context, places = (q_BHQD, k_BGKD, v_BGKD), self.context_parallel, positions.position_ids
        options: dict[str, Any] = {"scale": self.scale, "sliding_window": self.sliding_window, "bias": self.bias}
        attention = entmax_attention if self.entmax else softmax_attention
        if context is not None and context.active:

            def attend(chunk: slice, k: Tensor, v: Tensor) -> Tensor:
                return attention(q_BHQD[:, :, chunk], k, v, position_ids_BQ=places[:, chunk], **options)

            return torch.cat(context.with_all_keys(attend, k_BGKD, v_BGKD), dim=2)
        lengths = positions.packed_lengths
        if lengths is not None and len(lengths) > 1:
            if self.entmax:
                return text_by_text(*heads, lengths=lengths, position_ids=places, attention=attention, **options)
            return packed_softmax_attention(
                *heads, lengths, position_ids_1T=places, cu_seqlens=positions.cu_seqlens, **options
            )
        if self.forgets and seq_start_B is None:
            pruning: dict[str, Any] = {"sliding_window": self.sliding_window, "skip_threshold": self.skip_threshold}
            whole_BHQD = whole_text_attention(*heads, head_dim=self.head_dim, scale=self.scale, **pruning)
            if whole_BHQD is not None:
                return whole_BHQD
        return attention(*heads, seq_start_B=seq_start_B, position_ids_BQ=places, **options)

    @property
    def needs_key_positions(self) -> bool:
        """Whether the bias needs the positions of the keys, which a `SlotCache` does not store."""
        return self.bias is not None and (not isinstance(self.bias, AlibiBias) or self.sliding_window is not None)

    def step(self, q_BHQD: Tensor, v_BGQD: Tensor, slots: SlotCache, k_BGKD: Tensor, v_BGKD: Tensor) -> Tensor:
        """Computes one decode step, [B, H, Q, D]; with a sliding window, the slots hold only the keys inside it.

        Raises:
            ValueError: the bias needs the positions of the keys: it is not ALiBi, or there is a sliding window.
        """
        if self.needs_key_positions:
            window = "" if self.sliding_window is None else " with a sliding window"
            raise ValueError(
                f"{type(self.bias).__name__}{window} needs the positions of keys, which a SlotCache does not store: "
                "use another cache"
            )
        slope_H = self.bias.slopes_on(q_BHQD.device) if isinstance(self.bias, AlibiBias) else None
        decode = entmax_decode if self.entmax else softmax_decode
        return decode(q_BHQD, k_BGKD, v_BGKD, slots.length_B, scale=self.scale, slope_H=slope_H)


def _for_each_head(v_BGQD: Tensor, output_BHQD: Tensor) -> Tensor:
    return v_BGQD.repeat_interleave(output_BHQD.shape[1] // v_BGQD.shape[1], dim=1)


def minus_projection_on_value(output_BHQD: Tensor, v_BGQD: Tensor) -> Tensor:
    """Returns each head's output minus its projection on the same position's value vector, computed in fp32."""
    v_BHQD = _for_each_head(v_BGQD, output_BHQD)
    v_BHQD = v_BHQD.to(torch.promote_types(v_BHQD.dtype, torch.float32))
    share_BHQ1 = (output_BHQD * v_BHQD).sum(-1, keepdim=True) / v_BHQD.square().sum(-1, keepdim=True)
    return (output_BHQD - share_BHQ1 * v_BHQD).to(output_BHQD.dtype)


class Attention(nn.Module):
    """Multi-head attention of one decoder block, for all attention schemes of `SbevalConfig`."""

    def __init__(self, config: SbevalConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        width = config.hidden_size
        heads = config.num_attention_heads
        groups = config.num_key_value_heads
        query_width, key_width = heads * config.head_dim, groups * config.head_dim
        qkv_bias = "qkv" in config.bias
        self.q_proj = nn.Linear(width, query_width, bias=qkv_bias)
        self.k_proj = nn.Linear(width, key_width, bias=qkv_bias)
        self.v_proj = nn.Linear(width, key_width, bias=qkv_bias)
        self.o_proj = nn.Linear(query_width, width, bias="output" in config.bias)
        self.q_norm, self.k_norm = (make_qk_norm(config, count) for count in (heads, groups))
        self.output_norm = PerHeadRMSNorm(heads, config.head_dim, config.norm_eps) if config.output_norm else None
        self.key_shift = TokenShift(width, groups, bias=False) if config.key_shift else None
        self.value_shift = TokenShift(width, groups, bias=False) if config.value_shift else None
        self.forget_gate = ForgetGate(width, heads) if config.attention == "forgetting" else None
        self.reads_previous_position = bool(config.key_shift or config.value_shift or self.forget_gate)
        self.heads_per_group = heads // groups
        self.scale = config.attention_scale
        self.head_gate = nn.Linear(width, query_width, bias=qkv_bias) if config.attention_gate else None
        self.exclusive = config.exclusive_self_attention
        self.rotates = config.attention in ("rope", "forgetting")
        self.head_norm = HeadNorm(config) if config.head_norm else None
        self.query_scale = QueryScale(config) if config.attention_weights in SCALED else None
        mixer = StickBreakingMixer if config.attention == "stickbreaking" else SoftmaxMixer
        self.mixer: nn.Module = mixer(config)

    def forward(self, hidden_BQE: Tensor, positions: Positions, past_key_values: Cache | None) -> Tensor:
        """Returns the attention output after `o_proj`, [B, Q, E]."""
        heads = (*hidden_BQE.shape[:2], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q_BHQD, k_BGQD, v_BGQD = (project(hidden_BQE).view(heads).transpose(1, 2) for project in projections)
        older_keys: Tensor | None = None
        older_values: Tensor | None = None
        if self.reads_previous_position:
            older_keys, older_values = newest_cached(past_key_values, self.layer_index)
        unshifted_k, unshifted_v = k_BGQD, v_BGQD
        if self.key_shift is not None:
            k_BGQD = self.key_shift.shifted(k_BGQD, hidden_BQE, positions.position_ids, older_keys)
        if self.value_shift is not None:
            v_BGQD = self.value_shift.shifted(v_BGQD, hidden_BQE, positions.position_ids, older_values)
        if self.q_norm is not None and self.k_norm is not None:
            q_BHQD, k_BGQD = (
                norm(x.to(norm.weight.dtype)).to(v_BGQD.dtype)
                for norm, x in ((self.q_norm, q_BHQD), (self.k_norm, k_BGQD))
            )
        if self.query_scale is not None:
            q_BHQD = self.query_scale(q_BHQD, hidden_BQE, positions.position_ids)
        if self.rotates and positions.cos_sin is not None:
            q_BHQD, k_BGQD = rotate(q_BHQD, *positions.cos_sin), rotate(k_BGQD, *positions.cos_sin)
        new_v_BGQD = v_BGQD
        if self.forget_gate is not None:
            older = None if older_keys is None else sums_in(older_keys, self.head_dim, self.heads_per_group, self.scale)
            sums_BHQ = self.forget_gate.sums(hidden_BQE, positions, older)
            q_BHQD, k_BGQD, v_BGQD = with_decay(q_BHQD, k_BGQD, v_BGQD, sums_BHQ, self.scale)
        k_BGKD, v_BGKD = k_BGQD, v_BGQD
        seq_start_B = positions.seq_start
        if isinstance(past_key_values, SlotCache) and past_key_values.filling is None:
            k_BGKD, v_BGKD = past_key_values.update(k_BGQD, v_BGQD, self.layer_index)
            mixed_BHQD = self.mixer.step(q_BHQD, v_BGQD, past_key_values, k_BGKD, v_BGKD)  # type: ignore[operator]
            return self._projected(mixed_BHQD, new_v_BGQD, hidden_BQE)
        if past_key_values is not None:
            total_tokens = int(past_key_values.get_seq_length(self.layer_index)) + hidden_BQE.shape[1]
            # a token shift reads the unshifted key and value of the position before. After `cache.crop`, any
            # position can be the last, so the cache stores the unshifted ones of every position.
            cached_k = k_BGQD if self.key_shift is None else torch.cat([k_BGQD, unshifted_k], dim=-1)
            cached_v = v_BGQD if self.value_shift is None else torch.cat([v_BGQD, unshifted_v], dim=-1)
            k_BGKD, v_BGKD = past_key_values.update(cached_k, cached_v, self.layer_index)
            k_BGKD, v_BGKD = k_BGKD[..., : k_BGQD.shape[3]], v_BGKD[..., : v_BGQD.shape[3]]
            seq_start_B = positions.seq_start_from(total_tokens - k_BGKD.shape[2])
        if self.rotates and positions.extrapolated is not None:
            texts: dict[str, Any] = {"seq_start_B": seq_start_B, "lengths": positions.packed_lengths}
            mixed_BHQD = positions.extrapolated(q_BHQD, k_BGKD, v_BGKD, scale=self.scale, **texts)
        else:
            mixed_BHQD = self.mixer(q_BHQD, k_BGKD, v_BGKD, positions, seq_start_B)
        return self._projected(mixed_BHQD, new_v_BGQD, hidden_BQE)

    def _projected(self, mixed_BHQD: Tensor, new_v_BGQD: Tensor, hidden_BQE: Tensor) -> Tensor:
        mixed_BHQD = mixed_BHQD[..., : self.head_dim]
        if self.output_norm is not None:
            mixed_BHQD = self.output_norm(mixed_BHQD.to(self.output_norm.weight.dtype)).to(mixed_BHQD.dtype)
        if self.exclusive:
            mixed_BHQD = minus_projection_on_value(mixed_BHQD, new_v_BGQD)
        if self.head_gate is not None:
            gate_BHQD = self.head_gate(hidden_BQE).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            mixed_BHQD = mixed_BHQD * gate_BHQD.sigmoid()
        output = mixed_BHQD.transpose(1, 2).flatten(2)
        if self.head_norm is not None:
            output = self.head_norm(output)
        projected: Tensor = self.o_proj(output)
        return projected
