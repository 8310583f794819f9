"""How long it takes to build RULER's prompts: these tasks against lm-eval's own, side by side.

Both sides build the same number of samples with the same tokenizer in the same process, from the task getting its
configuration to its last request being ready; imports and loading the tokenizer are left out. The warm time is a
second build that finds what the first one kept on disk. Times are medians over repetitions, in turn: ours, theirs,
ours, theirs, so that a machine that others use as well slows both down alike.

    python benchmarks/ruler.py TOKENIZER [--lengths 16384,65536] [--tasks niah_single_1,vt] [--repeats 3]
    python benchmarks/ruler.py TOKENIZER --fill --lengths 4096 [--metadata '{"squad": "FILE", "essays": "DIR"}']
    python benchmarks/ruler.py TOKENIZER --lengths 2097152 --tasks sb_json_kv,sb_copy_passage --samples 1 --ours-only

The form with --fill measures no time: it prints what share of the budget prompts fill, as they are here and with
`scripts: nvidia`, and where the paragraph with the answer stands.

With `--model`, whole runs of our tasks instead, each `sbeval run` in this process with an empty cache, and where their
seconds go: building prompts (from when the model is loaded to its first request), reading prompts, decoding, and the
rest. The device is waited for around each part, which a run itself does not do.

    python benchmarks/ruler.py --model CHECKPOINT [--lengths 1024,16384] [--tasks sb_niah_single_1,...] [--samples 50]
    python benchmarks/ruler.py --model CHECKPOINT --random 1b [--metadata '{"essays": "DIR", "squad": "FILE"}'] ...

With `--random`, the model is one of the paper's sizes with random weights, whose sticks break within some twenty
tokens, and CHECKPOINT's tokenizer; few of its answers end before a task's longest. Needles in essays and questions need
the texts named in `--metadata`; no texts are needed by `sb_niah_single_1`, `sb_niah_multikey_2`, `sb_niah_multikey_3`,
`sb_ruler_vt`, `sb_ruler_cwe` and `sb_ruler_fwe`.
"""

import argparse
import contextlib
import importlib
import io
import json
import logging
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

OURS = {
    "niah_single_1": "sb_niah_single_1",
    "niah_multikey_2": "sb_niah_multikey_2",
    "niah_multikey_3": "sb_niah_multikey_3",
    "vt": "sb_ruler_vt",
}
THEIRS = {"vt": "ruler_vt"}
SAMPLES = 500


def seconds(build: Callable[[], object]) -> float:
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        build()
    return time.perf_counter() - start


def build_task(manager: Any, name: str) -> Any:
    task = manager.load([name])["tasks"][name]
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=None, rank=0, world_size=1)
    return task


def time_ours(name: str, metadata: dict[str, Any]) -> tuple[float, float]:
    """Returns cold and warm seconds; a cold build has an empty cache."""
    from lm_eval.tasks import TaskManager

    folder = Path(__import__("sbeval.tasks", fromlist=["x"]).__file__).parent
    manager = TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SBEVAL_CACHE"] = cache
        cold, warm = (seconds(lambda: build_task(manager, name)) for _ in range(2))
    return cold, warm


def time_theirs(name: str, metadata: dict[str, Any], length: int) -> float:
    import lm_eval.tasks as package
    from lm_eval.tasks import TaskManager

    folder = str(Path(package.__file__).parent / "ruler")
    manager = TaskManager(
        include_path=folder, include_defaults=False, metadata={**metadata, "max_seq_lengths": [length]}
    )
    for module in ("niah_utils", "vt_utils"):  # with NLTK's and wonderwords' data
        seconds(lambda module=module: importlib.import_module(f"lm_eval.tasks.ruler.{module}"))
    common = importlib.import_module("lm_eval.tasks.ruler.common_utils")
    common.get_tokenizer(metadata["tokenizer"])
    return seconds(lambda: build_task(manager, name))


@contextlib.contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """Seconds of the parts of runs, and how many prompts were read."""
    from sbeval.model_adapters.generate import requests
    from sbeval.model_adapters.generate.slots.stepper import Stepper
    from sbeval.model_adapters.lm import StickBreakingLM

    found: dict[str, float] = defaultdict(float)
    loaded = float("nan")

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal loaded
            wait = torch.cuda.synchronize if torch.cuda.is_available() else bool
            wait()
            started = time.perf_counter()
            if name == "all answers":
                found["building prompts"] += started - loaded
            result = function(*args, **kwargs)
            wait()
            found[name] += time.perf_counter() - started
            if name == "loading":
                loaded = time.perf_counter()
            return result

        return wrapper

    parts = [
        (StickBreakingLM, "__init__", "loading"),
        (StickBreakingLM, "generate_until", "all answers"),
        (requests, "encode_prompts", "encoding prompts"),
        (Stepper, "start", "reading prompts"),
        (Stepper, "run", "decoding"),
        (Stepper, "capture", "recording"),
    ]
    with contextlib.ExitStack() as patched:
        for owner, method, name in parts:
            patched.enter_context(mock.patch.object(owner, method, timed(name, getattr(owner, method))))
        yield found


def random_checkpoint(tokenizer: str, size: str, dtype: str, folder: str) -> str:
    """Writes a model of a preset with random weights, and returns its folder."""
    import transformers

    from sbeval.models import preset

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(preset(size), dtype=getattr(torch, dtype))
    model.save_pretrained(f"{folder}/{size}")
    transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(f"{folder}/{size}")
    return f"{folder}/{size}"


def end_to_end(arguments: argparse.Namespace, model: str) -> None:
    """Prints one row a run: of each task, or of all together."""
    from sbeval.harness.run import run

    lengths = [int(length) for length in arguments.lengths.split(",")]
    own = {"context_lengths": lengths, "num_samples": arguments.samples or 50}
    metadata = json.dumps({**arguments.metadata, **own})
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    for task in [arguments.tasks] if arguments.together else arguments.tasks.split(","):
        with tempfile.TemporaryDirectory() as folder, timed_parts() as parts:
            os.environ["SBEVAL_CACHE"] = folder
            output = arguments.keep or f"{folder}/out"
            command = [
                "--model_args",
                f"pretrained={model},dtype={dtype},{arguments.arguments}".rstrip(","),
                "--tasks",
                task,
            ]
            options = ["--metadata", metadata, "--output_path", output, *arguments.options.split()]
            total = seconds(lambda command=command, options=options: run([*command, *options]))
            newest = max(Path(output).glob("**/results_*.json"), key=lambda file: file.stat().st_mtime)
            results = json.loads(newest.read_text())["results"]
        row: dict[str, Any] = {
            "task": task,
            "lengths": lengths,
            "samples": arguments.samples or 50,
            "seconds": round(total, 1),
        }
        row |= {name: round(taken, 1) for name, taken in parts.items()}
        row["scores"] = {
            name: [round(x, 3) for key, x in found.items() if isinstance(x, float) and "stderr" not in key]
            for name, found in results.items()
        }
        print(json.dumps(row), flush=True)


FILLED = ("sb_niah_single_1", "sb_niah_multikey_2", "sb_ruler_vt", "sb_ruler_cwe", "sb_ruler_fwe")
NEEDS = {"squad": ("sb_ruler_qa_squad",), "essays": ("sb_niah_single_2",)}
FILLED_SAMPLES = 100


def print_fill(length: int, metadata: dict[str, Any]) -> None:
    """Prints the least and most of the budget that prompts fill, and mean depths, under both rules."""
    from lm_eval.tasks import TaskManager

    from sbeval.tasks.ruler.drafts import Frame

    folder = Path(__import__("sbeval.tasks", fromlist=["x"]).__file__).parent
    for name in (*FILLED, *(task for key, tasks in NEEDS.items() if key in metadata for task in tasks)):
        row: dict[str, Any] = {"task": name, "length": length}
        for rule in (None, "nvidia"):
            own = {**metadata, "context_lengths": [length], "num_samples": FILLED_SAMPLES, "scripts": rule}
            task = TaskManager(include_path=str(folder), include_defaults=False, metadata=own).load([name])
            (task,) = task["tasks"].values()
            sizes = task.sizes.filler(length, Frame()).sizes(range(FILLED_SAMPLES)).values()
            filled = [size.prompt_tokens / (length - task.generated_tokens) for size in sizes]
            row[f"filled_{rule or 'here'}"] = [round(min(filled), 3), round(max(filled), 3)]
            if depths := [percent for size in sizes for percent in size.depths_percent]:
                row[f"depth_percent_{rule or 'here'}"] = [round(min(depths), 1), round(median(depths), 1), max(depths)]
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", nargs="?")
    parser.add_argument("--model", help="checkpoint of whole runs")
    parser.add_argument("--random", metavar="PRESET", help="random weights of this size, with the tokenizer of --model")
    parser.add_argument("--samples", type=int, default=None, help="for each length")
    parser.add_argument("--options", default="", help="more options of sbeval run")
    parser.add_argument("--arguments", default="", help="more of --model_args")
    parser.add_argument("--together", action="store_true", help="all tasks in one run")
    parser.add_argument("--keep", default=None, metavar="FOLDER", help="where to leave results and samples")
    parser.add_argument("--lengths", default="16384,65536")
    parser.add_argument("--examples-file", default=None, help="labelled texts of sb_many_shot_file")
    parser.add_argument("--tasks", default="niah_single_1,niah_multikey_2,vt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--fill", action="store_true")
    parser.add_argument("--metadata", type=json.loads, default={})
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.model:
        with tempfile.TemporaryDirectory() as folder:
            model = arguments.model
            if arguments.random:
                dtype = "bfloat16" if torch.cuda.is_available() else "float32"
                model = random_checkpoint(model, arguments.random, dtype, folder)
            end_to_end(arguments, model)
        return
    metadata = {"tokenizer": arguments.tokenizer, "examples_file": arguments.examples_file, **arguments.metadata}
    for length in map(int, arguments.lengths.split(",")):
        if arguments.fill:
            print_fill(length, metadata)
            continue
        for task in arguments.tasks.split(","):
            ours_metadata = {**metadata, "context_lengths": [length], "num_samples": arguments.samples or SAMPLES}
            name = OURS.get(task, task)
            time_ours(name, {**ours_metadata, "context_lengths": [4096], "num_samples": 2})  # imports and the tokenizer
            cold, warm, theirs = [], [], []
            for _ in range(arguments.repeats):
                for times, taken in zip((cold, warm), time_ours(name, ours_metadata), strict=True):
                    times.append(taken)
                if not arguments.ours_only:
                    theirs.append(time_theirs(THEIRS.get(task, task), metadata, length))
            row: dict[str, Any] = {"task": task, "length": length, "repeats": arguments.repeats}
            row |= {"ours_cold_s": round(median(cold), 3), "ours_warm_s": round(median(warm), 3)}
            if theirs:
                row |= {"lm_eval_s": round(median(theirs), 2), "times_faster": round(median(theirs) / median(cold), 1)}
            print(json.dumps(row | {"cores": os.cpu_count(), "machine": platform.machine()}), flush=True)


if __name__ == "__main__":
    main()
