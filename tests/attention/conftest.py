"""What all tests of the operation share.

Memory that nobody wrote to is NaN, or the largest integer, in every test that is not compiled. Tiles come by the copy
engine, where a GPU has one, in problems however small.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sbeval.attention.impl.triton import forward


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


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that small problems have several, in PyTorch's implementation."""
    monkeypatch.setattr("sbeval.attention.impl.tiles.TILE_ROWS", 16)
    monkeypatch.setattr("sbeval.attention.impl.tiles.TILE_LOGITS", 512)


@pytest.fixture(autouse=True)
def tiles_by_the_copy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "FEWEST_PAIRS_TO_COPY", 0)
