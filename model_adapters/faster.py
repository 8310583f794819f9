"""Makes a loaded model faster on a GPU without changing what it computes, and checks that on a short input."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from sbeval.model_adapters.aligned_linear import AlignedLinear, align_linears
from sbeval.model_adapters.fused_norm import fuse_norms

logger = logging.getLogger(__name__)

_SAMPLE_TOKENS = 16


@torch.no_grad()
def make_faster(model: nn.Module) -> bool:
    """Pads unaligned linear maps and fuses norms; a model that then differs gets its own parts back.

    Args:
        model: a causal language model where it will run.

    Returns:
        Whether anything was replaced for good.
    """
    expected = _logits(model)
    if expected is None:
        return False
    norms = fuse_norms(model)
    if not align_linears(model) and not norms:
        return False
    found = _logits(model)
    if found is not None and _same(found, expected):
        return True
    for name, module in list(model.named_modules()):
        if isinstance(module, AlignedLinear):
            model.set_submodule(name, module.plain())
    for name, norm in norms.items():
        model.set_submodule(name, norm)
    logger.warning("%s is run as it is: with padded linear maps and fused norms it differs", type(model).__name__)
    return False


def _same(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    # as `sbeval.scoring` compares a model's two halves with the whole
    rounding = torch.finfo(expected.dtype).eps ** (1.0 if expected.dtype.itemsize < 4 else 0.75)
    near = 8 * rounding * float(expected.nan_to_num().abs().max())
    return torch.allclose(found.double(), expected.double(), rtol=0.0, atol=near, equal_nan=True)


def _logits(model: Any) -> Tensor | None:
    tokens = torch.arange(_SAMPLE_TOKENS, device=model.device)[None] % model.config.get_text_config().vocab_size
    try:
        logits: Tensor = model(input_ids=tokens).logits
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    return logits
