"""Where the time of one long window goes: the kernels that take most, for each scoring row of harness.py.

    python -m research.kernel_studies.harness_profile [--questions dense,skipping] [--length 65536] [--kernels 18]

Each row's model scores one window three times: once to compile and choose kernels, once against the clock, once under
torch.profiler. A kernel's time is the sum over its calls; its name is cut at 110 characters. Without a GPU PyTorch's
operators are listed.
"""

import gc
import logging
import time
from typing import Any

import harness
import torch
from measuring import machine
from torch.profiler import ProfilerActivity, profile

NAME_CHARACTERS = 110


def profiled(row: harness.Row, kernels: int) -> list[str]:
    """Lines that say how long a row's window took, and which kernels it took."""
    from lm_eval.api.instance import Instance

    gpu = torch.cuda.is_available()
    lm = harness.load(row)
    text = harness.text_of(row.length, lm.tokenizer)
    request = Instance("loglikelihood_rolling", {}, (text,), 0, metadata=("", 0, 1))

    lm.loglikelihood_rolling([request], disable_tqdm=True)
    started = time.perf_counter()
    lm.loglikelihood_rolling([request], disable_tqdm=True)
    seconds = time.perf_counter() - started
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu) as found:
        lm.loglikelihood_rolling([request], disable_tqdm=True)

    def milliseconds(event: Any) -> float:
        return float(event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e3

    events = [event for event in found.key_averages() if not gpu or event.device_type.name == "CUDA"]
    events.sort(key=milliseconds, reverse=True)
    total = sum(map(milliseconds, events))
    skipping = "" if row.skip_threshold is None else f", skipping at {row.skip_threshold}"
    head = f"{row.adapter} {row.model}{skipping}: {1e3 * seconds:.2f} ms, its kernels {total:.2f} ms"
    lines = [
        f"{milliseconds(event):9.2f} ms {event.count:6d}x {event.key[:NAME_CHARACTERS]}" for event in events[:kernels]
    ]
    del lm
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    return [head, *lines]


def main() -> None:
    """Prints one list a row."""
    parser = harness.options()
    parser.set_defaults(questions="dense,skipping")
    parser.add_argument("--kernels", type=int, default=18, help="how many kernels of each row are listed")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    print(f"{machine()}; one window of {arguments.length} tokens")
    for row in harness.rows(arguments):
        if row.question == "generation":
            raise SystemExit("expected questions that score, found generation")
        print("", *profiled(row, arguments.kernels), sep="\n", flush=True)


if __name__ == "__main__":
    main()
