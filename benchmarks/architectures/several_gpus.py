"""An 8B model on one GPU, with layer placement on several, and with tensor parallelism: time and memory.

    PYTHONPATH=benchmarks:benchmarks/architectures python benchmarks/architectures/several_gpus.py
        [--ways one,spread,plan] [--work windows,long,short,single] [--profile]
        [--dtype float32 --layers 4 --length 4096 --prompt-tokens 1024]

Llama 3 8B's sizes with random weights, in a folder of its own. Each way is a process, or several, of `sb`: nothing more
than one GPU, `parallelize=True`, and `tp_plan=auto` in a process for each GPU. `windows` of one text go through
`loglikelihood_rolling`; with `in turn`, a spread model has one stream a GPU for all of them. Through `generate_until`
go four `long` prompts, continued by 32 tokens, and four `short` ones and a `single` one, continued by 256, where steps
are nearly all there is. One call, or two windows, goes before the clock; then come `--rounds` calls, of which the table
has the medians. Without two GPUs all is small, and says only that it runs.
"""

import argparse
import dataclasses
import functools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import torch
import transformers
from harness import text_of, tokenizer
from lm_eval.api.instance import Instance
from measuring import machine

from sbeval.model_adapters.lm import StickBreakingLM

GPU = torch.cuda.device_count() > 1
PROCESSES = str(max(number for number in (2, 4, 8) if number <= max(2, torch.cuda.device_count())))
SIZES: dict[str, Any] = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"head_dim": 128, "vocab_size": 128256, "num_hidden_layers": 32, "max_position_embeddings": 2**17},
}
SMALL = {
    **{"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 512},
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = {"between GPUs": "nccl|Memcpy PtoP", "attention": "fmha|flash|sdpa|attn", "products": "gemm|nvjet|cutlass|xmma"}
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
    """Continues prompts; returns a hash of the texts."""
    settings = {"until": [], "max_gen_toks": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    text = text_of(prompt_tokens + prompts, tokenizer(families.ROW))
    requests = [
        Instance("generate_until", {}, (text[place : place + prompt_tokens], dict(settings)), place, ("", place, 1))
        for place in range(prompts)
    ]
    return f"{hash(tuple(lm.generate_until(requests, disable_tqdm=True))) % 10**6:06d}"


def timed(warm: Callable[[], Any], work: Callable[[], Any], rounds: int) -> str:
    """Returns a call's seconds, the peak GiB of each GPU, and its result, as cells."""
    seconds, value = [], warm()
    for _ in range(rounds):
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        value = work()
        seconds.append(time.perf_counter() - started)
    peaks = [torch.cuda.max_memory_allocated(device) / 2**30 for device in range(torch.cuda.device_count())]
    held = " and ".join(f"{peak:.1f}" for peak in peaks if peak) or "no"
    spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
    return f"{statistics.median(seconds):.3f} s ({spread}) | {held} GiB | {value}"


def kernels_of(work: Callable[[], Any]) -> str:
    """Returns the first GPU's seconds by kind of kernel, and its ten longest other kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
    seconds: Counter[str] = Counter()
    others: Counter[str] = Counter()
    for event in profile.key_averages():
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, event.key)), None)
        (seconds if kind else others)[kind or event.key[:70]] += event.self_device_time_total / 1e6
    rows = [*seconds.most_common(), ("all others", sum(others.values())), *others.most_common(10)]
    return "\n".join(f"| {name} | {value:.3f} s |" for name, value in rows)


def measure(way: str, folder: str, arguments: argparse.Namespace) -> None:
    """Prints the measurements of one mode on rank 0, one row for each workload."""
    first = int(os.environ.get("RANK", "0")) == 0
    lm: Any = StickBreakingLM(
        folder, dtype=arguments.dtype, max_length=arguments.length, batch_size="auto", device=DEVICE, **WAYS[way]
    )
    lm.tok_encode = functools.cache(lm.tok_encode)  # not what is compared
    tokens = arguments.windows * arguments.length
    lm.tok_encode(families.shared_text(tokens))
    windows: Callable[[], Any] = lambda: families.window(lm, tokens) / tokens  # noqa: E731
    short, new = (256, 256) if GPU else (16, 8)
    works: dict[str, Callable[[], Any]] = {
        "windows": windows,
        "in turn": windows,
        "long": lambda: generation(lm, 4, arguments.prompt_tokens, 32 if GPU else 4),
        "short": lambda: generation(lm, 4, short, new),
        "single": lambda: generation(lm, 1, short, new),
    }
    relayed = lm.session
    for name in arguments.work.split(","):
        if name == "in turn" and relayed.relay is None:
            continue
        lm.session = dataclasses.replace(relayed, relay=None, batches_ahead=1) if name == "in turn" else relayed
        two_windows = functools.partial(families.window, lm, 2 * arguments.length)
        row = timed(two_windows if works[name] is windows else works[name], works[name], arguments.rounds)
        if first:
            print(f"| {way} | {name} | {row} |", flush=True)
    if arguments.profile and GPU:
        table = kernels_of(two_windows)
        if first:
            print(table, flush=True)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--work", default="windows,long,short,single", help="and: in turn")
    parser.add_argument("--dtype", default="bfloat16" if GPU else "float32")
    parser.add_argument("--layers", type=int, default=32 if GPU else 2)
    parser.add_argument("--length", type=int, default=65536 if GPU else 64)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=16384 if GPU else 32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.way:
        measure(arguments.way, arguments.folder, arguments)
        return
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), arguments)
        for way in arguments.ways.split(","):
            launcher = ["-m", "torch.distributed.run", "--nproc_per_node", PROCESSES] if way == "plan" else []
            command = [sys.executable, *launcher, __file__, "--way", way, "--folder", folder, *sys.argv[1:]]
            ended = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}).returncode
            if ended:
                print(f"| {way} | ended with {ended} |", flush=True)


if __name__ == "__main__":
    main()
