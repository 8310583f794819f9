"""RoPE's frequencies and the method of extrapolation for each request."""

import contextlib
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from torch import nn

from sbeval.checkpoints import text_config
from sbeval.checkpoints.facts import training_length_tokens
from sbeval.errors import UserError
from sbeval.model_adapters.rope.extrapolation import Changes, extrapolating, held
from sbeval.models.extrapolation import Extrapolation
from sbeval.models.rope import LENGTH_DEPENDENT, held_rope_frequencies

GLOBAL_LAYERS = "full_attention"


class RequestRope:
    """The RoPE scaling and the extrapolation of a run.

    Args:
        model: the model that is run.
        scaling: from `parse_rope_scaling`; None leaves the checkpoint's own.
        original_length_tokens: training length before any scaling, None takes the checkpoint's.
        extrapolation: from `parse_extrapolation`; None attends as the model does.

    Raises:
        UserError: a scaling or a method is given and the model has no rotary embeddings it could be applied to, or the
            method's numbers do not suit the training length.

    Attributes:
        extrapolation: the method requests run with, None where there is none.
        in_force: the scaling requests run with, given or the checkpoint's own; None where there is none.
        by_length: the frequencies depend on the request's length, so that a batch holds one length only.
    """

    def __init__(
        self,
        model: nn.Module,
        scaling: Mapping[str, Any] | None,
        original_length_tokens: int | None,
        extrapolation: Extrapolation | Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(extrapolation, Mapping):  # LongRoPE's factors
            if scaling is not None:
                raise UserError(
                    "Expected extrapolation=longrope without rope_scaling, which it is, found both: remove one of them "
                    "from --model_args."
                )
            scaling, extrapolation = extrapolation, None
        self._model = model
        self._scaling = scaling
        self._original_length_tokens = original_length_tokens
        self.in_force = dict(scaling) if scaling is not None else _own_scaling(model)
        self.by_length = self.in_force is not None and self.in_force.get("rope_type") in LENGTH_DEPENDENT
        self._changes: Changes = []
        if scaling is not None:
            with self.hold(1):
                pass

        self.extrapolation: Extrapolation | None = None
        if extrapolation is not None:
            length_tokens = original_length_tokens or training_length_tokens(getattr(model, "config", None))
            self.extrapolation = extrapolation.trained_at(length_tokens)
            self._changes = extrapolating(model, self.extrapolation)

    def frequencies(self, length_tokens: int) -> Hashable:
        """Returns what is the same for requests of two lengths where their frequencies are."""
        if not self.by_length:
            return None
        original = self._original_length_tokens
        with held_rope_frequencies(
            self._model, length_tokens, self._scaling, original_length_tokens=original
        ) as frequencies:
            return tuple((each.inv_freq.cpu().numpy().tobytes(), each.attention_factor) for each in frequencies)

    @contextlib.contextmanager
    def hold(self, length_tokens: int) -> Iterator[None]:
        """Applies, until the block ends, what a request of this length needs; tokens it may generate count."""
        with contextlib.ExitStack() as stack:
            if self._scaling is not None or self.by_length:
                original = self._original_length_tokens
                stack.enter_context(
                    held_rope_frequencies(self._model, length_tokens, self._scaling, original_length_tokens=original)
                )
            stack.enter_context(held(self._changes))
            yield


def _own_scaling(model: nn.Module) -> dict[str, Any] | None:
    parameters = getattr(text_config(getattr(model, "config", None)), "rope_parameters", None) or {}
    parameters = parameters.get(GLOBAL_LAYERS, parameters) or {}
    scaled = parameters.get("rope_type", "default") != "default"
    return dict(parameters) if scaled else None
