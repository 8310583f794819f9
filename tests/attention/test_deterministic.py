"""`torch.use_deterministic_algorithms`: the backward pass without atomic additions."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_problems import (
    DEVICE,
    assert_kernels_within_budget,
    deterministic,
    outputs_and_gradients,
    problem,
    relative_error,
)

from tests.marks import exhaustive

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "current": {"attend_current": True},
    "padded": {"seq_start": torch.tensor([0, 31], dtype=torch.int64, device=DEVICE)},
    "packed": {"cu_seqlens": torch.tensor([0, 7, 7, 50, 70], dtype=torch.int32, device=DEVICE)},
}
SHAPES = [
    pytest.param({"queries": 1}, id="1"),
    pytest.param({"queries": 33, "batch": 2, "heads": 2, "groups": 1, "head_dim": 50}, id="33-grouped-dim50"),
    pytest.param({"queries": 5, "keys": 200, "head_dim": 80}, id="5of200-dim80"),
    pytest.param({"queries": 40, "keys": 50, "head_dim": 256}, id="40of50-dim256"),
]


@pytest.fixture(autouse=True)
def without_atomics(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # stripes of two blocks, so that small problems have several
    monkeypatch.setattr("sbeval.attention.impl.triton.deterministic.STRIPE_BLOCKS", 2)
    with deterministic(True):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_without_atomics_meet_the_error_budget(shape: dict, dtype: torch.dtype) -> None:
    assert_kernels_within_budget(problem(**shape, dtype=dtype))


@pytest.mark.parametrize("call", ["current", "packed", *exhaustive("plain", "padded")])
def test_gradients_without_atomics_are_right_for_every_call(call: str) -> None:
    batch = 2 if call == "padded" else 1
    p = problem(batch=batch, heads=2, groups=1, queries=70, dtype=torch.float32)
    exact = outputs_and_gradients(p, impl="reference", **CALLS[call])
    found = outputs_and_gradients(p, impl="triton", **CALLS[call])
    for name in exact:
        assert relative_error(found[name], exact[name]) < 1e-5, name


@pytest.mark.parametrize("impl", ["triton", *(["blockwise"] if DEVICE == "cpu" else [])])
def test_gradients_are_the_same_bits_every_time(impl: str) -> None:
    p = problem(heads=2, groups=1, queries=70, dtype=torch.float32)
    first, second = (outputs_and_gradients(p, impl=impl) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_the_kernels_that_run_hold_no_atomic_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    from sbeval.attention.impl.triton import function

    def atomic(*args: Any) -> Any:
        raise AssertionError("the kernel with atomic additions ran")

    monkeypatch.setattr(function, "backward", atomic)
    outputs_and_gradients(problem(queries=20, dtype=torch.float32), impl="triton")
    torch.use_deterministic_algorithms(False)
    with pytest.raises(AssertionError, match="atomic additions ran"):
        outputs_and_gradients(problem(queries=20, dtype=torch.float32), impl="triton")


def test_skipping_backward_visits_what_forward_visited() -> None:
    p = problem(queries=40, keys=300, heads=1, dtype=torch.float32, logit_scale=0.02)
    p.q[..., 0], p.k[..., 0] = 3.0, -3.0
    found = outputs_and_gradients(p, impl="triton", scale=0.4, skip_threshold=1e-2)
    torch.use_deterministic_algorithms(False)
    atomic = outputs_and_gradients(p, impl="triton", scale=0.4, skip_threshold=1e-2)
    for name in found:
        assert relative_error(found[name], atomic[name]) < 1e-5, name
