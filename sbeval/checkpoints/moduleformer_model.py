"""ModuleFormer (MoLM), for evaluation only: stick-breaking attention with experts as query and output projections.

Shape suffixes: B batch, L new positions, K cached and new positions, N = B * L tokens, E hidden_size, T chosen experts,
S = N * T rows sorted by expert, X experts, I width of an expert, H key/value heads (each shared by T query heads),
D head_dim.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, normalize
from transformers import Cache, DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from sbeval.attention import stickbreaking_attention
from sbeval.attention.api import Implementation
from sbeval.attn_implementation import sequence_starts
from sbeval.errors import UserError
from sbeval.models.attention import StickBreakingKernels
from sbeval.models.mlp import Assignment, Experts, activate


class ModuleFormerConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """Fields of a ModuleFormer configuration that evaluation needs, with names such as `hidden_size` for `n_embd`."""

    model_type: ClassVar[str] = "moduleformer"
    scheme: ClassVar[str] = "stickbreaking"

    vocab_size: int = 50295
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 8
    attention_width: int = 512
    mlp_width: int = 2048
    attention_experts: int = 32
    attention_chosen: int = 2
    mlp_experts: int = 32
    mlp_chosen: int = 2
    gate: str = "mlp"
    gate_width: int = 256
    activation: str = "gelu_tanh"
    max_position_embeddings: int | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        return self.attention_width // self.num_attention_heads


class Gate(nn.Module):
    """Router: takes the softmax over all experts and returns the largest probabilities without renormalising them."""

    def __init__(self, config: ModuleFormerConfig, experts: int, chosen: int) -> None:
        super().__init__()
        self.kind = config.gate
        self.chosen = chosen
        if config.gate == "mlp":
            self.hidden = nn.Linear(config.hidden_size, config.gate_width)
            self.output = nn.Linear(config.gate_width, experts, bias=False)
        elif config.gate == "linear":
            self.output = nn.Linear(config.hidden_size, experts, bias=False)
        else:
            self.hidden = nn.Linear(config.hidden_size, config.gate_width, bias=False)
            self.centroids = nn.Parameter(torch.empty(experts, config.gate_width))
            self.log_temperature = nn.Parameter(torch.empty(1))

    def forward(self, x_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Returns probabilities and indices of the chosen experts, [N, T] each."""
        if self.kind == "mlp":
            logits_NX = self.output(gelu(self.hidden(x_NE)))
        elif self.kind == "linear":
            logits_NX = self.output(x_NE)
        else:
            near_NX = normalize(self.hidden(x_NE), dim=-1) @ normalize(self.centroids, dim=-1).T
            logits_NX = near_NX * self.log_temperature.exp()
        probability_NT, index_NT = logits_NX.softmax(-1).topk(self.chosen, dim=-1)
        return probability_NT, index_NT


class Mixture(nn.Module):
    """A router, and for each expert an input and an output matrix."""

    def __init__(self, config: ModuleFormerConfig, experts: int, chosen: int, width: int) -> None:
        super().__init__()
        self.gate = Gate(config, experts, chosen)
        self.experts = Experts(experts, config.hidden_size, width)
        self.output_experts = Experts(experts, width, config.hidden_size)

    def enter(self, x_NE: Tensor) -> tuple[Tensor, Tensor, Assignment]:
        """Applies the chosen experts' input matrices; returns rows [S, width], probabilities [N, T], assignment."""
        probability_NT, index_NT = self.gate(x_NE)
        assigned = Assignment(index_NT, self.experts.weight.shape[0])
        return self.experts(x_NE[assigned.token_S], assigned.end_X), probability_NT, assigned

    def leave(self, x_SI: Tensor, probability_NT: Tensor, assigned: Assignment) -> Tensor:
        """Applies the output matrices; returns the sum of the experts' outputs weighted by probability, [N, E]."""
        return assigned.mixed(self.output_experts(x_SI, assigned.end_X), probability_NT)


class ModuleFormerAttention(nn.Module):
    """Stick-breaking attention in which each chosen expert projects its own queries; keys and values are shared."""

    def __init__(self, config: ModuleFormerConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.heads = config.num_attention_heads
        self.head_dim = config.attention_width // config.num_attention_heads
        self.q_proj = Mixture(config, config.attention_experts, config.attention_chosen, config.attention_width)
        self.k_proj = nn.Linear(config.hidden_size, config.attention_width)
        self.v_proj = nn.Linear(config.hidden_size, config.attention_width)
        self.kernels = StickBreakingKernels()

    def forward(self, hidden_BLE: Tensor, past_key_values: Cache | None, seq_start_B: Tensor | None) -> Tensor:
        """Returns [B, L, E]."""
        batch, new = hidden_BLE.shape[:2]
        q_SI, probability_NT, assigned = self.q_proj.enter(hidden_BLE.flatten(0, 1))
        # query heads that share a key/value head are adjacent: [B, L, T, H, D] to [B, H * T, L, D]
        q = assigned.by_token(q_SI).view(batch, new, -1, self.heads, self.head_dim).permute(0, 3, 2, 1, 4).flatten(1, 2)
        shape = (batch, new, self.heads, self.head_dim)
        k, v = (project(hidden_BLE).view(shape).transpose(1, 2) for project in (self.k_proj, self.v_proj))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_index)
        options = self.kernels._asdict()
        output, _ = stickbreaking_attention(q, k, v, attend_current=True, seq_start=seq_start_B, **options)
        output = output.view(batch, self.heads, -1, new, self.head_dim)
        mixed_NTI = output.permute(0, 3, 2, 1, 4).flatten(3).flatten(0, 1)
        return self.q_proj.leave(assigned.rows(mixed_NTI), probability_NT, assigned).view(hidden_BLE.shape)


class ModuleFormerBlock(nn.Module):
    """Pre-norm block: attention and a mixture of MLP experts, each after a LayerNorm."""

    def __init__(self, config: ModuleFormerConfig, layer_index: int) -> None:
        super().__init__()
        self.activation = config.activation
        self.ln_1 = nn.LayerNorm(config.hidden_size)
        self.attn = ModuleFormerAttention(config, layer_index)
        self.ln_2 = nn.LayerNorm(config.hidden_size)
        self.mlpf = Mixture(config, config.mlp_experts, config.mlp_chosen, config.mlp_width)

    def forward(self, hidden_BLE: Tensor, past_key_values: Cache | None, seq_start_B: Tensor | None) -> Tensor:
        """Returns [B, L, E]."""
        hidden_BLE = hidden_BLE + self.attn(self.ln_1(hidden_BLE), past_key_values, seq_start_B)
        inner_SI, probability_NT, assigned = self.mlpf.enter(self.ln_2(hidden_BLE).flatten(0, 1))
        mixed_NE = self.mlpf.leave(activate(self.activation, inner_SI), probability_NT, assigned)
        return hidden_BLE + mixed_NE.view(hidden_BLE.shape)


class ModuleFormerPreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Base class of `ModuleFormerModel` and `ModuleFormerForCausalLM`."""

    config_class = ModuleFormerConfig
    config: ModuleFormerConfig
    base_model_prefix = "model"
    _no_split_modules = ["ModuleFormerBlock"]  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing, since all weights come from a checkpoint."""


class ModuleFormerModel(ModuleFormerPreTrainedModel):  # type: ignore[no-untyped-call]
    """Token embedding, blocks and final norm."""

    def __init__(self, config: ModuleFormerConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList([ModuleFormerBlock(config, index) for index in range(config.num_hidden_layers)])
        self.ln_f = nn.LayerNorm(config.hidden_size)
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        """Returns the token embedding."""
        return self.wte

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Runs the blocks on tokens [B, L]; `attention_mask` may mark padding on the left only.

        `cache` is `past_key_values` by the name that transformers 5.24 introduced.
        """
        if use_cache is None:
            use_cache = self.config.use_cache
        if past_key_values is None:
            past_key_values = cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past = int(past_key_values.get_seq_length()) if past_key_values is not None else 0
        seq_start_B = sequence_starts(attention_mask, keys=past + input_ids.shape[1], has_past=past > 0)
        hidden = self.wte(input_ids)
        for block in self.h:
            hidden = block(hidden, past_key_values, seq_start_B)
        return BaseModelOutputWithPast(last_hidden_state=self.ln_f(hidden), past_key_values=past_key_values)


class ModuleFormerForCausalLM(ModuleFormerPreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """`ModuleFormerModel` with a language modelling head; cannot be saved."""

    def __init__(self, config: ModuleFormerConfig) -> None:
        super().__init__(config)
        self.model = ModuleFormerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., vocabulary] of hidden states [..., E]."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def set_kernels(self, impl: Implementation = "auto", skip_threshold: float | None = None) -> None:
        """Sets how attention is computed from now on; arguments as in `SbevalForCausalLM.set_kernels`."""
        for module in self.modules():
            if isinstance(module, ModuleFormerAttention):
                module.kernels = StickBreakingKernels(impl=impl, skip_threshold=skip_threshold)

    def forward(self, input_ids: Tensor, logits_to_keep: int | Tensor = 0, **kwargs: Any) -> CausalLMOutputWithPast:
        """Runs the model and the head; `logits_to_keep` is a number of last positions (0: all), or indices."""
        outputs = self.model(input_ids, **kwargs)
        positions_to_keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head_logits(outputs.last_hidden_state[:, positions_to_keep])
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Raises a `UserError`, since no reader exists for a saved model of this class."""
        raise UserError("ModuleFormer models are for evaluation only and cannot be converted or saved")
