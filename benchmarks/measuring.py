"""The machine's description for every GPU benchmark, and timing of several kernels in turns."""

import itertools
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor

Call = Callable[[], Any]
FLUSHED_BYTES = 256 * 2**20


def machine() -> str:
    """GPU, driver, versions and the exact commit (environment variable SBEVAL_COMMIT where there is no repository)."""
    if not torch.cuda.is_available():
        return f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}, python {platform.python_version()}"
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"])
    commit = os.environ.get("SBEVAL_COMMIT") or _output(["git", "rev-parse", "HEAD"]) or "unknown"
    if not os.environ.get("SBEVAL_COMMIT") and _output(["git", "status", "--porcelain", "--untracked-files=no"]):
        commit += " with changes"
    return (
        f"{torch.cuda.get_device_name()}, driver {driver}, torch {torch.__version__}, triton {triton.__version__}, "
        f"python {platform.python_version()}, commit {commit}"
    )


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def graphed(call: Call) -> Call:
    """The call recorded as a CUDA graph, so that the time to launch its kernels from Python is left out."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def interleaved(calls: Mapping[str, Call], *, milliseconds: float = 300.0) -> dict[str, list[float]]:
    """20th, 50th and 80th percentile in ms of each call, taken in turns so that all see the same clocks.

    Args:
        calls: what to time, by name.
        milliseconds: about how long each is timed.
    """
    flush = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda") if torch.cuda.is_available() else torch.empty(0)
    rounds = {}
    for name, call in calls.items():
        call()
        rounds[name] = max(3, min(100, int(milliseconds / max(1e-3, _timed(call, flush, 1)[0]))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    turns = 3
    for _ in range(turns):
        for name, call in calls.items():
            times[name] += _timed(call, flush, -(-rounds[name] // turns))
    quantiles = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    return {name: torch.tensor(ms, dtype=torch.float64).quantile(quantiles).tolist() for name, ms in times.items()}


def _timed(call: Call, flush: Tensor, repeats: int) -> list[float]:
    if not flush.is_cuda:
        clock = [time.perf_counter()]
        for _ in range(repeats):
            call()
            clock.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in itertools.pairwise(clock)]
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy; NaN without a GPU."""
    if not torch.cuda.is_available():
        return float("nan")
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / sorted(seconds)[len(seconds) // 2]


def matrix_throughput(dtype: torch.dtype) -> float:
    """Operations a second of a large product."""
    size = 8192 if torch.cuda.is_available() else 512
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(size, size, device=device, dtype=dtype)
    return float(2 * size**3 / (interleaved({"product": lambda: x @ x})["product"][1] / 1e3))


def peak_bytes(call: Call) -> int:
    """Returns the peak bytes of a call above the memory allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact value."""
    return float((found.double() - exact).norm() / exact.norm())


def shown(times: list[float], digits: int = 3) -> str:
    """Percentiles as one cell."""
    return "/".join(f"{time:.{digits}f}" for time in times)
