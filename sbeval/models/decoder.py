"""The decoder as a transformers model: `DecoderBlock`, `SbevalModel`, and `SbevalForCausalLM` with the LM head.

Shape suffixes: B batch, L new positions, E hidden_size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from sbeval.attn_implementation import sequence_starts
from sbeval.errors import UserError
from sbeval.models.attention import Attention
from sbeval.models.config import SbevalConfig
from sbeval.models.extrapolation import ExtrapolatedAttention, Extrapolation
from sbeval.models.mlp import MLP, Mixture
from sbeval.models.norms import make_norm
from sbeval.models.positions import Positions
from sbeval.models.pretrained import SbevalPreTrainedModel
from sbeval.models.rope import RopeFrequencies, cos_sin
from sbeval.models.slots import SlotCache
from sbeval.rope_parameters import LENGTH_DEPENDENT


class DecoderBlock(GradientCheckpointingLayer):  # type: ignore[no-untyped-call]
    """Pre-norm decoder block: attention and MLP, each scaled by the residual multiplier before it is added."""

    def __init__(self, config: SbevalConfig, layer_index: int) -> None:
        super().__init__()
        self.residual_multiplier = config.residual_multiplier
        self.input_norm = make_norm(config)
        self.self_attn = Attention(config, layer_index)
        self.post_attention_norm = make_norm(config)
        self.mlp = MLP(config, config.intermediate_size) if config.num_experts is None else Mixture(config)

    def forward(self, hidden: Tensor, positions: Positions, past_key_values: Cache | None = None) -> Tensor:
        """Returns the residual stream after the block, [B, L, E]."""
        hidden = hidden + self._scaled(self.self_attn(self.input_norm(hidden), positions, past_key_values))
        return hidden + self._scaled(self.mlp(self.post_attention_norm(hidden)))

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.residual_multiplier is None else branch * self.residual_multiplier


class SbevalModel(SbevalPreTrainedModel):  # type: ignore[no-untyped-call]
    """Token embedding, decoder blocks and final norm."""

    def __init__(self, config: SbevalConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList([DecoderBlock(config.of_layer(index), index) for index in layers])
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        self.setting_rope_frequencies: RopeFrequencies | None = None
        self.current_extrapolation: Extrapolation | None = None
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        rope_frequencies: RopeFrequencies | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Runs the blocks.

        Args:
            input_ids: [B, L] new tokens, which follow the cached ones.
            attention_mask: [B, cached and new tokens], zero for padding, which must be on the left; None means no
                padding.
            position_ids: [B or 1, L] index of each token in its text; None counts from the first token that is not
                padding, or from the beginning of each packed text.
            past_key_values: KV cache, which is read and extended.
            inputs_embeds: [B, L, E] embeddings, passed in place of `input_ids`.
            use_cache: whether to return a cache; None means `config.use_cache`, and False in training mode.
            rope_frequencies: from `rope_frequencies_for`. None means the frequencies that the context manager
                `setting_rope_frequencies` has set, or without it those of the checkpoint.
            output_hidden_states: also return the residual stream before each block and the final state.
            cu_seqlens: int32 [n + 1] for n texts packed into one row, which do not see each other: `input_ids` is
                [1, T], and text s is tokens cu_seqlens[s] up to cu_seqlens[s + 1]. Cannot be combined with a cache or
                padding.
            cache: `past_key_values` by the name that transformers 5.24 introduced; `generate` looks for it here.
            kwargs: further arguments that transformers passes to every model; ignored.

        Raises:
            UserError: `output_attentions` is set, position ids decrease within a row, or RoPE frequencies that depend
                on the length would change for cached keys or differ between packed texts.
        """
        if past_key_values is None:
            past_key_values = cache
        if kwargs.get("output_attentions"):
            raise UserError(
                "output_attentions is not supported, since attention weights are never materialised; remove it"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past = int(past_key_values.get_seq_length()) if past_key_values is not None else 0
        if cu_seqlens is None:
            # a decode step with slots is captured in a CUDA graph, which allows no reading of values by the host
            no_check = isinstance(past_key_values, SlotCache)
            positions = self._positions(hidden, attention_mask, position_ids, past, no_check=no_check)
        elif attention_mask is not None or position_ids is not None or use_cache or past:
            raise ValueError(
                "cu_seqlens already determines positions and mask: pass no attention_mask, position_ids or cache"
            )
        else:
            positions = self._packed_positions(cu_seqlens)
        if self.config.rope_parameters is not None:
            frequencies = rope_frequencies or self.setting_rope_frequencies
            if frequencies is None:
                frequencies = self._checkpoint_frequencies(positions.packed_lengths, past, past + hidden.shape[1])
            positions = self._with_rope(positions, frequencies)
        if self.config.embedding_multiplier is not None:
            hidden = hidden * self.config.embedding_multiplier
        states = []
        for layer in self.layers:
            if output_hidden_states:
                states.append(hidden)
            hidden = layer(hidden, positions, past_key_values=past_key_values)
        hidden = self.norm(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*states, hidden) if output_hidden_states else None,
        )

    def _positions(
        self,
        hidden_BLE: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past: int,
        *,
        no_check: bool,
    ) -> Positions:
        new = hidden_BLE.shape[1]
        seq_start = sequence_starts(attention_mask, keys=past + new, has_past=past > 0)
        if position_ids is None:
            index = torch.arange(past, past + new, device=hidden_BLE.device)[None]
            position_ids = index if seq_start is None else (index - seq_start[:, None]).clamp_min(0)
        elif new > 1 and not no_check and bool((position_ids.diff(dim=-1) < 0).any()):
            raise UserError(
                "position_ids fall within a row, as for packed texts: pass cu_seqlens instead, the starts of the texts"
            )
        return Positions(position_ids=position_ids, seq_start=seq_start, cos_sin=None)

    def _packed_positions(self, cu_seqlens: Tensor) -> Positions:
        lengths = cu_seqlens.diff()
        starts_T = cu_seqlens[:-1].repeat_interleave(lengths)
        position_ids = (torch.arange(len(starts_T), device=cu_seqlens.device) - starts_T)[None]
        return Positions(position_ids, None, None, cu_seqlens=cu_seqlens, packed_lengths=tuple(lengths.tolist()))

    def _with_rope(self, positions: Positions, frequencies: RopeFrequencies) -> Positions:
        if self.current_extrapolation is not None:
            return positions._replace(extrapolated=ExtrapolatedAttention(self.current_extrapolation, frequencies))
        return positions._replace(cos_sin=cos_sin(frequencies, positions.position_ids))

    def _checkpoint_frequencies(
        self, packed_lengths: tuple[int, ...] | None, past: int, length: int
    ) -> RopeFrequencies:
        rope_type = (self.config.rope_parameters or {})["rope_type"]
        if packed_lengths is not None and rope_type in LENGTH_DEPENDENT:
            raise UserError(
                f"RoPE of type {rope_type!r} depends on the length of a text, and packed texts have several lengths; "
                "set one set of frequencies for all of them with setting_rope_frequencies"
            )
        frequencies = self.rope_frequencies_for(length if packed_lengths is None else max(packed_lengths))
        reused = past and rope_type in LENGTH_DEPENDENT
        if reused and not torch.equal(self.rope_frequencies_for(past).inv_freq, frequencies.inv_freq):
            raise UserError(
                f"RoPE of type {rope_type!r} depends on the length, and the cached keys were rotated for {past} "
                f"tokens, not {length}; pass rope_frequencies=model.rope_frequencies_for(length) to every call, where "
                "length counts the context and all new tokens"
            )
        return frequencies


class SbevalForCausalLM(SbevalPreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """`SbevalModel` with a language modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: SbevalConfig) -> None:
        super().__init__(config)
        self.model = SbevalModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., V] of hidden states [..., E], divided by `config.logits_divisor`."""
        logits: Tensor = self.lm_head(hidden)
        return logits if self.config.logits_divisor is None else logits / self.config.logits_divisor

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        rope_frequencies: RopeFrequencies | None = None,
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Runs the decoder and the LM head; arguments not described here are those of `SbevalModel.forward`.

        `labels` are [B, L] target tokens, shifted here; the loss ignores -100. `logits_to_keep` is the number of last
        positions to compute logits for (0 for all), or their indices. `kwargs` may hold `output_hidden_states`, and
        arguments of the loss such as the Trainer's `num_items_in_batch`.
        """
        if past_key_values is None:
            past_key_values = cache
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            rope_frequencies=rope_frequencies,
            cu_seqlens=cu_seqlens,
            output_hidden_states=kwargs.pop("output_hidden_states", None),
            output_attentions=kwargs.pop("output_attentions", None),
            return_dict=True,
        )
        positions_to_keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head_logits(outputs.last_hidden_state[:, positions_to_keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares the inputs of one step of `generate`.

        Raises:
            UserError: prompts are padded on the right.
        """
        attention_mask = kwargs.get("attention_mask")
        if attention_mask is not None and attention_mask.dim() == 2 and not bool(attention_mask[:, -1].all()):
            raise UserError(
                "prompts are padded on the right, but generation continues at the last position of each row: pad on "
                "the left (padding_side='left')"
            )
        return super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
