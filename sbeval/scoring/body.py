"""The body of a causal language model: the module that computes hidden states, without the head that makes logits."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

_RENAMED = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters


@contextmanager
def body_returns(body: nn.Module, output: Any) -> Iterator[None]:
    """Inside this context, `body.forward` is monkey-patched to return `output` without computing anything."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return output

    original_forward = body.__dict__.get("forward")
    body.__dict__["forward"] = forward
    try:
        yield
    finally:
        if original_forward is None:
            del body.__dict__["forward"]
        else:
            body.__dict__["forward"] = original_forward


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the Hugging Face model inside a PEFT wrapper; any other model is returned unchanged."""
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        inner: nn.Module = model.get_base_model()  # type: ignore[operator]
        return inner
    return model


def body_of(model: nn.Module) -> nn.Module | None:
    """Returns the module that computes a causal language model's hidden states (`base_model`), or None."""
    body = getattr(model, "base_model", None)
    return body if isinstance(body, nn.Module) and body is not model else None


def no_cache(module: nn.Module) -> dict[str, bool]:
    """Returns forward arguments that switch the KV cache off: most models fill one by default, and some then fail."""
    parameters = inspect.signature(module.forward).parameters
    takes = "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {"use_cache": False} if takes else {}


def cache_argument(module: nn.Module) -> str:
    """Returns the name of the argument for the KV cache: transformers 5.24 renamed `past_key_values`.

    The models of this project have arguments of both names; `generate` knows the one of its version.
    """
    names = inspect.signature(module.forward).parameters
    if "cache" in names and "past_key_values" in names:
        return "cache" if _RENAMED else "past_key_values"
    return "cache" if "cache" in names else "past_key_values"


def same_but_for_rounding(result: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal up to their dtype's rounding error, relative to the largest finite value.

    NaN equals NaN, and an infinity equals the same infinity.
    """
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    rounding = torch.finfo(expected.dtype).eps ** (1.0 if expected.dtype.itemsize < 4 else 0.75)
    expected = expected.double()
    tolerance = 8 * rounding * float(expected.nan_to_num(posinf=0.0, neginf=0.0).abs().max())
    return torch.allclose(result.double().to(expected.device), expected, rtol=0.0, atol=tolerance, equal_nan=True)
