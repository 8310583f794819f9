"""Kernels without a GPU: what `tests/quick_interpreter.py` leaves out changes no bit, and attention's compile."""

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from attention_problems import DEVICE, outputs_and_gradients, problem
from fresh_process import run_code
from torch import Tensor

from tests import quick_interpreter

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU nothing is interpreted")

COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit
from sbeval.attention.impl.triton import backward, decode, decode_slots, forward, hardware
from sbeval.models.kernels.slots import kernel_softmax_decode

class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
    map_python_to_cpp_type = lambda self, name: name

def compiled(kernel, grid):
    def launch(*arguments, **options):
        made = kernel.warmup(*arguments, grid=grid, **options)
        print(kernel.__module__.rpartition(".")[2] + kernel.__name__, len(made.asm["cubin"]) > 0)
    return launch

driver.set_active(Hopper())
jit.JITFunction.__getitem__ = compiled
hardware._capability = lambda tensor: (9, 0)
forward.shared_memory_bytes = backward.shared_memory_bytes = lambda tensor: 227 * 1024
q, k = (torch.zeros(1, heads, 256, 64, dtype=torch.bfloat16) for heads in (4, 2))
start = torch.zeros(1, dtype=torch.int32)
_, remainder, stick, stop = forward.forward(q, k, k, 0.125, False, start, None, 0.0, True)
backward.backward(q, k, k, q, remainder, remainder, stick, stop, 0.125, False, start, None)
newest = torch.zeros(2, 4, 1, 64, dtype=torch.bfloat16)
room = torch.zeros(2, 2, 65536, 64, dtype=torch.bfloat16)
for skipping in (False, True):
    decode.decode(newest, room, room, 0.125, False, None, -20.0, skipping=skipping)
    decode_slots.decode_slots(
        newest, room, room, torch.tensor([700, 900]), 0.125, False, -20.0, skipping=skipping
    )
for slope_H in (None, torch.ones(4)):
    kernel_softmax_decode(newest, room, room, torch.tensor([700, 900]), 0.125, slope_H=slope_H)
"""


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


@pytest.mark.exhaustive
def test_the_quick_interpreter_gives_what_the_whole_one_gives_bit_by_bit() -> None:
    quick = results()
    quick_interpreter.uninstall()
    try:
        whole = results()
    finally:
        quick_interpreter.install()
    assert [torch.equal(one, other) for one, other in zip(quick, whole, strict=True)] == [True] * len(whole)


@pytest.mark.exhaustive
def test_kernels_of_attention_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    made = run_code(COMPILE, environment={"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)})
    kernels = {line.partition(" ")[0] for line in made}
    decoding = ("decode", "decode_slots", "slots")
    split = {f"{module}_{kernel}_kernel" for module in decoding for kernel in ("split", "join")}
    assert kernels == split | {"forward_forward_kernel", "backward_backward_kernel"}
    assert {line.partition(" ")[2] for line in made} == {"True"}
