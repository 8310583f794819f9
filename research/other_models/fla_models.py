r"""Makes a small random model of each of flash-linear-attention's classes and runs it through `sb`, in one table.

    python -m research.other_models.fla_models --out build/fla_models [--classes GLA Mamba2] [--lengths 4096 65536]

Needs flash-linear-attention and a GPU; on a CPU it says which models load. A model has the demo's tokenizer, so what it
scores and writes is random: the table says what runs, not what is good. Each class runs in processes of its own: one
scores the interpreter's own library under two protocols, one answers a task of RULER's by generating. What fails is
said with the sentence that it failed with; a class without a cache generates by reading everything anew, or not at all.
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
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

import sbeval.demo.evaluation
from sbeval.checkpoints import load_checkpoint
from sbeval.errors import UserError, first_line

TOKENIZER = Path(sbeval.demo.evaluation.__file__).with_name("checkpoints") / "stickbreaking"
SIZES: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 64}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "Mamba2": {"num_heads": 8},  # twice as wide inside
    "LogLinearMamba2": {"num_heads": 8},
    "Mamba3": {"num_heads": 8},
}
"""What differs, by class without its ending."""
SCORING = ("sb_stdlib_stream", "sb_stdlib_fixed_target")
GENERATING = ("sb_niah_single_1",)
ENDING = "ForCausalLM"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Row(NamedTuple):
    """A line of the table."""

    name: str
    model_type: str
    loaded: str
    scored: str
    generated: str


def classes() -> list[str]:
    """Returns the names of fla's language models without their ending."""
    models = importlib.import_module("fla.models")
    return sorted(name.removesuffix(ENDING) for name in dir(models) if name.endswith(ENDING))


def make(name: str, folder: Path) -> str:
    """Writes a random model of a class with the demo's tokenizer, and returns its model type."""
    kind: Any = getattr(importlib.import_module("fla.models"), name + ENDING)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    known = inspect.signature(kind.config_class.__init__).parameters
    sizes = {key: value for key, value in (SIZES | OWN_SIZES.get(name, {})).items() if key in known}
    tokens = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id")}
    torch.manual_seed(0)
    model = kind(kind.config_class(vocab_size=len(tokenizer), **sizes, **tokens)).to(torch.bfloat16)
    model.save_pretrained(folder)
    for file in TOKENIZER.glob("*token*"):
        shutil.copy(file, folder)
    return str(model.config.model_type)


def run(tasks: Sequence[str], folder: Path, out: Path, options: argparse.Namespace) -> str:
    """Returns the numbers of a run by context length, or the last sentence that it printed."""
    lengths, samples = options.lengths, options.samples
    metadata = {"context_lengths": lengths} | ({"num_samples": samples} if tasks == GENERATING else {})
    command = [sys.executable, "-P", "-m", "sbeval", "run", "--tasks", ",".join(tasks), "--device", DEVICE]
    command += ["--model_args", f"pretrained={folder},dtype=bfloat16,max_length={max(lengths) + 256}"]
    command += ["--metadata", json.dumps(metadata), "--limit", str(samples), "--batch_size", "1"]
    command += ["--output_path", str(out)]
    start = time.perf_counter()
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"no: not done in {options.seconds} s"
    (out / f"{tasks[0]}.log").write_text(process.stdout + process.stderr, encoding="utf-8")
    if process.returncode:
        lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
        return "no: " + re.sub(r"[|\s]+", " ", lines[-1] if lines else f"exit code {process.returncode}")[:300]
    newest = max(out.glob("**/results_*.json"), key=lambda file: file.stat().st_mtime)
    found = json.loads(newest.read_text(encoding="utf-8"))["results"]
    parts = []
    for task in tasks:
        metric = "nll" if task in SCORING else "score"
        numbers = {
            key.partition(",")[0].partition("@")[2]: value
            for key, value in found[task].items()
            if key.startswith(f"{metric}@") and isinstance(value, int | float)
        }
        parts.append(" ".join(f"{int(length)}: {value:.2f}" for length, value in numbers.items()) or "no numbers")
    return f"{'; '.join(parts)} ({time.perf_counter() - start:.0f} s)"


def row(name: str, options: argparse.Namespace) -> Row:
    """Makes, loads and runs one class."""
    folder, out = options.out / name / "model", options.out / name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        model_type = make(name, folder)
    except Exception as error:  # classes of another package may raise anything for sizes that they do not take
        return Row(name, "", f"not made: {type(error).__name__}: {first_line(error)[:200]}", "", "")
    try:
        checkpoint = load_checkpoint(folder)
        # transformers has classes of its own for some of the types
        loaded = f"{checkpoint.format}, by {type(checkpoint.model).__module__.partition('.')[0]}"
    except UserError as error:
        return Row(name, model_type, f"no: {first_line(error)[:300]}", "", "")
    if not torch.cuda.is_available():
        return Row(name, model_type, loaded, "not run: no GPU", "not run: no GPU")
    results = [run(tasks, folder, out, options) for tasks in (SCORING, GENERATING)]
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
    return Row(name, model_type, loaded, *results)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for models, logs, results and table.md")
    parser.add_argument("--classes", nargs="+", default=None, help="names without ForCausalLM; all of them by default")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 65536])
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=4, help="classes at a time")
    parser.add_argument("--seconds", type=int, default=900, help="of one run at most")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import fla

    header = [f"flash-linear-attention {fla.__version__}, torch {torch.__version__}", ""]
    header += ["| class | model type | loaded as | scored: NLL by length | generated: score by length |"]
    header += ["|---|---|---|---|---|"]
    table = options.out / "table.md"
    table.write_text("\n".join(header) + "\n", encoding="utf-8")
    print("\n".join(header), flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = [pool.submit(row, name, options) for name in options.classes or classes()]
        for done in as_completed(rows):
            line = f"| {' | '.join(part.replace('|', '/') for part in done.result())} |"
            print(line, flush=True)
            with table.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
