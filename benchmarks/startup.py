"""What does sbeval add to every start of Python, and what does a checkpoint's fingerprint add to a start of a sweep?

Two fresh virtual environments, one with `sbeval_autoload.pth`, take turns to run `python -c pass`; the difference of
each pair is one measurement. Run: `python benchmarks/startup.py [PAIRS]`. With `--weights-gb N` the fingerprint of a
folder with one file of N GB of random bytes is timed instead, each time in a fresh process: the first reads the file,
later ones know its hash, and the last finds 4 KiB changed in its middle with size and time kept. With `--commands N`
the CPU time of help and of what is refused is measured, N times each in turn; `--sbeval FILE` names the command of
another installation to measure instead. With `--stages "OPTIONS"`, those of `sbeval run`, the run is started with empty
caches (SBEVAL_CACHE, Triton's and Inductor's) and then three times with what the first start kept. A table shows the
seconds of each stage; what Triton compiled is part of the stages.
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sbeval.commands import install_plugin
from sbeval.processes.garbage import skip_collections_at_exit

RESAMPLES = 2000
PIECE_BYTES = 2**20
CHECKPOINT = Path(__file__).parents[1] / "sbeval" / "demo" / "checkpoints" / "rope"
RUN = f"run --model_args pretrained={CHECKPOINT} --tasks"
COMMANDS = (
    "--help",
    "run --help",
    "train --help",
    f"{RUN} sb_stdlib_steam",
    "run --model_args pretrained=/no/such --tasks sb_stdlib",
    f"{RUN} sb_stdlib --metadata context_length=1024",
    f"{RUN} sb_text",
    f"{RUN} sb_stdlib --device cuda:99",
    f"{RUN} sb_stdlib --batch_size abc",
    f"run --tasks sb_stdlib --model_args pretrained={CHECKPOINT},label=x",
    f"run --tasks sb_stdlib --model hf --model_args pretrained={CHECKPOINT},max_lenght=64",
    "run --tasks sb_stdlib --model_args pretrained=no-such-model",
    f"run --model_args pretrained={CHECKPOINT},rope_scaling=dynamc:4 --tasks sb_stdlib",
    "train no_such_recipe",
    "train demo_rope --data /no/such --out out",
    f"extend {CHECKPOINT} --data /no/such --context 2048 --out out",
    "convert /no/such out",
)
IMPORTS = {
    "import torch": ["torch"],
    "import transformers": ["transformers.modeling_utils", "transformers.models.auto.modeling_auto"],
    "import lm-eval": ["lm_eval.evaluator", "lm_eval.models.huggingface"],
    "import sbeval": ["sbeval.model_adapters.lm", "sbeval.tasks.perplexity.fixed_target"],
}
# stages in the order of a run: module and function
FUNCTIONS = {
    "load the model": ("sbeval.model_adapters.lm", "StickBreakingLM.open"),
    "try faster parts": ("sbeval.model_adapters.lm", "prepare"),
    "self-test": ("sbeval.model_adapters.lm", "begin"),
    "tokenise the corpus": ("sbeval.tasks.perplexity.task", "tokenize_corpus"),
    "make requests": ("sbeval.tasks.perplexity.task", "PerplexityTask.build_all_requests"),
    "score": ("sbeval.model_adapters.lm", "StickBreakingLM.token_logprobs"),
}
WARM_STARTS = 3
FINGERPRINT = """
import sys, time
began = time.perf_counter()
from sbeval.fingerprint.checkpoint import checkpoint_parts
imported = time.perf_counter()
checkpoint_parts(sys.argv[1])
print(f"{time.perf_counter() - imported:.3f} s, after {imported - began:.3f} s of imports")
"""


def main(pairs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain, with_line = Path(folder, "plain"), Path(folder, "with_line")
        for environment in (plain, with_line):
            venv.create(environment, symlinks=True)
        (site_packages,) = with_line.glob("lib/python*/site-packages")
        install_plugin.install(site_packages)
        measure_ms(plain)
        measure_ms(with_line)
        without, added = [], []
        for pair in range(pairs):
            order = (plain, with_line) if pair % 2 else (with_line, plain)
            took = {environment: measure_ms(environment) for environment in order}
            without.append(took[plain])
            added.append(took[with_line] - took[plain])
    low, high = interval95(added)
    print(f"python -c pass: median {statistics.median(without):.2f} ms over {pairs} interleaved pairs")
    print(f"the line adds:  median {statistics.median(added):.2f} ms, 95 % interval {low:.2f} to {high:.2f} ms")


def measure_fingerprint(weights_gb: float, place: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=place) as folder:
        weights, piece = Path(folder, "model.safetensors"), random.Random(0).randbytes(PIECE_BYTES)
        with weights.open("wb") as file:
            for _ in range(int(weights_gb * 1e9 / PIECE_BYTES)):
                file.write(piece)
        time.sleep(4)  # the hash of a file that changed a moment ago is not kept
        environment = {**os.environ, "SBEVAL_CACHE": f"{folder}/cache"}

        def start(what: str) -> None:
            command = [sys.executable, "-c", FINGERPRINT, folder]
            took = subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout
            print(f"{weights.stat().st_size / 1e9:.2f} GB, {what}: {took.strip()}")

        start("first")
        for _ in range(3):
            start("again")
        stat = weights.stat()
        with weights.open("r+b") as file:
            file.seek(stat.st_size // 2)
            file.write(bytes(4096))
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        start("changed with size and time kept")


def measure_commands(sbeval: str, times: int) -> None:
    took: dict[str, list[float]] = {command: [] for command in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": folder, "SBEVAL_CACHE": folder}
        for _ in range(times + 1):
            for command, seconds in took.items():
                process = subprocess.Popen(
                    [sbeval, *command.split()],
                    cwd=folder,
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                _, _, used = os.wait4(process.pid, 0)
                seconds.append(used.ru_utime + used.ru_stime)
    for command, seconds in took.items():
        later = seconds[1:]  # the first compiles
        shown = command.replace(str(CHECKPOINT), "CKPT")
        print(f"{statistics.median(later):5.2f} s CPU ({min(later):.2f} to {max(later):.2f})  sbeval {shown}")


def measure_stages(arguments: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        caches = ("SBEVAL_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        environment = {**os.environ, **{name: f"{folder}/{name}" for name in caches}}
        starts = []
        for _ in range(1 + WARM_STARTS):
            command = [sys.executable, __file__, "--stages", arguments, "--one-start", f"{folder}/stages.json"]
            began = time.perf_counter()
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
            took = time.perf_counter() - began
            stages, compiled = json.loads(Path(folder, "stages.json").read_text(encoding="utf-8"))
            starts.append({**stages, "everything else": took - sum(stages.values()), "in all": took, **compiled})
    print(f"sbeval run {arguments}\n{'seconds':24}{'cold':>8}{'warm':>8}")
    for stage, cold in starts[0].items():
        print(f"{stage:24}{cold:8.2f}{statistics.median(start.get(stage, 0.0) for start in starts[1:]):8.2f}")


def one_start(arguments: str, file: str) -> None:
    """Runs `sbeval run` in this process and writes the seconds of each stage to a file."""
    # as `sbeval` does, before the measured imports: functions that they register with `atexit` run earlier
    skip_collections_at_exit()
    stages: dict[str, float] = {}
    compiled = {"Triton: kernels": 0.0, "Triton: seconds": 0.0}

    def timed(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*given: Any, **options: Any) -> Any:
            began, before = time.perf_counter(), sum(stages.values())
            try:
                return call(*given, **options)
            finally:
                nested = sum(stages.values()) - before
                stages[stage] = stages.get(stage, 0.0) + time.perf_counter() - began - nested

        return wrapper

    def import_all(check: Callable[..., Any], *given: Any) -> Any:
        needed = timed("check the options", check)(*given)
        for stage, modules in IMPORTS.items():
            timed(stage, lambda modules=modules: [importlib.import_module(name) for name in modules])()
        import torch

        if torch.cuda.is_available():
            timed("start CUDA", lambda: torch.zeros(1, device="cuda"))()
        for stage, (module, path) in FUNCTIONS.items():
            *kind, name = path.split(".")
            owner = functools.reduce(getattr, kind, importlib.import_module(module))
            setattr(owner, name, timed(stage, getattr(owner, name)))
        with contextlib.suppress(ImportError):
            importlib.import_module("triton").knobs.compilation.listener = count
        return needed

    def count(*, times: Any, cache_hit: bool, **_: Any) -> None:
        compiled["Triton: kernels"] += not cache_hit
        compiled["Triton: seconds"] += 0 if cache_hit else times.total / 1e6

    cli = importlib.import_module("sbeval.commands.cli")
    cli.check_run = functools.partial(import_all, cli.check_run)
    cli.run(shlex.split(arguments))
    Path(file).write_text(json.dumps([stages, compiled]), encoding="utf-8")


def measure_ms(environment: Path) -> float:
    start = time.perf_counter()
    subprocess.run([environment / "bin" / "python", "-c", "pass"], check=True)
    return (time.perf_counter() - start) * 1000


def interval95(values: list[float]) -> tuple[float, float]:
    """Bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=int, nargs="?", default=300, help="how many pairs to time")
    parser.add_argument("--weights-gb", type=float, help="time the fingerprint of a file of this size instead")
    parser.add_argument("--folder", help="where that file lies for a while (default: the system's temporary folder)")
    parser.add_argument("--commands", type=int, metavar="N", help="measure help and refusals instead, N times each")
    parser.add_argument(
        "--sbeval", default=str(Path(sys.executable).with_name("sbeval")), help="the command to measure"
    )
    parser.add_argument("--stages", metavar="OPTIONS", help="measure the stages of `sbeval run OPTIONS` instead")
    parser.add_argument("--one-start", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_start:
        one_start(options.stages, options.one_start)
    elif options.stages:
        measure_stages(options.stages)
    elif options.commands:
        measure_commands(options.sbeval, options.commands)
    elif options.weights_gb:
        measure_fingerprint(options.weights_gb, options.folder)
    else:
        main(options.pairs)
