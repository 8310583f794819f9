"""Training speed of stick-breaking against softmax + RoPE: forward, backward and optimizer step, the same model sizes.

    python benchmarks/training.py [--length 4096] [--sizes demo 350m] [--seconds 6] [--out FILE.json]

Each row is a fresh process that trains in bf16 autocast with fused AdamW on one device, as `sbeval train` does, after a
warm-up; rows of one size take turns. Where logits are around zero, as random weights leave them, every stick breaks
within some hundred tokens and the kernel stops there, so the queries and keys of `stickbreaking` are shifted until none
breaks and every key has to be visited. What trained sticks cost is the row `trained` of the size "demo": the shipped
checkpoint on the standard library's text; RoPE's speed does not depend on the weights.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from sbeval.models import SbevalConfig, SbevalForCausalLM, preset
from sbeval.training.losses import next_token_loss

DEMO: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 3,
    "tie_word_embeddings": True,
}
TINY = DEMO | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
BATCH_TOKENS = {"demo": 65536, "350m": 16384, "tiny": 1024}
WARM_UP_STEPS = 3
STICK_LOGIT = -9.0
KINDS = ("stickbreaking", "trained", "rope")


def new_model(size: str, kind: str, length: int) -> Any:
    """A model with random weights, all sticks whole, or the shipped stick-breaking checkpoint."""
    if kind == "trained":
        from sbeval.demo.evaluation import shipped_checkpoints

        return SbevalForCausalLM.from_pretrained(shipped_checkpoints()[0], dtype=torch.float32)
    shape: dict[str, Any] = {"attention": kind, "training_length_tokens": length, "bias": ["qkv"]}
    shape |= {"demo": DEMO, "tiny": TINY}.get(size, {})
    config = preset("350m", **shape) if size == "350m" else SbevalConfig(**shape)
    model: Any = SbevalForCausalLM(config)
    if kind == "stickbreaking":
        shift = abs(STICK_LOGIT / config.attention_scale) ** 0.5
        with torch.no_grad():
            for layer in model.model.layers:
                for projection, sign in ((layer.self_attn.q_proj, 1.0), (layer.self_attn.k_proj, -1.0)):
                    projection.bias[:: config.head_dim] = sign * shift
    return model


def some_tokens(kind: str, model: Any, count: int) -> torch.Tensor:
    """Random tokens, or for the trained model the standard library's."""
    if kind != "trained":
        return torch.randint(model.config.vocab_size, (count,))
    from transformers import AutoTokenizer

    from sbeval.corpora.sources import stdlib_corpus

    tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
    tokens: list[int] = []
    for document in stdlib_corpus().documents():
        if len(tokens) >= count:
            break
        tokens += [*tokenizer.encode(document.text), tokenizer.eos_token_id]
    return torch.tensor(tokens[:count])


def measure(size: str, kind: str, length: int, seconds: float) -> dict[str, Any]:
    """Trains for some seconds; returns tokens per second and the peak of allocated memory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = new_model(size, kind, length).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device == "cuda")
    windows = max(1, BATCH_TOKENS[size] // length)
    batch = some_tokens(kind, model, windows * (length + 1)).view(windows, length + 1).to(device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = next_token_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_UP_STEPS):
        step()
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started, steps = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        step()
        wait()
        steps += 1
    took = time.perf_counter() - started
    return {
        "size": size,
        "attention": kind,
        "length": length,
        "windows": windows,
        "parameters": model.num_parameters(),
        "tokens_per_second": steps * windows * length / took,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--sizes", nargs="+", choices=list(BATCH_TOKENS), default=["demo", "350m"])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--one", nargs=2, metavar=("SIZE", "KIND"), default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, options.length, options.seconds)))
        return
    rows = []
    for size in options.sizes:
        kinds = [kind for kind in KINDS if kind != "trained" or size == "demo"]
        for kind in kinds * options.repeats:
            command = [sys.executable, __file__, "--one", size, kind, "--length", str(options.length)]
            command += ["--seconds", str(options.seconds)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                print(f"{size} {kind}: {result.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            rows.append(json.loads(result.stdout.splitlines()[-1]))
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(f"length {options.length}; {rows[0]['device']}, torch {rows[0]['torch']}" if rows else "nothing was measured")
    print("| model | parameters | attention | tokens/s | against RoPE | peak memory |\n|---|---|---|---|---|---|")
    for size in options.sizes:
        found: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["size"] == size:
                found.setdefault(row["attention"], []).append(row)
        speed = {kind: statistics.median(row["tokens_per_second"] for row in same) for kind, same in found.items()}
        for kind, tokens_per_second in speed.items():
            row = found[kind][0]
            peak = row["peak_memory_bytes"]
            ratio = f"{tokens_per_second / speed['rope'] - 1:+.1%}" if "rope" in speed else ""
            memory = "" if peak is None else f"{peak / 2**20:,.0f} MiB"
            print(f"| {size} | {row['parameters']:,} | {kind} | {tokens_per_second:,.0f} | {ratio} | {memory} |")


if __name__ == "__main__":
    main()
