"""RoPE scaling held for one request, for this family and for Hugging Face models alike.

transformers keeps scaled frequencies in its modules, where they depend on whatever ran before and on
`max_position_embeddings`. Here they are computed from the original training length and the request's length, put in
place for the length of a `with` block, and taken out again.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from sbeval.errors import UserError
from sbeval.models.decoder import SbevalModel
from sbeval.models.rope import RopeFrequencies, rope_frequencies

_GLOBAL_LAYERS = "full_attention"


@contextmanager
def held_rope_frequencies(
    model: nn.Module,
    length_tokens: int,
    scaling: Mapping[str, Any] | None = None,
    *,
    original_length_tokens: int | None = None,
) -> Iterator[list[RopeFrequencies]]:
    """Holds a request's RoPE frequencies in `model` until the block ends: scoring, prefill and decoding alike.

    Models that rotate some layers differently (Gemma 3's windowed layers) are scaled in the others alone.

    Args:
        model: a model of this family or any transformers model.
        length_tokens: the request's context length with all tokens it may generate, without padding.
        scaling: from `parse_rope_scaling`; None holds the checkpoint's own, which matters where that depends on the
            length. `rope_theta` and a partial rotation stay the checkpoint's unless the scaling names them.
        original_length_tokens: training length before any scaling; None takes the checkpoint's.

    Yields:
        The frequencies, one for each module that has its own.

    Raises:
        UserError: there is a scaling but no rotary embedding, or one that is computed in a way not known here.
    """
    found: list[RopeFrequencies] = []
    with ExitStack() as held:
        for module in model.modules():
            if isinstance(module, SbevalModel) and module.config.rope_parameters is not None:
                own = module.rope_frequencies_for(length_tokens, scaling, original_length_tokens=original_length_tokens)
                held.enter_context(_attributes(module, {"held_rope_frequencies": own}))
                found.append(own)
            elif hasattr(module, "rope_type") and hasattr(module, "config"):
                scaled, changed = _scaled_module(module, length_tokens, scaling, original_length_tokens)
                held.enter_context(_attributes(module, changed))
                found.append(scaled)
        if scaling is not None and not found:
            raise UserError(f"rope_scaling needs a model with rotary embeddings; {type(model).__name__} has none")
        yield found


def _scaled_module(
    module: Any, length_tokens: int, scaling: Mapping[str, Any] | None, original_length_tokens: int | None
) -> tuple[RopeFrequencies, dict[str, Any]]:
    """Returns a request's frequencies, and the attributes with which a rotary module of transformers gives them."""
    own = module.config.rope_parameters
    nested = isinstance(module.rope_type, dict)
    prefix = f"{_GLOBAL_LAYERS}_" if nested else ""
    if nested:
        own = own.get(_GLOBAL_LAYERS)
    before = getattr(module, f"{prefix}original_inv_freq", None)
    config = module.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    longest = int(config.max_position_embeddings)
    original = original_length_tokens or (own or {}).get("original_max_position_embeddings") or longest

    def frequencies(parameters: Mapping[str, Any], original: int, length: int) -> RopeFrequencies:
        return rope_frequencies(
            parameters,
            head_dim=head_dim,
            original_length_tokens=original,
            length_tokens=length,
            max_position_embeddings=longest,
        )

    known = False
    if own is not None and before is not None:
        expected = frequencies(own, longest, 1).inv_freq
        tolerance = 1e-5 if before.dtype == torch.float32 else 1e-2
        known = before.shape == expected.shape and torch.allclose(before.float().cpu(), expected, rtol=tolerance)
    if not known:
        raise UserError(
            f"RoPE scaling at evaluation time is not known for {type(module).__name__}, whose frequencies do not "
            "follow its rope_parameters; leave rope_scaling out"
        )
    base = {key: own[key] for key in ("rope_theta", "partial_rotary_factor") if key in own}
    scaled = frequencies(own if scaling is None else {**base, **scaling}, original, length_tokens)
    device = getattr(module, f"{prefix}inv_freq").device
    return scaled, {
        f"{prefix}inv_freq": scaled.inv_freq.to(device),
        f"{prefix}attention_scaling": scaled.attention_factor,
        # what transformers updates by itself it leaves alone under this name
        "rope_type": {**module.rope_type, _GLOBAL_LAYERS: "default"} if nested else "default",
    }


@contextmanager
def _attributes(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
