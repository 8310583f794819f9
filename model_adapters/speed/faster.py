"""Makes a loaded model faster on a GPU without changing what it computes, and checks that on a short input."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from sbeval.model_adapters.speed.attention import fuse_long_attention, fuse_rotations
from sbeval.model_adapters.speed.linear import AlignedLinear, align_linears
from sbeval.model_adapters.speed.parts import fuse_mlps, fuse_norms
from sbeval.model_adapters.speed.plan import give_back_sums, sum_quickly
from sbeval.model_adapters.speed.replacing import give_back_forwards
from sbeval.scoring.body import no_cache, same_but_for_rounding

logger = logging.getLogger(__name__)

_SAMPLE_TOKENS = 16
_ROUNDED_EPS = 10


@torch.no_grad()
def make_faster(model: nn.Module) -> bool:
    """Pads unaligned linear maps, fuses norms, MLPs and rotations, and lets attention choose a kernel for long texts.

    Returns whether anything was replaced for good: a model that then differs gets its own parts back.
    """
    if (expected := _logits(model)) is None:
        return False
    sums = sum_quickly(model)
    norms = fuse_norms(model)
    aligned = align_linears(model)
    mlps = fuse_mlps(model)
    rotations = fuse_rotations(model)
    attentions = fuse_long_attention(model)  # after the rotations, whose copies it copies
    if not (sums or norms or aligned or mlps or rotations or attentions):
        return False
    if (found := _logits(model)) is not None and _near(found, expected):
        return True
    give_back_sums(sums)
    give_back_forwards([*rotations, *attentions])
    for name, module in {**mlps, **norms}.items():
        model.set_submodule(name, module)
    for name, module in list(model.named_modules()):
        if isinstance(module, AlignedLinear):
            model.set_submodule(name, module.plain())
    logger.warning("%s is run as it is: with padded and fused parts it differs", type(model).__name__)
    return False


def _near(logits: Tensor, expected: Tensor) -> bool:
    """Whether logits are the same but for rounding, which 32 layers with random weights blow up to 7 eps of all.

    An MLP that is left out is 11.
    """
    if same_but_for_rounding(logits, expected):
        return True
    if logits.shape != expected.shape or logits.dtype != expected.dtype:
        return False
    error, spread = (x.float().square().mean().sqrt() for x in (logits - expected, expected))
    return bool(error <= _ROUNDED_EPS * torch.finfo(expected.dtype).eps * spread)


def _logits(model: Any) -> Tensor | None:
    tokens = torch.arange(_SAMPLE_TOKENS, device=model.device)[None] % model.config.get_text_config().vocab_size
    try:
        logits: Tensor = model(input_ids=tokens, **no_cache(model)).logits
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError):
        return None
    return logits
