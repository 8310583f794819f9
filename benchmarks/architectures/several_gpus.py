"""An 8B on one GPU, with its layers spread over two, and with every matrix shared by two processes: time and memory.

    PYTHONPATH=benchmarks:benchmarks/architectures python benchmarks/architectures/several_gpus.py
        [--ways one,spread,plan] [--dtype float32 --layers 4 --length 4096] [--profile]

Llama 3 8B's sizes with random weights, in a folder of its own. Each way is a process, or two, of `sb`:

| way | `--model_args` |
|---|---|
| one | nothing more: one GPU |
| spread | `parallelize=True`; then the same with one stream a GPU |
| plan | `tp_plan=auto`, in a process for each GPU |

Windows of one text go through `loglikelihood_rolling`; four prompts are continued by 32 tokens through
`generate_until` at batch size 4; short prompts by 256, four at once and one, where a step is nearly all there is. One
call of each kind goes before the clock, then `--rounds` of them, whose medians the table has. Without two GPUs all is
small, two processes share a CPU, and the table says only that it runs.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import torch
import transformers
from harness import text_of, tokenizer
from lm_eval.api.instance import Instance
from measuring import machine

GPU = torch.cuda.device_count() > 1
SIZES: dict[str, Any] = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"head_dim": 128, "vocab_size": 128256, "num_hidden_layers": 32, "max_position_embeddings": 2**17},
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS: dict[str, dict[str, Any]] = {"one": {}, "spread": {"parallelize": True}, "plan": {"tp_plan": "auto"}}


def save(folder: Path, arguments: argparse.Namespace) -> None:
    """Writes the checkpoint."""
    torch.manual_seed(0)
    sizes = {**SIZES, **({} if GPU else SMALL), "num_hidden_layers": arguments.layers}
    config = transformers.LlamaConfig(**sizes, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    with torch.device("cuda" if GPU else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, arguments.dtype))
    model.save_pretrained(folder, max_shard_size="4GB")
    tokenizer(families.ROW).save_pretrained(folder)


def generation(lm: Any, prompts: int, prompt_tokens: int, new_tokens: int) -> str:
    """Continues prompts; what it returns stands for the texts."""
    settings = {"until": [], "max_gen_toks": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    text = text_of(prompt_tokens + prompts, tokenizer(families.ROW))
    requests = [
        Instance("generate_until", {}, (text[place : place + prompt_tokens], dict(settings)), place, ("", place, 1))
        for place in range(prompts)
    ]
    return f"{hash(tuple(lm.generate_until(requests, disable_tqdm=True))) % 10**6:06d}"


def timed(work: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """What a call returns, its seconds, and the most GiB that a GPU held meanwhile."""
    seconds, value = [], work()
    for _ in range(rounds):
        families.attempted(lambda: None)  # what was kept of earlier calls goes, and peaks begin anew
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        value = work()
        seconds.append(time.perf_counter() - started)
    peaks = [torch.cuda.max_memory_allocated(device) / 2**30 for device in range(torch.cuda.device_count())]
    return {"seconds": statistics.median(seconds), "spread": max(seconds) / min(seconds) - 1, "gib": peaks, "is": value}


def measure(way: str, folder: str, arguments: argparse.Namespace) -> None:
    """Prints what one way took, as JSON, in the first process."""
    from sbeval.model_adapters.lm import StickBreakingLM

    started = time.perf_counter()
    lm: Any = StickBreakingLM(
        folder, dtype=arguments.dtype, max_length=arguments.length, batch_size=4, device=DEVICE, **WAYS[way]
    )
    lm.tok_encode = functools.cache(lm.tok_encode)  # not what is compared
    loading = time.perf_counter() - started
    windows = functools.partial(families.window, lm, arguments.windows * arguments.length)
    windows_of: dict[str, Callable[[], Any]] = {"windows": lambda: windows() / (arguments.windows * arguments.length)}
    if way == "spread" and lm.session.relay is not None:
        relayed = lm.session
        in_turn = dataclasses.replace(relayed, relay=None, batches_ahead=1)

        def one_stream() -> Any:
            lm.session = in_turn
            try:
                return windows_of["windows"]()
            finally:
                lm.session = relayed

        windows_of["windows, one stream a GPU"] = one_stream
    short, new = (256, 256) if GPU else (16, 8)
    works = {
        **windows_of,
        "4 long prompts": lambda: generation(lm, 4, arguments.prompt_tokens, 32 if GPU else 4),
        "4 short prompts": lambda: generation(lm, 4, short, new),
        "1 short prompt": lambda: generation(lm, 1, short, new),
    }
    works = {name: work for name, work in works.items() if any(name.startswith(each) for each in arguments.work)}
    taken = {name: timed(work, arguments.rounds) for name, work in works.items()}
    if arguments.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            windows()
        if int(os.environ.get("RANK", "0")) == 0:
            print(
                profile.key_averages().table(sort_by="self_device_time_total", row_limit=30, max_name_column_width=90)
            )
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps({"way": way, "loading": loading, **taken}), flush=True)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--work", nargs="+", default=["windows", "4 long", "4 short", "1 short"])
    parser.add_argument("--dtype", default="bfloat16" if GPU else "float32")
    parser.add_argument("--layers", type=int, default=32 if GPU else 2)
    parser.add_argument("--length", type=int, default=65536 if GPU else 64)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=16384 if GPU else 32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.way:
        measure(arguments.way, arguments.folder, arguments)
        return
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), arguments)
        for way in arguments.ways.split(","):
            launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2"] if way == "plan" else []
            command = [sys.executable, *launcher, __file__, "--way", way, "--folder", folder, *sys.argv[1:]]
            ran = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}, stdout=subprocess.PIPE, text=True)
            lines = ran.stdout.splitlines()
            results = [json.loads(line) for line in lines if line.startswith('{"way"')]
            print(*(line for line in lines if not line.startswith('{"way"')), sep="\n", flush=True)
            for taken in results:
                print(f"{way}: loaded in {taken['loading']:.1f} s")
                for name, row in taken.items():
                    if isinstance(row, dict):
                        memory = " and ".join(f"{gib:.1f}" for gib in row["gib"])
                        print(f"| {way} | {name} | {row['seconds']:.3f} s (spread {row['spread']:.1%}) | ", end="")
                        print(f"{memory} GiB | {row['is']} |", flush=True)
            if not results:
                print(f"| {way} | ended with {ran.returncode} |", flush=True)


if __name__ == "__main__":
    main()
