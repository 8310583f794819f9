"""The lm-eval models `sb` and `hf` side by side: memory and tokens per second of scoring long windows.

    python benchmarks/harness.py [--preset 350m] [--length 65536] [--windows 2] [--checkpoint FOLDER]

Every row scores the same text, the standard library's own sources, through lm-eval's `loglikelihood_rolling` at
`max_length = length`, each in a fresh process; the second of two runs is timed. Memory is the peak above what the
loaded model holds: allocated on a GPU, resident on a CPU. `sb` on the Llama gets a speed only where its log-likelihood
is the one of `hf`. Random weights break every stick within some twenty tokens, so the stick-breaking row's queries and
keys are shifted until none breaks and every key has to be visited; what skipping saves is measured on a trained
checkpoint alone (`--checkpoint`), beside a Llama of its size. Without a GPU everything is small.
"""

import argparse
import dataclasses
import json
import logging
import platform
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from sbeval.models import SbevalConfig, preset

SKIP_THRESHOLD = 1e-5
STICK_LOGIT = -9.0
SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 336,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
        adapter: "hf" or "sb".
        model: "llama" or "stickbreaking" with random weights of the shape given, or "checkpoint".
        skip_threshold: passed to `sb`.
        shape: fields of `SbevalConfig`.
        checkpoint: folder of the checkpoint, for its tokenizer, and its weights where `model` says so.
        length: context length in tokens.
        windows: how many windows the text fills.
        dtype: of the weights.
    """

    adapter: str
    model: str
    skip_threshold: float | None = None
    shape: dict[str, Any]
    checkpoint: str | None
    length: int
    windows: int
    dtype: str


def tokenizer(row: Row) -> Any:
    """The checkpoint's tokenizer, or one token a byte."""
    if row.checkpoint:
        return transformers.AutoTokenizer.from_pretrained(row.checkpoint)
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_only, bos_token="<s>", eos_token="</s>")


def text_of(tokens: int, encoder: Any) -> str:
    """Standard library sources of exactly this many tokens."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text, ids = "", []
    for source in sources:
        text += source.read_text(errors="replace")
        if len(text) > 6 * tokens or source == sources[-1]:
            break
    ids = encoder.encode(text, add_special_tokens=False)[:tokens]
    return str(encoder.decode(ids))


def random_model(row: Row) -> Any:
    """A Llama or a stick-breaking model whose sticks never break, with random weights."""
    torch.manual_seed(0)
    shape = SbevalConfig(**row.shape)
    if row.model == "llama":
        names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
        fields = {name: getattr(shape, name) for name in [*names.split(), "head_dim", "tie_word_embeddings"]}
        config = transformers.LlamaConfig(**fields, max_position_embeddings=shape.training_length_tokens or 2048)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, row.dtype))
    config = SbevalConfig(**{**row.shape, "attention": "stickbreaking", "bias": ["qkv"]})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, row.dtype))
    size = abs(STICK_LOGIT / config.attention_scale) ** 0.5
    with torch.no_grad():
        for layer in model.model.layers:
            for projection, sign in ((layer.self_attn.q_proj, 1.0), (layer.self_attn.k_proj, -1.0)):
                projection.bias.zero_()
                projection.bias[:: config.head_dim] = sign * size
    return model


def resident_bytes(field: str) -> int:
    """This process's VmRSS (now) or VmHWM (peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure(row: Row) -> dict[str, float]:
    """Runs one row in this process."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from sbeval.model_adapters.lm import StickBreakingLM

    logging.disable(logging.WARNING)
    gpu = torch.cuda.is_available()
    encoder = tokenizer(row)
    text = text_of(row.length * row.windows, encoder)
    options: dict[str, Any] = {"max_length": row.length, "batch_size": 1, "tokenizer": encoder}
    if row.adapter == "sb" and row.skip_threshold is not None:
        options["skip_threshold"] = row.skip_threshold
    if row.model == "checkpoint":
        lm = StickBreakingLM(row.checkpoint, dtype=row.dtype, device="cuda" if gpu else "cpu", **options)
    else:
        model = random_model(row).to("cuda" if gpu else "cpu")
        lm = (HFLM if row.adapter == "hf" else StickBreakingLM)(model, **options)
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0, metadata=("", 0, 1))
    if gpu:
        weights = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        weights = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
    seconds = float("inf")
    value = float("nan")
    for _ in range(2):
        started = time.perf_counter()
        (value,) = lm.loglikelihood_rolling([request], disable_tqdm=True)
        seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if gpu else resident_bytes("VmHWM")
    tokens = len(lm.tok_encode(text))
    return {"nll": -value / tokens, "tokens_per_second": tokens / seconds, "weights": weights, "peak": peak}


def in_fresh_process(row: Row) -> dict[str, float]:
    """Runs one row in a process of its own."""
    command = [sys.executable, __file__, "--row", json.dumps(dataclasses.asdict(row))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{row.adapter} on {row.model} failed:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def rows(arguments: argparse.Namespace) -> list[Row]:
    """The rows to measure; the first is what the others are compared with."""
    gpu = torch.cuda.is_available()
    if arguments.checkpoint:
        config = transformers.AutoConfig.from_pretrained(arguments.checkpoint).to_dict()
        shape = {name: config[name] for name in [*SMALL, "num_key_value_heads", "head_dim", "training_length_tokens"]}
    elif arguments.preset:
        shape = {**preset(arguments.preset, vocab_size=50304).to_dict()}
        shape = {name: shape[name] for name in [*SMALL, "tie_word_embeddings", "training_length_tokens"]}
    else:
        shape = SMALL
    common = {
        "shape": shape,
        "checkpoint": arguments.checkpoint,
        "length": arguments.length,
        "windows": arguments.windows,
        "dtype": arguments.dtype or ("bfloat16" if gpu else "float32"),
    }
    compared = [Row(adapter="hf", model="llama", **common), Row(adapter="sb", model="llama", **common)]
    if arguments.checkpoint:
        compared += [
            Row(adapter="sb", model="checkpoint", skip_threshold=threshold, **common)
            for threshold in (None, SKIP_THRESHOLD)
        ]
    else:
        compared.append(Row(adapter="sb", model="stickbreaking", **common))
    return compared


def main() -> None:
    """Prints one table."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="350m" if gpu else None)
    parser.add_argument("--length", type=int, default=65536 if gpu else 4096)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--checkpoint")
    parser.add_argument("--dtype")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measure(Row(**json.loads(arguments.row)))))
        return
    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{device}, torch {torch.__version__}, transformers {transformers.__version__}, python "
        f"{platform.python_version()}; {arguments.windows} windows of {arguments.length} tokens"
    )
    print("| adapter | model | skipping | NLL | tokens/s | against hf | weights MiB | peak above MiB |")
    print("|---|---|---|---|---|---|---|---|")
    first: dict[str, float] = {}
    for row in rows(arguments):
        found = in_fresh_process(row)
        first = first or found
        tolerance = 1e-5 if row.dtype == "float32" else 1e-2
        same = row.model != "llama" or abs(found["nll"] - first["nll"]) <= tolerance * abs(first["nll"])
        speed = f"{found['tokens_per_second']:.0f} | {found['tokens_per_second'] / first['tokens_per_second']:.2f}x"
        print(
            f"| {row.adapter} | {row.model} | {row.skip_threshold or 'none'} | {found['nll']:.6f} | "
            f"{speed if same else 'differs from hf: no speed | '} | {found['weights'] / 2**20:.0f} | "
            f"{(found['peak'] - found['weights']) / 2**20:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
