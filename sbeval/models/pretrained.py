"""What both classes of the family share: loading, initial weights, kernels, and RoPE's frequencies."""

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
from sbeval.models.mlp import Experts, Mixture
from sbeval.models.norms import HeadNorm, OwnHeadsNorm
from sbeval.models.rope import RopeFrequencies, rope_frequencies, scaled_parameters


class SbevalPreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Loading, saving and initial weights of the family."""

    config_class = SbevalConfig
    config: SbevalConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["DecoderBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Loads a checkpoint as transformers does, from safetensors files only."""
        if kwargs.get("use_safetensors") is False:
            raise UserError("checkpoints of this family are safetensors files; remove use_safetensors=False")
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
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm | HeadNorm | OwnHeadsNorm):
            init.ones_(module.weight)
            if not isinstance(module, nn.RMSNorm | OwnHeadsNorm):
                init.zeros_(module.bias)
        elif isinstance(module, StickBreakingMixer) and module.remainder == "head_bias":
            init.zeros_(module.head_bias)
        elif isinstance(module, FireBias):
            init.constant_(module.scale, FIRE_INITIAL_SCALE)
            init.ones_(module.threshold_multiple)
            # PyTorch's own: with small weights and no biases every unit is a line through 0 on the shares in [0, 1],
            # and half of them are dead for good
            for layer in (module.hidden, module.output):
                bound = layer.in_features**-0.5
                init.uniform_(layer.weight, -bound, bound)
                init.uniform_(layer.bias, -bound, bound)

    def set_kernels(self, impl: Implementation = "auto", skip_threshold: float | None = None) -> None:
        """Chooses how stick-breaking or forgetting attention is computed from now on; nothing of it is saved.

        Forgetting attention takes `impl` "auto" alone. `skip_threshold` is the stick below which older keys are
        skipped, or the largest change of its outputs by skipped keys, as a share of the largest value.

        Raises:
            UserError: the model has neither, or no such kernels, and something other than the default was asked for.
        """
        kernels = StickBreakingKernels(impl=impl, skip_threshold=skip_threshold)
        forgets = "forgetting" in self.config.schemes and impl == "auto"
        if not forgets and "stickbreaking" not in self.config.schemes and kernels != StickBreakingKernels():
            raise UserError(
                "kernels can be chosen for stick-breaking attention, and skip_threshold for forgetting as well, got "
                f"impl={impl!r} and skip_threshold={skip_threshold} for a model with attention={self.config.scheme!r}"
            )
        for module in self.modules():
            if isinstance(module, StickBreakingMixer):
                module.kernels = kernels
            elif isinstance(module, SoftmaxMixer) and module.forgets:
                module.skip_threshold = skip_threshold

    def set_context_parallel(self, context: ContextParallel | None) -> None:
        """Chooses the processes that attend to one sequence together, within `context.shared()`; None for none.

        There, a forward pass takes this process's tokens of the sequence with their `position_ids`, without a cache.
        """
        for module in self.modules():
            if isinstance(module, StickBreakingMixer | SoftmaxMixer):
                module.context_parallel = context

    def rope_frequencies_for(
        self, length_tokens: int, scaling: Mapping[str, Any] | None = None, *, original_length_tokens: int | None = None
    ) -> RopeFrequencies:
        """Returns the frequencies for a request, to be passed to `forward` or `generate` as `rope_frequencies`.

        The arguments are those of `held_rope_frequencies`.

        Raises:
            UserError: the model has no rotary embeddings.
        """
        if (rope := self.config.rope_parameters) is None:
            raise UserError(f"RoPE scaling needs a model with RoPE, got attention={self.config.scheme!r}")
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
