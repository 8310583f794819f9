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


def same_logits(found_BLV: Tensor, expected_BLV: Tensor) -> bool:
    """Whether logits are the same but for rounding; NaN and infinities count as equal where both are."""
    if found_BLV.shape != expected_BLV.shape:
        return False
    expected = expected_BLV.double()
    tolerance = 8 * torch.finfo(found_BLV.dtype).eps ** (1.0 if found_BLV.dtype.itemsize < 4 else 0.75)
    spread = expected.nan_to_num(posinf=0.0, neginf=0.0).abs().max()
    found = found_BLV.double().to(expected.device)
    return bool(torch.isclose(found, expected, rtol=0.0, atol=float(tolerance * spread), equal_nan=True).all())
