"""Times launch parameters of both attention passes: against launch.py's, and the fastest against FlashAttention-2.

    python -m research.kernel_studies.attention_sweep --out FOLDER [--lengths 16384 65536] [--head-dims 64 128]
        [--heads 16] [--rounds 15] [--seconds 150] [--compilers 14]

All candidates of a pass take turns, one call each, so that they run at the same clocks. The fastest candidate of each
pass is then timed again, in both passes together, beside today's parameters and FlashAttention-2: the fastest of many
looks faster than it is. Processes compile the candidates beforehand. A candidate whose outputs differ from today's by
more than the rounding of bf16 gets no time. FOLDER/attention_sweep.jsonl has one line for each measurement.
`--dry-run` needs no GPU: it runs sizes that suit Triton's interpreter (TRITON_INTERPRET=1).
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from attention_kernels import dense_inputs, gradients, softmax_attention, stick_breaking
from measuring import FLUSHED_BYTES, Call, copy_bandwidth, machine, matrix_throughput, relative_error
from torch import Tensor
from torch.nn.attention import SDPBackend

from sbeval.attention.impl.triton import backward, forward, launch

DIFFERENCE_LIMIT = 8e-3
EXACT_STOP = 2.0**-126
COMPILED_LENGTH = 4096
"""Long enough that tiles are read by the copy engine, as at every greater length."""

SLOWEST = 1.1
"""A candidate that takes this many times as long as today's in the first look is not timed further."""

Changes = dict[str, Any]
Shape = dict[str, int]
Run = Callable[..., tuple[Tensor, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """Launch parameters that differ from today's.

    Attributes:
        forward: fields of the forward pass's `LaunchParameters` to replace.
        backward: the same for the backward pass.
        forward_heads: how many heads programs work on together, None as today.
        backward_heads: the same for the backward pass.
        heads: heads of the inputs.
    """

    forward: Changes = dataclasses.field(default_factory=dict)
    backward: Changes = dataclasses.field(default_factory=dict)
    forward_heads: int | None = None
    backward_heads: int | None = None
    heads: int = 16

    def name(self) -> str:
        """The changes as text; `today` where there are none."""
        changes = [f"fwd {key}={value}" for key, value in self.forward.items()]
        changes += [f"bwd {key}={value}" for key, value in self.backward.items()]
        changes += [f"fwd heads={self.forward_heads}"] if self.forward_heads else []
        changes += [f"bwd heads={self.backward_heads}"] if self.backward_heads else []
        return ", ".join(changes) or "today"


WIDE = {"block_queries": 128, "num_warps": 8, "max_registers": None}
NARROW = {"block_queries": 64, "num_warps": 4}
FORWARD: dict[int, list[Changes]] = {
    64: [
        *[{"num_stages": stages} for stages in (2, 4)],
        *[{"max_registers": registers} for registers in (None, 128, 160, 168)],
        *[{"chunk_tiles": tiles} for tiles in (32, 128)],
        {**WIDE, "num_stages": 2},
        WIDE,
    ],
    128: [
        {"num_stages": 2},
        *[{"chunk_tiles": tiles} for tiles in (32, 128)],
        {**NARROW, "num_stages": 2},
        {**NARROW, "num_stages": 2, "max_registers": 168},
        NARROW,
    ],
}
BACKWARD: dict[int, list[Changes]] = {
    64: [
        *[{"num_stages": stages} for stages in (1, 2, 4)],
        {"max_registers": 168},
        {"max_registers": 168, "num_stages": 2},
        {"num_warps": 8},
        {**WIDE, "num_stages": 2},
        WIDE,
    ],
    128: [
        *[{"num_stages": stages} for stages in (1, 2)],
        {**NARROW, "num_stages": 1},
        {**NARROW, "num_stages": 2},
        {"block_queries": 64, "num_stages": 2},
    ],
}
NARROW_KEYS: dict[int, list[tuple[Changes, Changes]]] = {
    64: [
        ({}, {"num_stages": 4}),
        ({}, {"max_registers": 168}),
    ],
    128: [
        ({**NARROW, "max_registers": 168}, {}),
        ({**NARROW, "max_registers": 168}, {**NARROW, "num_stages": 2}),
    ],
}
"""Changes of both passes beside tiles of 32 keys, which both must have."""
HEADS = (1, 2, 4, 8, 16)


def candidates(head_dim: int, heads: int) -> dict[str, list[Candidate]]:
    """Candidates by what is timed: `forward`, `backward`, or `both` passes."""
    make = partial(Candidate, heads=heads)
    keys = {"block_keys": 32}
    return {
        "forward": [
            make(),
            *[make(forward=changes) for changes in FORWARD.get(head_dim, [])],
            *[make(forward_heads=together) for together in HEADS],
        ],
        "backward": [
            make(),
            *[make(backward=changes) for changes in BACKWARD.get(head_dim, [])],
            *[make(backward_heads=together) for together in HEADS],
        ],
        "both": [
            make(forward={**keys, **first}, backward={**keys, **second})
            for first, second in NARROW_KEYS.get(head_dim, [])
        ],
    }


def parameters(candidate: Candidate, head_dim: int, length: int) -> list[tuple[launch.LaunchParameters, int]]:
    """What the forward and the backward kernel are launched with on a Hopper GPU, and on how many heads together."""
    sizes = {"head_dim": head_dim, "element_bytes": 2}
    memory = {"shared_memory_bytes": launch.ROOMY_SHARED_MEMORY_BYTES}
    keys = launch.training_block_keys(**sizes, **memory)
    chosen = (
        launch.forward_parameters(**sizes, queries=length, training_block_keys=keys),
        launch.backward_parameters(**sizes, queries=length, **memory),
    )
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size if torch.cuda.is_available() else 0
    found = []
    warps = candidate.backward.get("num_warps", chosen[1].num_warps)
    programs = launch.backward_programs_together(num_warps=warps, cache_bytes=cache_bytes)
    for each, changes, heads, bytes_a_value, together_programs in (
        (chosen[0], candidate.forward, candidate.forward_heads, 2, launch.PROGRAMS_TOGETHER),
        (chosen[1], candidate.backward, candidate.backward_heads, 6, programs),
    ):
        changed = dataclasses.replace(each, **changes)
        together = launch.heads_at_once(
            heads=candidate.heads,
            bytes_a_head=2 * length * head_dim * bytes_a_value,
            blocks=-(-length // changed.block_queries),
            cache_bytes=cache_bytes,
            programs=together_programs,
        )
        found.append((changed, min(heads, candidate.heads) if heads else together))
    return found


@contextmanager
def launched_with(chosen: list[tuple[launch.LaunchParameters, int]]) -> Iterator[None]:
    """Launches the forward and the backward kernel with these parameters on so many heads together."""
    names = ((forward, "forward_parameters"), (backward, "backward_parameters"))
    before = [(module, name, getattr(module, name)) for module, name in names]
    before += [(module, "heads_at_once", module.heads_at_once) for module in (forward, backward)]  # type: ignore[attr-defined]
    try:
        for (module, name), (each, together) in zip(names, chosen, strict=True):
            setattr(module, name, partial(_always, each))
            module.heads_at_once = partial(_always, together)
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)


def _always(value: Any, **_: Any) -> Any:
    return value


class Passes:
    """Inputs of one shape, and calls of one pass or of both."""

    def __init__(self, heads: int, length: int, head_dim: int, device: str) -> None:
        torch.manual_seed(0)
        # the interpreter has no bf16
        dtype = torch.bfloat16 if device == "cuda" else torch.float16
        self.inputs, self.d_output = dense_inputs(heads, length, head_dim, device=device, dtype=dtype)
        self.head_dim, self.length, self.scale = head_dim, length, head_dim**-0.5

    def forward(self, candidate: Candidate, together_as: int | None = None) -> tuple[Tensor, ...]:
        """Output, remainder, and what the backward pass needs; heads go together as at the length `together_as`."""
        chosen = parameters(candidate, self.head_dim, together_as or self.length)
        with launched_with(chosen), torch.no_grad():
            return forward.forward(*self.inputs, self.scale, False, None, None, EXACT_STOP, True)

    def backward(
        self, kept: tuple[Tensor, ...], candidate: Candidate, together_as: int | None = None
    ) -> tuple[Tensor, ...]:
        """Gradients, from what `forward` returned."""
        _, remainder, stick, stop = kept
        nothing = torch.zeros_like(remainder)
        chosen = parameters(candidate, self.head_dim, together_as or self.length)
        with launched_with(chosen), torch.no_grad():
            return backward.backward(
                *(*self.inputs, self.d_output, nothing, remainder, stick, stop, self.scale, False, None, None)
            )

    def both(self, candidate: Candidate) -> tuple[Tensor, ...]:
        """Gradients as training computes them."""
        with launched_with(parameters(candidate, self.head_dim, self.length)):
            return gradients(stick_breaking, self.inputs, self.d_output)

    def softmax(self) -> tuple[Tensor, ...]:
        """Gradients of FlashAttention-2."""
        return gradients(softmax_attention(SDPBackend.FLASH_ATTENTION), self.inputs, self.d_output)


def in_turns(calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call, round by round. A round runs each call once, every other round in reverse order."""
    cuda = torch.cuda.is_available()
    flush = torch.empty(FLUSHED_BYTES if cuda else 0, dtype=torch.int8, device="cuda" if cuda else "cpu")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        events = {}
        if cuda:
            # the first call would else be timed with the host's launch, since the device waits for it
            next(iter(calls.values()))()
        for name in list(calls) if turn % 2 == 0 else reversed(list(calls)):
            if not cuda:
                start_s = time.perf_counter()
                calls[name]()
                times[name].append(1e3 * (time.perf_counter() - start_s))
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            calls[name]()
            end.record()
            events[name] = (start, end)
        if cuda:
            torch.cuda.synchronize()
        for name, (start, end) in events.items():
            times[name].append(start.elapsed_time(end))
    return times


def paired(times: dict[str, list[float]], base: str, name: str) -> list[float]:
    """Quartiles of how many times as fast as `base` a call is, round by round."""
    ratios = [a / b for a, b in zip(times[base], times[name], strict=True)]
    return [round(quantile, 4) for quantile in statistics.quantiles(ratios, n=4)]


Work = tuple[str, Candidate, int, int]


def to_compile(head_dims: list[int], lengths: list[int], heads: int) -> list[Work]:
    """Pass, candidate, head_dim and length of each kernel, without those that compile to the same code."""
    works: dict[tuple[Any, ...], Work] = {}
    for head_dim in head_dims:
        for length in lengths:
            for what, chosen in candidates(head_dim, heads).items():
                for candidate in chosen:
                    for position, each in enumerate(("forward", "backward")):
                        if what in (each, "both"):
                            found, together = parameters(candidate, head_dim, length)[position]
                            # integers that are 1 or multiples of 16 are compiled for
                            kind = "1" if together == 1 else "16" if together % 16 == 0 else "other"
                            works.setdefault((each, head_dim, found, kind), (each, candidate, head_dim, length))
    return list(works.values())


def compiled(work: Work) -> str:
    """Compiles one kernel in a process of its own, so that it lies in Triton's cache. Returns what went wrong."""
    what, candidate, head_dim, length = work
    passes = Passes(candidate.heads, COMPILED_LENGTH, head_dim, "cuda")
    try:
        # the backward pass only reads what the forward pass kept, so that it need not come from the same parameters
        kept = passes.forward(candidate if what == "forward" else Candidate(heads=candidate.heads), length)
        if what == "backward":
            passes.backward(kept, candidate, length)
        torch.cuda.synchronize()
    except Exception as error:  # parameters that do not fit the GPU are a result of the sweep
        return f"{what} D{head_dim} {candidate.name()}: {type(error).__name__} {error}"[:300]
    return ""


def alone(name: str, call: Call, seconds: float) -> dict[str, Any]:
    """Clocks and power while one kernel runs alone, with its median time."""
    query = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0", "-lms", "100"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    end = time.perf_counter() + seconds
    times: list[float] = []
    while time.perf_counter() < end:
        times += in_turns({name: call}, 5)[name]
    watcher.terminate()
    lines = [line.split(",") for line in watcher.communicate()[0].splitlines()]
    samples = [[float(cell) for cell in line] for line in lines if len(line) == 5 and "N/A" not in "".join(line)]
    # the first samples are of the clocks before the kernel ran
    columns = zip(*samples[len(samples) // 3 :], strict=True)
    return {
        "ms": statistics.median(times),
        **dict(zip(query.split(","), map(statistics.median, columns), strict=False)),
    }


class Report:
    """Lines of JSON in a file, and a table on the screen."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "attention_sweep.jsonl").open("w")

    def add(self, **fields: Any) -> None:
        """Adds one measurement."""
        print(json.dumps(fields), file=self.file, flush=True)

    def times(self, shape: Shape, what: str, base: str, times: dict[str, list[float]]) -> None:
        """Adds each call's times, and how many times as fast as `base` it is."""
        for name in sorted(times, key=lambda name: statistics.median(times[name])):
            low, middle, high = paired(times, base, name)
            milliseconds = [round(each, 4) for each in times[name]]
            self.add(**shape, what=what, name=name, ms=milliseconds, base=base, ratio=[low, middle, high])
            row = [shape["length"], shape["head_dim"], what, name, f"{statistics.median(times[name]):.3f}"]
            row += [f"{middle:.3f}", f"{low:.3f} to {high:.3f}"]
            print("| " + " | ".join(map(str, row)) + " |", flush=True)


def usable(
    report: Report, shape: Shape, what: str, run: Run, chosen: list[Candidate], exact: tuple[Tensor, ...]
) -> dict[str, Call]:
    """Calls of the candidates that run here and whose outputs differ from `exact`, today's, by rounding alone."""
    calls: dict[str, Call] = {}
    for candidate in chosen:
        try:
            outputs = run(candidate)
            differences = [relative_error(a, b.double()) for a, b in zip(outputs, exact, strict=False)]
            if not all(difference < DIFFERENCE_LIMIT for difference in differences):
                raise ValueError(f"differs from today's by {differences}")
            calls[candidate.name()] = partial(run, candidate)
        except Exception as error:  # parameters that do not fit the GPU are a result of the sweep
            report.add(**shape, what=what, name=candidate.name(), error=f"{type(error).__name__}: {error}"[:300])
    return calls


def measure(report: Report, shape: Shape, passes: Passes, rounds: int) -> None:
    """Times all candidates of one shape, then the fastest beside FlashAttention-2."""
    chosen = candidates(shape["head_dim"], shape["heads"])
    today = chosen["forward"][0]
    kept = passes.forward(today)
    exact = {"forward": kept[:1], "backward": passes.backward(kept, today)}
    runs: dict[str, Run] = {"forward": passes.forward, "backward": partial(passes.backward, kept)}
    fastest: dict[str, Candidate] = {}
    for what, run in runs.items():
        calls = usable(report, shape, what, run, chosen[what], exact[what])
        first = in_turns(calls, 2)
        report.add(**shape, what=f"{what}, first look", ms={name: min(each) for name, each in first.items()})
        slowest = SLOWEST * min(first["today"])
        times = in_turns({name: call for name, call in calls.items() if min(first[name]) <= slowest}, rounds)
        report.times(shape, what, "today", times)
        named = {candidate.name(): candidate for candidate in chosen[what]}
        fastest[what] = named[min(times, key=lambda name: statistics.median(times[name]))]
    together = dataclasses.replace(
        fastest["forward"], backward=fastest["backward"].backward, backward_heads=fastest["backward"].backward_heads
    )
    compared = [today, together, *chosen["both"]]
    calls = {"FlashAttention-2": passes.softmax}
    calls |= usable(report, shape, "both", passes.both, compared, exact["backward"])
    calls["FlashAttention-2"]()
    report.times(shape, "both", "FlashAttention-2", in_turns(calls, rounds))
    if torch.cuda.is_available() and shape["length"] < 32768:
        for name in ("FlashAttention-2", "today"):
            try:
                report.add(**shape, what="alone", name=name, **alone(name, calls[name], 1.2))
            except (OSError, ValueError) as error:  # nvidia-smi is missing, or says what is no number
                report.add(**shape, what="alone", name=name, error=str(error)[:300])


def compile_all(report: Report, arguments: argparse.Namespace) -> None:
    """Compiles all candidates' kernels beforehand, several at a time."""
    began = time.perf_counter()
    works = to_compile(arguments.head_dims, arguments.lengths, arguments.heads)
    with ProcessPoolExecutor(arguments.compilers, mp_context=get_context("spawn")) as pool:
        # those of today first: candidates of the backward pass need a forward pass
        first = [work for work in works if work[0] == "forward" and work[1].name() == "today"]
        problems = list(pool.map(compiled, first))
        problems += pool.map(compiled, [work for work in works if work not in first])
    for problem in filter(None, problems):
        report.add(what="compile", error=problem)
    report.add(what="compile", kernels=len(works), seconds=round(time.perf_counter() - began, 1))


def main() -> None:
    """Prints one row for each measurement and writes the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=150.0, help="no shape is begun after so long")
    parser.add_argument("--compilers", type=int, default=14, help="processes that compile")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.dry_run:
        print("attention_sweep measures kernels on a GPU and finds none here, so it measures nothing.")
        return
    began = time.perf_counter()
    report = Report(arguments.out)
    if arguments.dry_run:
        report.add(machine=machine())
    else:
        cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        rates = {"copy_bytes_a_second": copy_bandwidth(), "bf16_a_second": matrix_throughput(torch.bfloat16)}
        report.add(machine=machine(), cache_bytes=cache_bytes, **rates)
        compile_all(report, arguments)
    print(f"{machine()}\n\n| L | D | pass | parameters | ms | times base | quartiles |\n{'|---' * 7}|", flush=True)
    for length in arguments.lengths:
        for head_dim in arguments.head_dims:
            shape = {"length": length, "head_dim": head_dim, "heads": arguments.heads}
            if time.perf_counter() - began > arguments.seconds:
                report.add(**shape, error="out of time")
                continue
            passes = Passes(arguments.heads, length, head_dim, "cpu" if arguments.dry_run else "cuda")
            measure(report, shape, passes, arguments.rounds)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
