"""RoPE's frequencies for each request: set from its length alone, and gone when it is done."""

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from sbeval.checkpoints.facts import text_config
from sbeval.models.rope import LENGTH_DEPENDENT
from sbeval.models.rope_scaling import held_rope_frequencies

GLOBAL_LAYERS = "full_attention"


class RequestRope:
    """The RoPE scaling of a run.

    Args:
        model: the model that is run.
        scaling: from `parse_rope_scaling`; None leaves the checkpoint's own.
        original_length_tokens: training length before any scaling, None takes the checkpoint's.

    Raises:
        UserError: a scaling is given and the model has no rotary embeddings it could be applied to.

    Attributes:
        in_force: the scaling requests run with, given or the checkpoint's own; None where there is none.
        by_length: the frequencies depend on the request's length, so that a batch holds one length only.
    """

    def __init__(self, model: nn.Module, scaling: Mapping[str, Any] | None, original_length_tokens: int | None) -> None:
        self._model = model
        self._scaling = scaling
        self._original_length_tokens = original_length_tokens
        self.in_force = dict(scaling) if scaling is not None else _own_scaling(model)
        self.by_length = self.in_force is not None and self.in_force.get("rope_type") in LENGTH_DEPENDENT
        if scaling is not None:
            with self.hold(1):
                pass

    def hold(self, length_tokens: int) -> contextlib.AbstractContextManager[None]:
        """Holds the frequencies of a request of this length, with all tokens it may generate, until the block ends."""
        if self._scaling is None and not self.by_length:
            return contextlib.nullcontext()
        return held_rope_frequencies(
            self._model, length_tokens, self._scaling, original_length_tokens=self._original_length_tokens
        )


def _own_scaling(model: nn.Module) -> dict[str, Any] | None:
    parameters = getattr(text_config(getattr(model, "config", None)), "rope_parameters", None) or {}
    parameters = parameters.get(GLOBAL_LAYERS, parameters) or {}
    scaled = parameters.get("rope_type", "default") != "default"
    return dict(parameters) if scaled else None
