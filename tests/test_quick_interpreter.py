"""What the tests leave out of Triton's interpreter (`tests/quick_interpreter.py`) changes no bit."""

import pytest
import torch
import triton
import triton.language as tl
from attention_problems import DEVICE, outputs_and_gradients, problem
from torch import Tensor

from tests import quick_interpreter

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU nothing is interpreted")


@triton.jit
def _flipped(found_ptr, given_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)
    given = tl.load(given_ptr + at)
    tl.store(found_ptr + at, tl.flip(given, AXIS))
    tl.store(found_ptr + ROWS * COLUMNS, tl.xor_sum(tl.xor_sum(given.to(tl.int32, bitcast=True), AXIS), 0))


def results() -> list[Tensor]:
    """Of functions that call functions of several modules, forward and backward."""
    found = []
    for axis in (0, 1):
        found.append(torch.empty(4 * 8 + 1))
        _flipped[(1,)](found[-1], torch.randn(4, 8, generator=torch.Generator().manual_seed(axis)), 4, 8, axis)
    p = problem(heads=1, queries=17, keys=20, dtype=torch.float16)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            found += outputs_and_gradients(p, impl="triton", seq_start=torch.tensor([7])).values()
        finally:
            torch.use_deterministic_algorithms(False)
    return found


def test_the_quick_interpreter_gives_what_the_whole_one_gives_bit_by_bit() -> None:
    quick = results()
    quick_interpreter.uninstall()
    try:
        whole = results()
    finally:
        quick_interpreter.install()
    assert [torch.equal(one, other) for one, other in zip(quick, whole, strict=True)] == [True] * len(whole)
