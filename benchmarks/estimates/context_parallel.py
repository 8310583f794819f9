"""One window on one GPU, or shared by several: memory, speed, bytes received, and their estimates.

    export PYTHONPATH=benchmarks
    python benchmarks/estimates/context_parallel.py --out OUT.jsonl [CASE ...]
    torchrun --nproc-per-node 2 benchmarks/estimates/context_parallel.py --out OUT.jsonl [CASE ...]
    python benchmarks/estimates/context_parallel.py --estimate [--tera-flops 250] [--link-gb 50]

Cases: `350m` and `3b`, presets with random weights, whose sticks are soon spent: the memory is that of any window, the
speed is not; `dense`, a few layers of 350m whose logits lie around -14, so that every query visits every key; `shipped`
and `shipped-4m`, the shipped checkpoint on the standard library (repeated where it is too short), with its NLL, at the
adapter's own threshold. One line of JSON a case goes to OUT.jsonl and the screen. `--estimate` needs no GPU: it prints
what one layer of 350m costs each of N processes where every query visits every key.
"""

import argparse
import importlib.resources
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import machine
from torch import Tensor

from sbeval.models import SbevalForCausalLM
from sbeval.models.presets import preset
from sbeval.scoring.context_parallel import ContextParallelScorer, join_context
from sbeval.scoring.scorer import TokenScorer

SHIPPED = Path(str(importlib.resources.files("sbeval.demo"))) / "checkpoints" / "stickbreaking"
MILLION = 2**20
DENSE_LAYERS = 4
DENSE_BIAS = 1.6
"""Of queries, and less than zero of keys: with heads of 32 channels the logits lie around -14.5."""
THRESHOLD = 1e-5
WARM_UP_TOKENS = 2**16
SCORED = 2**12


def random_model(name: str, *, dense: bool, device: torch.device) -> Any:
    """A preset with random weights in bf16."""
    config = preset(name, **({"num_hidden_layers": DENSE_LAYERS, "bias": ["qkv"]} if dense else {}))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = SbevalForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    for layer in model.model.layers if dense else ():
        with torch.no_grad():
            layer.self_attn.q_proj.bias.fill_(DENSE_BIAS)
            layer.self_attn.k_proj.bias.fill_(-DENSE_BIAS)
    model.set_kernels(skip_threshold=None if dense else THRESHOLD)
    return model


def shipped_model(device: torch.device) -> Any:
    """The shipped checkpoint in bf16."""
    model = SbevalForCausalLM.from_pretrained(SHIPPED, dtype=torch.bfloat16).to(device).eval()
    model.set_kernels(skip_threshold=THRESHOLD)
    return model


def library_tokens(tokens: int) -> Tensor:
    """Tokens [tokens] of the standard library, from its beginning again where it ends; kept between runs."""
    from transformers import AutoTokenizer

    kept = Path(tempfile.gettempdir()) / "context_parallel_tokens.pt"
    if kept.exists():
        found: Tensor = torch.load(kept)
        return found.repeat(-(-tokens // len(found)))[:tokens]
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    folder = Path(os.__file__).parent
    texts = [path.read_text(errors="replace") for path in sorted(folder.rglob("*.py")) if "packages" not in str(path)]
    ids: list[int] = []
    for encoded in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        ids += [*encoded, tokenizer.eos_token_id]
    found = torch.tensor(ids)
    if int(os.environ.get("RANK", "0")) == 0:
        part = kept.with_suffix(f".{os.getpid()}")
        torch.save(found, part)
        part.replace(kept)
    return found.repeat(-(-tokens // len(found)))[:tokens]


def measured(model: Any, window: Tensor, scored: int, device: torch.device) -> dict[str, Any]:
    """Scores the last targets of a window [1, L + 1] and returns time and memory; every rank gets the same window."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    scorer: TokenScorer = TokenScorer(model)
    if ranks > 1:
        scorer = ContextParallelScorer(model, join_context(model, ranks, device))
    start = scorer.start_together if isinstance(scorer, ContextParallelScorer) else scorer.start

    def score(tokens: Tensor) -> float:
        length, last = tokens.shape[1] - 1, min(scored, tokens.shape[1] - 1)
        rows, positions = torch.zeros(last, dtype=torch.long), torch.arange(length - last, length)
        found = start(tokens[:, :-1].to(device), rows, positions, tokens[0, -last:]).result()
        return -float(found.logprobs.double().mean())

    score(window[:, : WARM_UP_TOKENS + 1])
    torch.cuda.reset_peak_memory_stats(device)
    if isinstance(scorer, ContextParallelScorer):
        scorer.context.transfers.received_bytes = scorer.context.transfers.whole_bytes = 0
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    nll = score(window)
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    found = {
        "processes": ranks,
        "tokens": window.shape[1] - 1,
        "seconds": round(seconds, 3),
        "tokens_per_second": round((window.shape[1] - 1) / seconds),
        "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2),
        "nll": nll,
    }
    if isinstance(scorer, ContextParallelScorer):
        transfers = scorer.context.gather_objects(scorer.context.transfers)
        peaks = scorer.context.gather_objects(found["peak_gib"])
        found["peak_gib"] = max(peaks)
        found["received_bytes"] = sum(each.received_bytes for each in transfers)
        found["whole_bytes"] = sum(each.whole_bytes for each in transfers)
    return found


def run(case: str, device: torch.device) -> dict[str, Any]:
    """One case."""
    if case.startswith("shipped"):
        tokens = 4 * MILLION if case.endswith("4m") else MILLION
        return measured(shipped_model(device), library_tokens(tokens + 1)[None], tokens, device)
    model = random_model("350m" if case == "dense" else case, dense=case == "dense", device=device)
    window = torch.randint(model.config.vocab_size, (1, MILLION + 1), generator=torch.Generator().manual_seed(0))
    layers = {"layers": model.config.num_hidden_layers}
    return layers | measured(model, window, SCORED, device)


def estimate(processes: int, tokens: int, *, flops: float, link_bytes: float) -> dict[str, float]:
    """Returns the estimated cost of one attention layer of 350m for a rank, with keys and values in bf16.

    A pair of a query and a key takes four operations a channel, and all processes have equally many pairs. The first
    process receives the keys of all chunks but its own two, as much as the last one sends.

    Args:
        processes: N, of which each holds two of 2 N chunks.
        tokens: of the window.
        flops: operations a second of the kernel.
        link_bytes: bytes a second that a process receives.
    """
    config = preset("350m")
    width = config.num_attention_heads * config.head_dim
    key_width = config.num_key_value_heads * config.head_dim
    compute = 4 * width * tokens * tokens / 2 / processes / flops
    received = (2 * processes - 2) / (2 * processes) * tokens * 2 * key_width * 2
    transfer = received / link_bytes
    # all but the first piece comes while another is worked on
    return {
        "compute_seconds": compute,
        "received_gib": received / 2**30,
        "transfer_seconds": transfer,
        "share_of_ideal": compute / max(compute, transfer),
    }


def print_estimates(flops: float, link_bytes: float) -> None:
    """Prints a row for each length and number of processes."""
    print(f"{'tokens':>9} {'GPUs':>5} {'compute s':>10} {'received GiB':>13} {'transfer s':>11} {'of ideal':>9}")
    for tokens in (2**17, 2**20, 2**22):
        for processes in (1, 2, 8, 16, 32, 64):
            found = estimate(processes, tokens, flops=flops, link_bytes=link_bytes)
            print(
                f"{tokens:>9} {processes:>5} {found['compute_seconds']:>10.3f} {found['received_gib']:>13.2f} "
                f"{found['transfer_seconds']:>11.3f} {found['share_of_ideal']:>9.0%}"
            )


def main() -> None:
    """Runs the cases in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--tera-flops", type=float, default=250.0)
    parser.add_argument("--link-gb", type=float, default=50.0)
    parser.add_argument("cases", nargs="*", default=["350m", "dense", "shipped"])
    arguments = parser.parse_args()
    if arguments.estimate:
        print_estimates(arguments.tera_flops * 1e12, arguments.link_gb * 1e9)
        return
    if arguments.out is None:
        parser.error("give --out or --estimate")
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl", device_id=device)
    for case in arguments.cases:
        try:
            found = run(case, device)
        except torch.OutOfMemoryError as error:
            found = {"out_of_memory": str(error).splitlines()[0]}
        torch.cuda.empty_cache()
        if rank == 0:
            line = json.dumps({"case": case, **found})
            print(line, flush=True)
            with arguments.out.open("a") as file:
                file.write(line + "\n")
    if rank == 0:
        print(machine())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
