r"""Makes a small random model of each of flash-linear-attention's classes and runs it through `sb`.

    python -m research.other_models.fla_models --out build/fla_models [--classes GLA Mamba2] [--gpus 2] [--jobs 32]

Needs flash-linear-attention and a GPU; on a CPU it says which models load. A model has the demo's tokenizer, so what it
scores and writes is random: this says what runs, not what is good. `research.other_models.fla_table` makes a table of
the rows.jsonl that it leaves, a line for each class as it finishes.

Each class runs in a process of its own, which scores the interpreter's own library under two protocols and answers a
task of RULER's by generating; if that fails, in one process each, since one may work without the other. What fails is
said with the sentence that it failed with.

What keeps it short: kernels are not tuned (`untuned`), which took minutes a class; all processes share one folder of
compiled kernels; one length, 64K, with one window and one prompt; 16 tokens of an answer, as classes without a cache
read everything anew for each; two layers, since some errors show where a second layer reads the first one's output.
"""

import argparse
import contextlib
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from transformers import AutoTokenizer

import sbeval.demo.evaluation
from research.other_models.fla_table import NOT_FINISHED, Row
from sbeval.checkpoints import load_checkpoint
from sbeval.errors import UserError, first_line

TOKENIZER = Path(sbeval.demo.evaluation.__file__).with_name("checkpoints") / "stickbreaking"
SIZES: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 64}
OWN_SIZES: dict[str, dict[str, Any]] = {
    # without mamba_ssm it holds products of all pairs in a chunk; a residual stream in fp32 fails in bfloat16
    "Mamba2": {"expand": 1, "state_size": 16, "chunk_size": 128, "residual_in_fp32": False},
    "LogLinearMamba2": {"num_heads": 8},  # twice as wide inside
    "Mamba3": {"num_heads": 8},
    "NSA": {"num_heads": 16, "num_kv_heads": 1, "window_size": 0},  # its sliding window needs flash-attn
    # the attention of rodimus_plus needs flash-attn; blocks go by the first residual key, the model by the second
    "Rodimus": {"block_type": "rodimus", "residual_in_fp32": True, "block_residual_in_fp32": True},
    "YOCO": {
        "num_self_decoder_layers": 1,
        "self_decoder_attn": {"num_heads": 4, "head_dim": 64},
        "cross_decoder_attn": {"num_heads": 4},
    },
}
"""What differs, by class without its ending."""
SCORING = ("sb_stdlib_stream", "sb_stdlib_fixed_target")
GENERATING = ("sb_niah_single_1",)
ANSWER_TOKENS = 16
ROOM_TOKENS = 512  # behind the longest context, for an answer and for what CAT pads to
ENDING = "ForCausalLM"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAKING = threading.Lock()
"""Making and loading a model sets PyTorch's default dtype, which threads share."""


def classes() -> list[str]:
    """Returns the names of fla's language models without their ending."""
    models = importlib.import_module("fla.models")
    return sorted(name.removesuffix(ENDING) for name in dir(models) if name.endswith(ENDING))


def make(name: str, folder: Path, longest: int) -> str:
    """Writes a random model of a class with the demo's tokenizer, and returns its model type."""
    kind: Any = getattr(importlib.import_module("fla.models"), name + ENDING)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    # some configurations hand keys on to those they derive from
    known = {key for owner in kind.config_class.__mro__ for key in inspect.signature(owner.__init__).parameters}
    sizes = SIZES | {"max_position_embeddings": longest + ROOM_TOKENS} | OWN_SIZES.get(name, {})
    sizes = {key: value for key, value in sizes.items() if key in known}
    tokens = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id")}
    torch.manual_seed(0)
    model = kind(kind.config_class(vocab_size=len(tokenizer), **sizes, **tokens)).to(torch.bfloat16)
    model.save_pretrained(folder)
    for file in TOKENIZER.glob("*token*"):
        shutil.copy(file, folder)
    return str(model.config.model_type)


def run(tasks: Sequence[str], folder: Path, out: Path, gpu: int, options: argparse.Namespace) -> dict[str, Any] | str:
    """Returns a run's results by task, or the last sentence that it printed."""
    length, samples = options.length, options.samples
    untuned = Path(__file__).with_name("untuned.py")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = [sys.executable, "-P", str(untuned), "run", "--tasks", ",".join(tasks), "--device", DEVICE]
    command += ["--model_args", f"pretrained={folder},dtype=bfloat16,max_length={length + ROOM_TOKENS // 2}"]
    command += ["--metadata", json.dumps({"context_lengths": [length], "num_samples": samples})]
    command += ["--gen_kwargs", f"max_gen_toks={ANSWER_TOKENS}", "--limit", str(samples), "--batch_size", "1"]
    command += ["--output_path", str(out)]
    environment = {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # otherwise each process starts one for every core
        **os.environ,
        "CUDA_VISIBLE_DEVICES": visible.split(",")[gpu] if visible else str(gpu),
        "TRITON_CACHE_DIR": str((options.out / "triton").resolve()),
    }
    keep = {"capture_output": True, "text": True, "check": False, "env": environment}
    try:
        process = subprocess.run(command, timeout=options.seconds, **keep)
    except subprocess.TimeoutExpired:
        return f"{NOT_FINISHED} in {options.seconds} s"
    (out / f"{'+'.join(tasks)}.log").write_text(process.stdout + process.stderr, encoding="utf-8")
    if process.returncode:
        lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
        return "no: " + re.sub(r"[|\s]+", " ", lines[-1] if lines else f"exit code {process.returncode}")[:300]
    newest = max(out.glob("**/results_*.json"), key=lambda file: file.stat().st_mtime)
    results: dict[str, Any] = json.loads(newest.read_text(encoding="utf-8"))["results"]
    return results


def said(tasks: Sequence[str], found: dict[str, Any] | str) -> str:
    """Returns the numbers of some tasks, or the sentence in their place."""
    if isinstance(found, str):
        return found
    metric = "nll@" if tasks == SCORING else "score@"
    values = [value for task in tasks for key, value in found[task].items() if key.startswith(metric)]
    return ", ".join(f"{value:.2f}" for value in values if isinstance(value, int | float)) or "no: no numbers"


def row(name: str, gpu: int, options: argparse.Namespace) -> Row:
    """Makes, loads and runs one class."""
    folder, out = options.out / name / "model", options.out / name
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with MAKING:
        try:
            model_type = make(name, folder, options.length)
        except Exception as error:  # classes of another package may raise anything for sizes that they do not take
            no = f"no: {type(error).__name__}: {first_line(error)[:200]}"
            return Row(name, "", no, no, no, 0, options.where)
        try:
            checkpoint = load_checkpoint(folder)
        except UserError as error:
            no = f"no: {first_line(error)[:300]}"
            return Row(name, model_type, no, no, no, 0, options.where)
        # transformers has classes of its own for some of the types
        loaded = f"{checkpoint.format}, by {type(checkpoint.model).__module__.partition('.')[0]}"
        del checkpoint
    if DEVICE == "cpu":
        return Row(name, model_type, loaded, *["no: it needs a GPU"] * 2, 0, options.where)
    found = run(SCORING + GENERATING, folder, out, gpu, options)
    if isinstance(found, str):
        texts = [said(tasks, run(tasks, folder, out, gpu, options)) for tasks in (SCORING, GENERATING)]
    else:
        texts = [said(tasks, found) for tasks in (SCORING, GENERATING)]
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
    return Row(name, model_type, loaded, *texts, round(time.perf_counter() - start), options.where)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for models, logs, results and rows.jsonl")
    parser.add_argument("--classes", nargs="+", default=None, help="names without ForCausalLM; all of them by default")
    parser.add_argument("--length", type=int, default=65536, help="context length in tokens")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=16, help="classes at a time, over all GPUs")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that share the classes")
    parser.add_argument("--seconds", type=int, default=240, help="of one process at most; a class has up to three")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    import fla

    versions = {"flash-linear-attention": fla, "torch": torch, "triton": triton, "transformers": transformers}
    device = torch.cuda.get_device_name(0) if DEVICE == "cuda" else "a CPU"
    said_versions = ", ".join(f"{name} {module.__version__}" for name, module in versions.items())
    options.where = f"{said_versions}, {device}, {options.length:,} tokens"
    print(options.where, flush=True)
    with ThreadPoolExecutor(options.jobs) as pool, (options.out / "rows.jsonl").open("w", encoding="utf-8") as file:
        names = options.classes or classes()
        rows = [pool.submit(row, name, index % options.gpus, options) for index, name in enumerate(names)]
        for done in as_completed(rows):
            print(" | ".join(str(part) for part in done.result()[:-1]), flush=True)
            file.write(json.dumps(done.result()._asdict()) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
