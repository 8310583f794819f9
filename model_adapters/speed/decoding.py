"""PyTorch's attention while tokens are generated one by one.

cuDNN's attention, PyTorch's first choice on recent GPUs, makes a plan for every length of the keys it has not met yet.
For a long text that is nothing; for a new token it takes longer than the rest of the model.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

MOST_NEW_TOKENS = 16


@contextlib.contextmanager
def steps_without_plans(model: nn.Module) -> Iterator[None]:
    """Within it, calls of `model` on a few new tokens do without cuDNN's attention; calls on more, a prompt, use it."""
    before: list[bool] = []
    allowed = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    called: nn.Module = getattr(model, "get_base_model", lambda: model)()  # PEFT hands generation on to it

    def enter(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        before.append(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
        new = arguments[0] if arguments else keywords.get("input_ids")
        if isinstance(new, torch.Tensor) and new.shape[-1] <= MOST_NEW_TOKENS:
            torch.backends.cuda.enable_cudnn_sdp(False)

    def leave(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        torch.backends.cuda.enable_cudnn_sdp(before.pop())

    handles = [
        called.register_forward_pre_hook(enter, with_kwargs=True),
        called.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        torch.backends.cuda.enable_cudnn_sdp(allowed)  # after an interrupted step too
