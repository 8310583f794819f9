"""Scores one real model with `hf`, `sb`, vLLM in process and vLLM's completions server, and compares the numbers.

    python -m research.real_models.engines real/smollm2 --text real/texts/modules.jsonl.gz --out real/engines

Every backend runs in fp32 on the same tokens. The table holds each metric with its largest difference to `hf` in nats
per token. vLLM runs on a CPU with the packages that `research/real_models/vllm_environment.sh` installs.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

READY_SECONDS = 600
COMPARED = ("nll", "answer_nll", "exact_match", "tokens", "score", "ruler", "retrieval_gain")
VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One `sbeval run`.

    Attributes:
        backend: its name in the table.
        model: lm-eval's name of the model.
        arguments: of the model.
        tasks: names of tasks.
        options: further options of the command.
    """

    backend: str
    model: str
    arguments: dict[str, object]
    tasks: Sequence[str]
    options: Sequence[str] = ()


def free_port() -> int:
    """Returns a port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def served(model: Path, port: int, log: Path, max_tokens: int) -> Iterator[str]:
    """Yields the address of vLLM's server with the model, and ends the server."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", str(max_tokens)]
    address = f"http://127.0.0.1:{port}/v1"
    with log.open("w") as output:
        server = subprocess.Popen(command, env={**os.environ, **VLLM_VARIABLES}, stdout=output, stderr=output)
        try:
            _wait_until_ready(f"{address}/models", server, log)
            yield address
        finally:
            server.terminate()
            server.wait()


def _wait_until_ready(address: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    started = time.monotonic()
    while time.monotonic() - started < READY_SECONDS:
        if server.poll() is not None:
            raise SystemExit(f"vLLM's server ended with {server.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(address, timeout=5):
                print(f"vLLM's server was ready after {time.monotonic() - started:.0f} s", flush=True)
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise SystemExit(f"vLLM's server was not ready after {READY_SECONDS} s: see {log}")


def execute(run: Run, metadata: dict[str, object], limit: int, out: Path) -> dict[str, float]:
    """Runs one command and returns its metrics by task and metric."""
    folder = out / run.backend
    command = [sys.executable, "-m", "sbeval", "run", "--model", run.model, "--tasks", ",".join(run.tasks)]
    command += ["--model_args", json.dumps(run.arguments), "--metadata", json.dumps(metadata)]
    command += ["--limit", str(limit), "--output_path", str(folder), *run.options]
    started = time.monotonic()
    log = out / f"{run.backend}.log"
    with log.open("w") as output:
        ended = subprocess.run(command, env={**os.environ, **VLLM_VARIABLES}, stdout=output, stderr=output, check=False)
    print(f"{run.backend}: exit code {ended.returncode} after {time.monotonic() - started:.0f} s", flush=True)
    if ended.returncode:
        print(f"    {log.read_text().strip().splitlines()[-1][:500]}", flush=True)
        return {}
    newest = max(folder.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    results = json.loads(newest.read_text(encoding="utf-8"))["results"]
    return {
        f"{task} {metric.partition(',')[0]}": float(value)
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and metric.partition("@")[0] in COMPARED
    }


def print_table(results: dict[str, dict[str, float]], reference: str) -> float:
    """Prints every metric of each backend, and returns the largest difference of an NLL to the reference's."""
    largest = 0.0
    backends = [name for name in results if name != reference]
    print(f"| metric | {reference} | " + " | ".join(f"{name} minus {reference}" for name in backends) + " |")
    print("|---|---|" + "---|" * len(backends))
    for metric, value in results[reference].items():
        cells = []
        for name in backends:
            other = results[name].get(metric)
            cells.append("" if other is None else f"{other - value:+.2e}")
            if other is not None and "nll@" in metric:
                largest = max(largest, abs(other - value))
        print(f"| {metric} | {value:.7g} | " + " | ".join(cells) + " |")
    return largest


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=3, help="documents of each task")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512], help="context lengths in tokens")
    parser.add_argument("--tasks", nargs="+", default=["sb_text_fixed_target"], help="that score tokens")
    parser.add_argument("--backends", nargs="*", default=["hf", "sb", "vllm-server", "vllm"])
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    model = str(options.model)
    metadata: dict[str, object] = {"data_path": str(options.text), "context_lengths": options.lengths, "num_samples": 2}
    metadata["stride"] = min(options.lengths) // 2
    most_tokens = max(options.lengths) + 256
    loaded = {"pretrained": model, "dtype": "float32", "max_length": most_tokens}
    on_cpu = ("--device", "cpu")
    results: dict[str, dict[str, float]] = {}

    def keep(run: Run, limit: int = options.limit) -> None:
        results[run.backend] = execute(run, metadata, limit, options.out)

    if "hf" in options.backends:
        in_float32 = {"softmax_dtype": "float32"}
        keep(Run(backend="hf", model="hf", arguments={**loaded, **in_float32}, tasks=options.tasks, options=on_cpu))
    if "sb" in options.backends:
        keep(Run(backend="sb", model="sb", arguments=loaded, tasks=options.tasks, options=on_cpu))
    if "vllm-server" in options.backends:
        with served(options.model, free_port(), options.out / "server.log", most_tokens) as address:
            completions = {
                "model": "model",
                "base_url": f"{address}/completions",
                "tokenizer": model,
                "tokenizer_backend": "huggingface",
                "max_length": most_tokens,
                "num_concurrent": 1,
            }
            keep(Run(backend="vllm-server", model="local-completions", arguments=completions, tasks=options.tasks))
    if "vllm" in options.backends:
        in_process = {
            "pretrained": model,
            "dtype": "float32",
            "max_model_len": most_tokens,
            "enforce_eager": True,
            "enable_prefix_caching": False,
        }
        keep(Run(backend="vllm", model="vllm", arguments=in_process, tasks=options.tasks))
    answered = {name: metrics for name, metrics in results.items() if metrics}
    if "hf" not in answered or len(answered) < 2:
        raise SystemExit(f"There is nothing to compare: see the logs in {options.out}.")
    largest = print_table(answered, "hf")
    print(f"largest difference of an NLL: {largest:.2e} nats per token")


if __name__ == "__main__":
    main()
