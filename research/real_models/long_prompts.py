"""Scores long prompts by vLLM's server, with several limits of tokens a step, and measures the server's memory.

    python -m research.real_models.long_prompts real/smollm2 --text real/texts/modules.jsonl.gz --out real/long_prompts

Each prompt is one request with `echo` and `logprobs`, as lm-eval sends it. The server's memory is the sum of what its
processes hold at their largest (VmHWM). A prompt that is read in one step has logits of length x vocabulary x 4 bytes;
a step of `max_num_batched_tokens` bounds them. The server is ended when the machine has less than `--free_gib` left.
"""

import argparse
import gzip
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from research.real_models.served import served

POLL_SECONDS = 0.5


def family(process: int) -> list[int]:
    """Returns a process and all that descend from it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it ended
                continue
    members = [process]
    for member in members:
        members += [child for child, parent in parents.items() if parent == member]
    return members


def kib(file: Path, name: str) -> int:
    """Returns a number of KiB from a file of /proc, 0 where the process has ended."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def peak_gib(process: int) -> float:
    """Returns the memory of a process and its descendants at their largest, in GiB."""
    return sum(kib(Path(f"/proc/{member}/status"), "VmHWM") for member in family(process)) / 2**20


def measure(address: str, process: int, tokens: Sequence[int], seconds: float, free_gib: float) -> str:
    """Scores one prompt; returns a row's cells: what came back, NLL in nats, seconds, peak memory in GiB."""
    body = {"model": "model", "prompt": [*tokens], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    done, short = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            if kib(Path("/proc/meminfo"), "MemAvailable") < free_gib * 2**20:
                short.set()
                os.kill(process, signal.SIGTERM)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    started, nll, outcome = time.monotonic(), "", ""
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            choice = json.loads(answer.read())["choices"][0]["logprobs"]["token_logprobs"]
        scored = choice[1 : len(tokens)]
        nll, outcome = f"{-sum(scored) / len(scored):.7f}", f"{len(scored)} log-probabilities"
    except (OSError, urllib.error.URLError, KeyError, TypeError) as error:
        outcome = f"less than {free_gib:g} GiB free" if short.is_set() else str(error)[:200]
    finally:
        done.set()
        watcher.join()
    return f"{outcome} | {nll} | {time.monotonic() - started:.0f} | {peak_gib(process):.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="gzipped JSON lines with documents")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768], help="prompts in tokens")
    parser.add_argument("--steps", type=int, nargs="+", default=[2048], help="max_num_batched_tokens; 0 is one step")
    parser.add_argument("--seconds", type=float, default=600, help="longest wait for an answer")
    parser.add_argument("--free_gib", type=float, default=5, help="least free memory")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with gzip.open(options.text, "rt", encoding="utf-8") as lines:
        text = str(json.loads(next(lines))["text"])
    tokens = AutoTokenizer.from_pretrained(options.model)(text * 4)["input_ids"]
    print("| tokens | max_num_batched_tokens | what came back | NLL | seconds | peak memory, GiB |")
    print("|---|---|---|---|---|---|")
    for length in options.lengths:
        for step in options.steps:
            batched = step or length + 1
            given = ["--max-num-batched-tokens", str(batched), "--max-num-seqs", "1"]
            given.append("--enable-chunked-prefill" if batched <= length else "--no-enable-chunked-prefill")
            with served(options.model, options.out / f"server_{length}_{step}.log", length + 1, given) as (
                url,
                process,
            ):
                row = measure(url, process, tokens[:length], options.seconds, options.free_gib)
            print(f"| {length} | {batched} | {row} |", flush=True)


if __name__ == "__main__":
    main()
