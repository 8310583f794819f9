"""Base class of the sbeval models: loading, weight initialisation, choice of kernels, RoPE frequencies."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from sbeval.attention.api import Implementation
from sbeval.attention.context_parallel import ContextParallel
from sbeval.errors import UserError
from sbeval.models.attention import SoftmaxMixer, StickBreakingKernels, StickBreakingMixer
from sbeval.models.biases import FIRE_INITIAL_SCALE, FireBias
from sbeval.models.config import SbevalConfig
from sbeval.models.entmax.scales import SSMaxScale
from sbeval.models.mlp import Experts, Mixture
from sbeval.models.norms import HeadNorm, PerHeadRMSNorm
from sbeval.models.rope import RopeFrequencies, rope_frequencies, scaled_parameters


class SbevalPreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Base class of `SbevalModel` and `SbevalForCausalLM`."""

    config_class = SbevalConfig
    config: SbevalConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["DecoderBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Loads a checkpoint as transformers does, but from safetensors files only.

        Raises:
            UserError: `use_safetensors=False` is passed.
        """
        if kwargs.get("use_safetensors") is False:
            raise UserError("checkpoints of sbeval models are safetensors files; remove use_safetensors=False")
        kwargs["use_safetensors"] = True
        return super().from_pretrained(*args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding | Experts):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, Mixture) and module.balance is not None:
            init.zeros_(module.balance)
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm | HeadNorm | PerHeadRMSNorm):
            init.ones_(module.weight)
            if not isinstance(module, nn.RMSNorm | PerHeadRMSNorm):
                init.zeros_(module.bias)
        elif isinstance(module, StickBreakingMixer) and module.remainder == "head_bias":
            init.zeros_(module.head_bias)
        elif isinstance(module, SSMaxScale):
            init.constant_(module.multiple, module.initial_multiple)
        elif isinstance(module, FireBias):
            init.constant_(module.scale, FIRE_INITIAL_SCALE)
            init.ones_(module.threshold_multiple)
            # PyTorch's default initialisation. With small weights and zero biases, every ReLU unit would be linear on
            # the inputs in [0, 1], and the half with negative weights would be dead for good
            for layer in (module.hidden, module.output):
                bound = layer.in_features**-0.5
                init.uniform_(layer.weight, -bound, bound)
                init.uniform_(layer.bias, -bound, bound)

    def set_kernels(self, impl: Implementation = "auto", skip_threshold: float | None = None) -> None:
        """Sets how stick-breaking or forgetting attention is computed from now on; this is never saved.

        Args:
            impl: implementation of stick-breaking attention; forgetting attention supports "auto" only.
            skip_threshold: None computes every key. For stick-breaking attention: older keys are skipped once the
                weight that newer keys leave for them is below this value. For forgetting attention: keys are skipped as
                long as outputs change by at most this share of the largest value.

        Raises:
            UserError: a choice other than the default is made, and the model has no such attention or implementation.
        """
        kernels = StickBreakingKernels(impl=impl, skip_threshold=skip_threshold)
        is_forgetting = "forgetting" in self.config.schemes and impl == "auto"
        if not is_forgetting and "stickbreaking" not in self.config.schemes and kernels != StickBreakingKernels():
            raise UserError(
                f"impl={impl!r} and skip_threshold={skip_threshold} do not apply to attention={self.config.scheme!r}: "
                "impl is for stick-breaking attention, skip_threshold for stick-breaking and forgetting attention"
            )
        for module in self.modules():
            if isinstance(module, StickBreakingMixer):
                module.kernels = kernels
            elif isinstance(module, SoftmaxMixer) and module.forgets:
                module.skip_threshold = skip_threshold

    def set_context_parallel(self, context: ContextParallel | None) -> None:
        """Sets the ranks that share the tokens of one sequence (context parallelism); None switches it off.

        Inside `context.shared()`, each rank's forward pass takes its own tokens of the sequence and their
        `position_ids`, and no cache.
        """
        for module in self.modules():
            if isinstance(module, StickBreakingMixer | SoftmaxMixer):
                module.context_parallel = context

    def rope_frequencies_for(
        self, length_tokens: int, scaling: Mapping[str, Any] | None = None, *, original_length_tokens: int | None = None
    ) -> RopeFrequencies:
        """Returns the RoPE frequencies for one request; pass them to `forward` or `generate` as `rope_frequencies`.

        The arguments are those of `sbeval.models.rope.setting_rope_frequencies`.

        Raises:
            UserError: the model has no rotary embeddings.
        """
        if (rope := self.config.rope_parameters) is None:
            raise UserError(f"RoPE scaling needs a model with RoPE, this one has attention={self.config.scheme!r}")
        original = (
            original_length_tokens
            or rope.get("original_max_position_embeddings")
            or self.config.training_length_tokens
            or self.config.max_position_embeddings
        )
        assert original is not None
        return rope_frequencies(
            scaled_parameters(rope, scaling),
            head_dim=self.config.head_dim,
            original_length_tokens=original,
            length_tokens=length_tokens,
            max_position_embeddings=self.config.max_position_embeddings,
        )
