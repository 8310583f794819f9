"""The body of a causal language model, which computes hidden states, apart from what makes logits of them."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def body_returns(body: nn.Module, output: Any) -> Iterator[None]:
    """Within it a module hands out what is given, and computes nothing."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return output

    before = body.__dict__.get("forward")
    body.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del body.__dict__["forward"]
        else:
            body.__dict__["forward"] = before


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the Hugging Face model inside a PEFT wrapper, and any other model itself."""
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        inner: nn.Module = model.get_base_model()  # type: ignore[operator]
        return inner
    return model


def body_of(model: nn.Module) -> nn.Module | None:
    """Returns the part of a causal language model that ends in hidden states, None if it names none."""
    body = getattr(model, "base_model", None)
    return body if isinstance(body, nn.Module) and body is not model else None


def no_cache(module: nn.Module) -> dict[str, bool]:
    """Returns what makes a forward keep nothing of its input: most models keep it unless told, and some then fail."""
    parameters = inspect.signature(module.forward).parameters
    takes = "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {"use_cache": False} if takes else {}


def same_but_for_rounding(result: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are the same within the error of their dtype, relative to the largest finite value.

    NaN and infinities count as equal where both are.
    """
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    rounding = torch.finfo(expected.dtype).eps ** (1.0 if expected.dtype.itemsize < 4 else 0.75)
    wanted = expected.double()
    near = 8 * rounding * float(wanted.nan_to_num(posinf=0.0, neginf=0.0).abs().max())
    return torch.allclose(result.double().to(wanted.device), wanted, rtol=0.0, atol=near, equal_nan=True)
