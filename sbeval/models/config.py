"""The configuration of sbeval models (`model_type: "sbeval"`)."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import GenerationConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sbeval.errors import UserError, brief
from sbeval.foreign_files import fits, kind_text
from sbeval.rope_parameters import any_factor_of_yarn, check_rope_values

ATTENTIONS = ("stickbreaking", "rope", "nope", "alibi", "nape", "fire", "forgetting")
ATTENTION_WEIGHTS = ("softmax", "ssmax", "entmax15", "asentmax")
WITH_ENTMAX = ("entmax15", "asentmax")
SCALED = ("ssmax", "asentmax")
_SCHEMES_OF_ALL_WEIGHTS = ("rope", "nope", "alibi", "nape")
REMAINDERS = ("none", "value", "head_bias")
NORMS = ("rmsnorm", "layernorm")
GATED_ACTIVATIONS = ("swiglu", "geglu")
PLAIN_ACTIVATIONS = ("gelu_tanh", "gelu", "silu", "relu")
BIASES = ("qkv", "output", "mlp")
_ACTIVATIONS = GATED_ACTIVATIONS + PLAIN_ACTIVATIONS
_CHOICES = {
    "attention": ATTENTIONS,
    "attention_weights": ATTENTION_WEIGHTS,
    "remainder": REMAINDERS,
    "norm": NORMS,
    "activation": _ACTIVATIONS,
}

# transformers reports `original_max_position_embeddings` as an unknown key of these types; here any type may have it
_ROPE_TYPES_WITHOUT_ORIGINAL_LENGTH = ("default", "linear", "dynamic")
_PARENT_KEYS = ("name", "sha256", "training_length_tokens")
_COUNTS = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    sliding_window num_experts num_experts_per_token shared_intermediate_size training_length_tokens
    max_position_embeddings
"""
LAYER_FIELDS = (
    "attention",
    "remainder",
    "head_norm",
    "intermediate_size",
    "num_experts",
    "num_experts_per_token",
    "shared_intermediate_size",
)
"""Fields that `layer_overrides` may set: those in which layers of public checkpoints differ.

Numbers of heads and head_dim are not among them, since a cache has one shape for all layers.
"""
_LOADING_KEYS = """
    model_type torch_dtype num_labels name_or_path _name_or_path _commit_hash auto_map output_attentions
    attn_implementation experts_implementation _attn_implementation_internal rope_scaling rope_theta quantization_config
    tokenizer_class task_specific_params transformers_weights tie_last_hidden_states sep_token_id decoder_start_token_id
"""
_TRANSFORMERS_KEYS = frozenset(
    [
        *(field.name for field in dataclasses.fields(PretrainedConfig)),
        *vars(GenerationConfig()),  # type: ignore[no-untyped-call]
        *_LOADING_KEYS.split(),
    ]
)


class SbevalConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """Configuration of a Llama-style decoder with stick-breaking attention or a softmax baseline.

    A key that is neither listed below nor known to transformers raises a `UserError`.

    Attributes:
        intermediate_size: hidden width of the MLP, or of each expert.
        num_key_value_heads: number of key/value heads, a divisor of the query heads; None means as many as query heads.
        head_dim: width of a head; None means hidden_size / num_attention_heads.
        attention: "stickbreaking", or softmax with "rope", "nope" (no positions), "alibi", "nape" (ALiBi in one half
            of the heads, no positions in the other), "fire" or "forgetting" (forget gates).
        attention_weights: how the logits of "rope", "nope", "alibi" and "nape" become weights: "softmax", "ssmax"
            (softmax of logits times s log n for n keys), "entmax15", or "asentmax" (entmax-1.5 of logits times
            1 + beta (log n)^gamma); s is learned, beta and gamma are projections of the layer's input.
        sliding_window: query j attends only to keys i with j - i < window (softmax schemes); None means all keys.
        remainder: term that is added to a head's output for the remainder, the attention weight that no key received:
            "none", "value" (remainder times the position's own value) or "head_bias" (remainder times a learned vector
            of the head).
        attention_gate: multiply each head's output by the sigmoid of a linear projection of the layer's input.
        exclusive_self_attention: subtract from each head's output its projection on the position's own value.
        attend_current: let a stick-breaking query attend to its own position.
        qk_norm: RMSNorm on the queries and keys of each head.
        qk_norm_per_head: use separate norm weights for each head.
        qk_norm_over_heads: take the mean square of each RMSNorm on queries and keys over all heads together, with
            separate weights for each head, as OLMo 2 does.
        qk_norm_eps: epsilon of the RMSNorms on queries and keys; None means `norm_eps`.
        key_shift: mix each key with the key of the previous position: s * previous + (1 - s) * key, where s is the
            sigmoid of a linear projection of the layer's input.
        value_shift: as `key_shift`, for values.
        output_norm: RMSNorm of each head's output with separate weights for each head, before any gate.
        head_norm: GroupNorm (one group for each head, eps 1e-5, affine) on the concatenated heads, before `o_proj`.
        bias: which linear layers have a bias, of "qkv", "output" and "mlp"; True means all, False none.
        activation: activation of the MLP: gated ("swiglu", "geglu") or plain ("gelu_tanh", "gelu", "silu", "relu").
        num_experts: number of experts in a mixture-of-experts layer; None means an ordinary MLP.
        num_experts_per_token: number of experts that the router chooses for each token.
        shared_intermediate_size: hidden width of a shared expert, which every token goes through; None means none.
        shared_expert_gating: multiply the shared expert's output by the sigmoid of a linear projection of the token.
        normalize_expert_weights: take the softmax over the logits of the chosen experts only; False: over those of all
            experts.
        balanced_experts: choose experts by probability plus a learned bias; the bias does not change their weights.
        layer_overrides: for each layer an object with the fields in which it differs (`LAYER_FIELDS`); None: no layer
            differs.
        attention_multiplier: factor of the attention logits; None means head_dim ** -0.5.
        embedding_multiplier: factor of the embeddings; None means 1.
        residual_multiplier: factor of attention and MLP outputs before they are added to the residual; None means 1.
        logits_divisor: divisor of the output logits; None means 1.
        rope_parameters: RoPE's base and scaling in transformers' form; used by "rope" and, optionally, "forgetting".
            None for all other schemes.
        training_length_tokens: longest context the weights were trained at; None if unknown.
        extended_from: name, sha256 and training_length_tokens of the checkpoint whose context was extended, or None.
        max_position_embeddings: read by other software; defaults to the training length, or 2048 if that is unknown.
    """

    model_type: ClassVar[str] = "sbeval"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2730
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    attention: str = "stickbreaking"
    attention_weights: str = "softmax"
    sliding_window: int | None = None
    remainder: str = "none"
    attend_current: bool = False
    attention_gate: bool = False
    exclusive_self_attention: bool = False
    qk_norm: bool = False
    qk_norm_per_head: bool = False
    qk_norm_over_heads: bool = False
    qk_norm_eps: float | None = None
    key_shift: bool = False
    value_shift: bool = False
    output_norm: bool = False
    head_norm: bool = False
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    bias: list[str] = False  # type: ignore[assignment]
    activation: str = "swiglu"
    num_experts: int | None = None
    num_experts_per_token: int | None = None
    shared_intermediate_size: int | None = None
    shared_expert_gating: bool = False
    normalize_expert_weights: bool = True
    balanced_experts: bool = False
    layer_overrides: list[dict[str, Any]] | None = None
    tie_word_embeddings: bool = False
    attention_multiplier: float | None = None
    embedding_multiplier: float | None = None
    residual_multiplier: float | None = None
    logits_divisor: float | None = None
    rope_parameters: dict[str, Any] | None = None
    training_length_tokens: int | None = None
    extended_from: dict[str, Any] | None = None
    max_position_embeddings: int | None = None
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if unknown := sorted(set(kwargs) - _TRANSFORMERS_KEYS):
            raise UserError(
                f"config.json of the sbeval model has unknown keys: {', '.join(unknown)}; remove them or correct their "
                "spelling"
            )
        self._check_types()
        if isinstance(self.bias, bool):
            self.bias = list(BIASES) if self.bias else []
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.head_dim is None:
            self.head_dim, rest = divmod(self.hidden_size, self.num_attention_heads)
            if rest:
                raise UserError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.num_attention_heads}; set head_dim"
                )
        if self.max_position_embeddings is None:
            self.max_position_embeddings = self.training_length_tokens or 2048
        rotates = "rope" in self.schemes or ("forgetting" in self.schemes and self.rope_parameters is not None)
        if self.rope_parameters is not None:
            self.set_rope_parameters(self.rope_parameters)
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        self._check_layers()
        if not rotates:
            self.rope_parameters = None
        for layer in range(self.num_hidden_layers if self.layer_overrides else 1):
            self.of_layer(layer)._check_combinations()

    @property
    def scheme(self) -> str:
        """Name of the attention scheme: `attention`, and `attention_weights` other than softmax, as "rope-ssmax".

        If layers differ, their schemes are joined by "+", as "stickbreaking+rope".
        """
        weights = "" if self.attention_weights == "softmax" else f"-{self.attention_weights}"
        return "+".join(scheme + weights for scheme in self.schemes)

    @property
    def schemes(self) -> list[str]:
        """Attention schemes of the layers, each once: `attention` first, then those of `layer_overrides`, sorted."""
        overrides = self.layer_overrides or []
        overriding = {fields.get("attention", self.attention) for fields in overrides} - {self.attention}
        return [self.attention, *sorted(overriding)]

    def of_layer(self, index: int) -> "SbevalConfig":
        """Returns the configuration of one layer: this one, with the fields that `layer_overrides` sets for it."""
        if not self.layer_overrides or not (overrides := self.layer_overrides[index]):
            return self
        layer = copy.copy(self)
        for name, value in overrides.items():
            setattr(layer, name, value)
        return layer

    def validate(self) -> None:
        """Runs transformers' checks before saving, without its warning about factors of YaRN."""
        with any_factor_of_yarn():
            super().validate()  # type: ignore[misc]

    def set_rope_parameters(self, rope_parameters: Mapping[str, Any]) -> None:
        """Sets RoPE's base and scaling; the argument has transformers' form."""
        check_rope_values(rope_parameters)
        self.rope_parameters = dict(rope_parameters)
        optional = rope_parameters.get("rope_type", "default") in _ROPE_TYPES_WITHOUT_ORIGINAL_LENGTH
        self.ignore_keys_at_rope_validation = {"original_max_position_embeddings"} if optional else set()

    @property
    def attention_scale(self) -> float:
        """Factor of the attention logits."""
        if self.attention_multiplier is not None:
            return float(self.attention_multiplier)
        return float(self.head_dim**-0.5)

    def _check_types(self) -> None:
        for name, hint in _FIELD_TYPES.items():
            value = getattr(self, name)
            if not fits(value, hint):
                kind = "a positive integer" if name in _COUNTS.split() else f"of type {kind_text(hint)}"
                raise UserError(f"{name} must be {kind}, got {brief(value)}")
            if name in _COUNTS.split() and value is not None and value < 1:
                raise UserError(f"{name} must be a positive integer, got {value}")
        for name in ("norm_eps", "initializer_range"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.logits_divisor == 0:
            raise UserError("logits_divisor must not be 0")

    def _check_layers(self) -> None:
        if self.layer_overrides is None:
            return
        if len(self.layer_overrides) != self.num_hidden_layers:
            raise UserError(
                f"layer_overrides must have one object for each of the {self.num_hidden_layers} layers, got "
                f"{len(self.layer_overrides)}"
            )
        for layer, overrides in enumerate(self.layer_overrides):
            if forbidden := sorted(set(overrides) - set(LAYER_FIELDS)):
                raise UserError(
                    f"layer {layer} may override only {', '.join(LAYER_FIELDS)}; remove {brief(forbidden[0])}"
                )
            self.of_layer(layer)._check_types()
        if unsupported := set(self.schemes[1:]) - {"stickbreaking", "rope", "nope"}:
            raise UserError(
                "layer_overrides may set attention to stickbreaking, rope or nope only, got "
                f"{brief(sorted(unsupported)[0])}"
            )

    def _check_combinations(self) -> None:
        for name, allowed in _CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise UserError(f"{name} must be one of {', '.join(allowed)}, got {brief(value)}")
        if not set(self.bias) <= set(BIASES):
            raise UserError(f"bias must be true, false or a list of {', '.join(BIASES)}, got {brief(self.bias)}")
        if self.attention == "stickbreaking" and self.sliding_window is not None:
            raise UserError(
                f"sliding_window is for the softmax schemes, got {self.sliding_window} with stick-breaking attention; "
                "remove it"
            )
        if self.attention != "stickbreaking" and (self.remainder != "none" or self.attend_current):
            raise UserError(
                "remainder and attend_current belong to stick-breaking attention, got "
                f"remainder={brief(self.remainder)}, attend_current={self.attend_current} with "
                f"attention={brief(self.attention)}"
            )
        if self.attention_weights != "softmax" and self.attention not in _SCHEMES_OF_ALL_WEIGHTS:
            raise UserError(
                f"attention_weights={brief(self.attention_weights)} needs attention to be one of "
                f"{', '.join(_SCHEMES_OF_ALL_WEIGHTS)}, got {brief(self.attention)}"
            )
        self._check_experts()
        if self.rope_parameters is not None:
            rope_type = self.rope_parameters.get("rope_type")
            if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
                known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
                raise UserError(f"rope_type must be one of {known}, got {brief(rope_type)}")
        if self.extended_from is not None and set(self.extended_from) != set(_PARENT_KEYS):
            raise UserError(
                f"extended_from must be null or an object with exactly {', '.join(_PARENT_KEYS)}, got "
                f"{brief(self.extended_from)}"
            )

    def _check_experts(self) -> None:
        if self.num_experts is None and (self.num_experts_per_token or self.shared_intermediate_size):
            raise UserError(
                "num_experts_per_token and shared_intermediate_size need a mixture of experts: set num_experts"
            )
        if self.num_experts is not None and not 1 <= (self.num_experts_per_token or 0) <= self.num_experts:
            raise UserError(
                f"num_experts_per_token must be at least 1 and at most num_experts {self.num_experts}, got "
                f"{self.num_experts_per_token}"
            )
        if self.balanced_experts and not self.normalize_expert_weights:
            raise UserError("balanced_experts=true needs normalize_expert_weights=true")
        if self.num_experts is not None and "mlp" in self.bias:
            raise UserError(f"experts have no bias, got bias={brief(self.bias)}; remove 'mlp' from it")


# types of arguments that `__post_init__` converts to the type of the field
_ARGUMENT_TYPES = {"num_key_value_heads": int | None, "head_dim": int | None, "bias": bool | list[str]}
_FIELD_TYPES = {
    name: kind for name, kind in SbevalConfig.__annotations__.items() if "ClassVar" not in str(kind)
} | _ARGUMENT_TYPES
