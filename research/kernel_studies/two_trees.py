"""Times the attention kernels of this tree against those of another checkout: both passes, both decode kernels.

    git worktree add ../before COMMIT
    python -m research.kernel_studies.two_trees --before ../before --out FOLDER [--lengths 16384 65536] [--rounds 40]

The other checkout's kernels are loaded as a package of another name. Three calls take turns: this tree's (`after`), the
other's (`before`), and the other's once more (`again`), whose difference from `before` is noise. Decode is timed as
CUDA graphs of several calls in a row, and the host's time of a call without graphs. Ratios are those of neighbours in
time: above 1 this tree is faster. FOLDER/two_trees.jsonl has one line for each measurement.
`--dry-run` needs no GPU: it runs sizes that suit Triton's interpreter (TRITON_INTERPRET=1).
"""

import argparse
import dataclasses
import importlib
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from attention_kernels import dense_inputs
from measuring import Call, graphed, machine
from torch import Tensor

from research.kernel_studies.attention_sweep import EXACT_STOP, in_turns

OTHER_NAME = "sbeval_before"
LOG2_THRESHOLD = -16.6
LOG2_EXACT_STOP = -126.0
SHORT = 4096
"""Up to so many keys the host's time is measured too."""


def other_kernels(checkout: Path, folder: Path) -> None:
    """Copies a checkout's attention into `folder` as a package of another name, which can then be imported."""
    target = folder / OTHER_NAME / "attention"
    shutil.copytree(checkout / "sbeval" / "attention", target, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / OTHER_NAME / "__init__.py").touch()
    for path in target.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        # modules, and operators registered with PyTorch
        path.write_text(
            text.replace("sbeval.", f"{OTHER_NAME}.").replace("sbeval::", f"{OTHER_NAME}::"), encoding="utf-8"
        )
    sys.path.insert(0, str(folder))


def kernel(package: str, module: str, function: str) -> Any:
    """A function of one of the two trees."""
    return getattr(importlib.import_module(f"{package}.attention.impl.triton.{module}"), function)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel and the shape of its inputs.

    Attributes:
        what: `forward`, `backward`, `decode` or `decode_slots`.
        tokens: queries and keys of the two passes, keys in decoding.
        heads: heads of the two passes, key heads in decoding.
        rows: queries that share a key head, in decoding.
        skipping: in decoding, whether sticks break within some hundred keys and older keys are skipped.
    """

    what: str
    tokens: int
    head_dim: int
    heads: int
    rows: int = 1
    skipping: bool = False

    def shape(self) -> str:
        """The shape as text."""
        if self.what in ("forward", "backward"):
            return f"{self.tokens} tokens, head_dim {self.head_dim}"
        skipping = ", skipping" if self.skipping else ""
        return f"{self.tokens} keys, head_dim {self.head_dim}, {self.rows} rows{skipping}"

    def calls(self, packages: Sequence[str]) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
        """For each package a call of its kernel, all on the same inputs."""
        torch.manual_seed(0)
        # the interpreter has no bf16
        device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float16)
        (q, k, v), d_output = dense_inputs(self.heads, self.tokens, self.head_dim, device=device, dtype=dtype)
        scale = self.head_dim**-0.5
        settings: tuple[Any, ...] = (scale, False, None, None)
        if self.what == "forward":
            run = {name: kernel(name, "forward", "forward") for name in packages}
            return {name: partial(run[name], q, k, v, *settings, EXACT_STOP, True) for name in packages}
        if self.what == "backward":
            forward = kernel(packages[0], "forward", "forward")
            _, remainder, stick, stop = forward(q, k, v, *settings, EXACT_STOP, True)
            saved = (q, k, v, d_output, torch.zeros_like(remainder), remainder, stick, stop)
            return {name: partial(kernel(name, "backward", "backward"), *saved, *settings) for name in packages}
        if self.skipping:
            # as dense_inputs would be without the logits' shift
            q, k = torch.randn_like(q), torch.randn_like(k)
        q = q[:, :, : self.rows].reshape(1, self.heads * self.rows, 1, self.head_dim)
        log2_threshold = LOG2_THRESHOLD if self.skipping else LOG2_EXACT_STOP
        if self.what == "decode":
            values: tuple[Any, ...] = (q, k, v, scale, False, None, log2_threshold)
        else:
            length = torch.full((1,), self.tokens, dtype=torch.int32, device=device)
            values = (q, k, v, length, scale, False, log2_threshold)
        run = {name: kernel(name, self.what, self.what) for name in packages}
        return {name: partial(run[name], *values, skipping=self.skipping) for name in packages}


def several(call: Call, times: int) -> Call:
    """A call that repeats another."""

    def repeated() -> None:
        for _ in range(times):
            call()

    return repeated


class Report:
    """Lines of JSON in a file, and a table on the screen."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "two_trees.jsonl").open("w")
        print(f"{machine()}\n\n| kernel | shape | before | after | before / after | quartiles | noise |\n{'|---' * 7}|")

    def add(self, what: str, shape: str, times: dict[str, list[float]], *, same: bool, calls: int = 1) -> None:
        """Adds one comparison: `calls` are those of one measured time, `same` whether results were equal to the bit."""
        ms = {name: [each / calls for each in measured] for name, measured in times.items()}
        ratios = {
            name: statistics.quantiles([a / b for a, b in zip(ms["before"], ms[name], strict=True)], n=4)
            for name in ("after", "again")
        }
        row = {name: statistics.median(measured) for name, measured in ms.items()}
        print(
            json.dumps({"what": what, "shape": shape, "same": same, "ms": row, "ratios": ratios}),
            file=self.file,
            flush=True,
        )
        low, middle, high = ratios["after"]
        cells = [what, shape + ("" if same else ", other bits"), f"{row['before']:.4f}", f"{row['after']:.4f}"]
        cells += [f"{middle:.4f}", f"{low:.4f} to {high:.4f}", f"{ratios['again'][1]:.4f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def equal(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    """Whether two calls gave the same bits."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def compiled(work: tuple[Case, str, str]) -> None:
    """Compiles one tree's kernel in a separate process, so that Triton's cache holds it."""
    case, package, folder = work
    if folder not in sys.path:
        sys.path.insert(0, folder)
    case.calls([package])[package]()
    torch.cuda.synchronize()


def measure(report: Report, case: Case, rounds: int, calls_a_graph: int) -> None:
    """Times one case."""
    named = case.calls([OTHER_NAME, "sbeval"])
    # dk and dv are added atomically, in an order that changes
    compared = 1 if case.what in ("forward", "backward") else 2
    same = equal(named[OTHER_NAME]()[:compared], named["sbeval"]()[:compared])
    calls: dict[str, Call] = {"before": named[OTHER_NAME], "after": named["sbeval"], "again": named[OTHER_NAME]}
    if case.what in ("forward", "backward"):
        rounds = rounds if case.tokens <= 16384 else max(2, rounds // 3)
    elif torch.cuda.is_available():
        if case.tokens <= SHORT and case.rows == 1:
            report.add(f"{case.what}, host", case.shape(), host_times(calls, rounds), same=same, calls=100)
        graphs = {name: graphed(several(call, calls_a_graph)) for name, call in calls.items()}
        report.add(case.what, case.shape(), in_turns(graphs, rounds), same=same, calls=calls_a_graph)
        return
    report.add(case.what, case.shape(), in_turns(calls, rounds), same=same)


def host_times(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Milliseconds that the host takes for a hundred calls, which the device may still be running."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            several(call, 100)()
            times[name].append(1e3 * (time.perf_counter() - start_s))
    return times


def main() -> None:
    """Prints one row for each comparison and writes the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="*", default=[16384, 65536])
    parser.add_argument("--keys", type=int, nargs="*", default=[4096, 65536])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--heads", type=int, default=16, help="heads of the forward and the backward pass")
    parser.add_argument("--key-heads", type=int, default=16, help="batch times key heads in decoding")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=10, help="calls in a graph")
    parser.add_argument("--compilers", type=int, default=14, help="processes that compile")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.dry_run:
        print("two_trees measures kernels on a GPU and finds none here, so it measures nothing.")
        return
    began = time.perf_counter()
    cases = [
        Case(what=what, tokens=keys, head_dim=head_dim, heads=arguments.key_heads, rows=rows, skipping=skipping)
        for keys, head_dim, rows, skipping, what in itertools.product(
            arguments.keys, arguments.head_dims, (1, 8), (False, True), ("decode", "decode_slots")
        )
    ]
    cases += [
        Case(what=what, tokens=length, head_dim=head_dim, heads=arguments.heads)
        for length, head_dim, what in itertools.product(arguments.lengths, arguments.head_dims, ("forward", "backward"))
    ]
    with tempfile.TemporaryDirectory() as folder:
        other_kernels(arguments.before, Path(folder))
        if torch.cuda.is_available():
            works = [(case, package, folder) for case in cases for package in (OTHER_NAME, "sbeval") if case.rows == 1]
            with ProcessPoolExecutor(arguments.compilers, mp_context=get_context("spawn")) as pool:
                list(pool.map(compiled, works))
            print(f"compiled in {time.perf_counter() - began:.0f} s")
        report = Report(arguments.out)
        for case in cases:
            measure(report, case, arguments.rounds, arguments.calls)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
