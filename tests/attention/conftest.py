"""Memory that nobody wrote to is NaN, or the largest integer, in every test of the operation that is not compiled."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def poisoned_allocations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.name == "test_compile.py":
        return

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args: object, **options: object) -> Tensor:
            tensor = allocate(*args, **options)
            if tensor.is_floating_point():
                return tensor.fill_(torch.nan)
            return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)

        return wrapper

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
