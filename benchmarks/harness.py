"""The lm-eval models `sb` and `hf` side by side: memory and tokens per second on long windows, in one table.

    python benchmarks/harness.py [--questions dense,skipping,large,biases,generation] [--length 65536] [--windows 2]

| question | models |
|---|---|
| dense | a random Llama of the preset's size through `hf` and through `sb`, and stick-breaking through `sb` |
| skipping | a Llama of a trained checkpoint's size through `hf`; the checkpoint without and with skipping |
| large | stick-breaking of the paper's largest size |
| biases | the preset's size with ALiBi and with FIRE |
| generation | a random Llama through `hf` and `sb`, and stick-breaking: greedy tokens after a prompt |

Scoring rows score the same text, the standard library's own sources, through lm-eval's `loglikelihood_rolling` at
`max_length = length`. One window is scored before the clock starts; before those of `large` and `biases`, which run
once, on one window, it is one of a sixteenth of the length. `skipping` times four times as many windows, which take
hundredths of a second each. Tokenising is the same for both adapters and not timed. Memory is the peak above what the
loaded model holds: allocated on a GPU, resident on a CPU, where each row has a process of its own. A Llama through `sb`
gets a speed only where its log-likelihood is the one of `hf`. Random weights break every stick within some twenty
tokens, so the queries and keys of a random stick-breaking model are shifted until none breaks and every key has to be
visited; what skipping saves is measured on a trained checkpoint alone. Without a GPU everything is small.
"""

import argparse
import dataclasses
import functools
import gc
import json
import logging
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from measuring import machine

import sbeval.demo.evaluation
from sbeval.models import SbevalConfig, preset

QUESTIONS = ("dense", "skipping", "large", "biases", "generation")
SKIP_THRESHOLD = 1e-5
STICK_LOGIT = -9.0
NEW_TOKENS = 64
SHORT_WINDOWS = 4
DEMO = Path(sbeval.demo.evaluation.__file__).with_name("checkpoints") / "stickbreaking"
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
        question: which rows it is compared with.
        adapter: "hf" or "sb".
        model: "llama", "stickbreaking", "alibi" or "fire" with random weights of the shape given, or "checkpoint".
        skip_threshold: passed to `sb`; None skips nothing.
        shape: fields of `SbevalConfig`.
        checkpoint: folder of the checkpoint, for its tokenizer, and its weights where `model` says so.
        length: context length in tokens.
        windows: how many windows are timed.
        dtype: of the weights.
    """

    question: str
    adapter: str
    model: str
    skip_threshold: float | None = None
    shape: dict[str, Any]
    checkpoint: str | None = None
    length: int
    windows: int
    dtype: str


def tokenizer(row: Row) -> Any:
    """The checkpoint's tokenizer, or one token a byte."""
    if row.checkpoint:
        return transformers.AutoTokenizer.from_pretrained(row.checkpoint)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_only, bos_token="<s>", eos_token="</s>")


@functools.cache
def sources() -> str:
    """The standard library's modules, one after another."""
    return "".join(
        path.read_text(encoding="ascii", errors="ignore")
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    )


def text_of(tokens: int, encoder: Any) -> str:
    """Standard library sources of exactly this many tokens."""
    text = str(encoder.decode(encoder.encode(sources()[: 6 * tokens], add_special_tokens=False)[:tokens]))
    found = len(encoder.encode(text, add_special_tokens=False))
    if found != tokens:
        raise SystemExit(f"expected a text of {tokens} tokens, found {found}")
    return text


def random_model(row: Row) -> Any:
    """A model with random weights; a stick-breaking one's sticks never break."""
    torch.manual_seed(0)
    shape = SbevalConfig(**row.shape)
    dtype = getattr(torch, row.dtype)
    if row.model == "llama":
        names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
        fields = {name: getattr(shape, name) for name in [*names.split(), "head_dim", "tie_word_embeddings"]}
        config = transformers.LlamaConfig(
            **fields, max_position_embeddings=max(row.length + NEW_TOKENS, shape.training_length_tokens or 0)
        )
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    own = {"attention": "stickbreaking", "bias": ["qkv"]} if row.model == "stickbreaking" else {"attention": row.model}
    config = SbevalConfig(**{**row.shape, **own})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if row.model == "stickbreaking":
        size = abs(STICK_LOGIT / config.attention_scale) ** 0.5
        with torch.no_grad():
            for layer in model.model.layers:
                for projection, sign in ((layer.self_attn.q_proj, 1.0), (layer.self_attn.k_proj, -1.0)):
                    projection.bias.zero_()
                    projection.bias[:: config.head_dim] = sign * size
    return model


def load(row: Row) -> Any:
    """The lm-eval model of a row."""
    from lm_eval.models.huggingface import HFLM

    from sbeval.model_adapters.lm import StickBreakingLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    room = NEW_TOKENS + 1 if row.question == "generation" else 0
    options: dict[str, Any] = {"max_length": row.length + room, "batch_size": 1, "tokenizer": tokenizer(row)}
    if row.adapter == "sb":
        options["skip_threshold"] = row.skip_threshold
    if row.model == "checkpoint":
        lm: Any = StickBreakingLM(row.checkpoint, dtype=row.dtype, device=device, **options)
    else:
        with torch.device(device):
            model = random_model(row)
        lm = (HFLM if row.adapter == "hf" else StickBreakingLM)(model, **options)
    lm.tok_encode = functools.cache(lm.tok_encode)
    return lm


def resident_bytes(field: str) -> int:
    """This process's VmRSS (now) or VmHWM (peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def scored(lm: Any, row: Row) -> dict[str, float]:
    """Mean NLL and tokens a second."""
    from lm_eval.api.instance import Instance

    once = row.question in ("large", "biases")
    seconds = value = float("nan")
    for length in (row.length // 16, row.length) if once else (row.length, row.length * row.windows):
        text = text_of(length, lm.tokenizer)
        tokens = len(lm.tok_encode(text))
        request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0, metadata=("", 0, 1))
        started = time.perf_counter()
        (value,) = lm.loglikelihood_rolling([request], disable_tqdm=True)
        seconds = time.perf_counter() - started
    return {"nll": -value / tokens, "tokens_per_second": tokens / seconds}


def generated(lm: Any, row: Row) -> dict[str, float]:
    """Tokens a second after the first, and the seconds until the first."""
    from lm_eval.api.instance import Instance

    prompt = text_of(row.length, lm.tokenizer)
    seconds = {}
    for budget in (2, 1, NEW_TOKENS + 1):
        settings = {"until": [], "max_gen_toks": budget, "min_new_tokens": budget, "do_sample": False}
        request = Instance("generate_until", {}, (prompt, settings), 0, metadata=("", 0, 1))
        started = time.perf_counter()
        lm.generate_until([request], disable_tqdm=True)
        seconds[budget] = time.perf_counter() - started
    return {
        "tokens_per_second": NEW_TOKENS / (seconds[NEW_TOKENS + 1] - seconds[1]),
        "seconds_to_first": seconds[1],
    }


def measure(row: Row) -> dict[str, float]:
    """Runs one row in this process."""
    logging.disable(logging.WARNING)
    gpu = torch.cuda.is_available()
    lm = load(row)
    if gpu:
        weights = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        weights = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
    found = (generated if row.question == "generation" else scored)(lm, row)
    peak = torch.cuda.max_memory_allocated() if gpu else resident_bytes("VmHWM")
    del lm
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    return {**found, "weights": weights, "peak": peak}


def in_fresh_process(row: Row) -> dict[str, float]:
    """Runs one row in a separate process."""
    command = [sys.executable, __file__, "--row", json.dumps(dataclasses.asdict(row))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{row.adapter} on {row.model} failed:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def shape_of(name: str | None) -> dict[str, Any]:
    """The fields of a preset with the paper's largest vocabulary, or a small model."""
    if name is None:
        return SMALL
    fields = preset(name, vocab_size=50304).to_dict()
    return {field: fields[field] for field in [*SMALL, "tie_word_embeddings", "training_length_tokens"]}


def rows(arguments: argparse.Namespace) -> list[Row]:
    """Returns the rows to measure; the other rows of a question are compared with its first."""
    gpu = torch.cuda.is_available()
    common = {
        "length": arguments.length,
        "windows": arguments.windows,
        "dtype": arguments.dtype or ("bfloat16" if gpu else "float32"),
    }
    wanted: list[Row] = []
    for question in arguments.questions.split(","):
        if question not in QUESTIONS:
            raise SystemExit(f"expected questions among {', '.join(QUESTIONS)}, found {question!r}")
        shape = shape_of("3b" if question == "large" and gpu else arguments.preset)
        if question == "skipping":
            fields = transformers.AutoConfig.from_pretrained(arguments.checkpoint).to_dict()
            names = [*SMALL, "num_key_value_heads", "head_dim", "tie_word_embeddings", "training_length_tokens"]
            shape = {name: fields[name] for name in names}
            common |= {"checkpoint": str(arguments.checkpoint), "windows": SHORT_WINDOWS * arguments.windows}
        models: list[tuple[str, str, float | None]] = {
            "dense": [("hf", "llama", None), ("sb", "llama", None), ("sb", "stickbreaking", None)],
            "skipping": [
                ("hf", "llama", None),
                ("sb", "checkpoint", None),
                ("sb", "checkpoint", SKIP_THRESHOLD),
            ],
            "large": [("sb", "stickbreaking", None)],
            "biases": [("sb", "alibi", None), ("sb", "fire", None)],
            "generation": [("hf", "llama", None), ("sb", "llama", None), ("sb", "stickbreaking", None)],
        }[question]
        wanted += [
            Row(question=question, adapter=adapter, model=model, skip_threshold=skip, shape=shape, **common)
            for adapter, model, skip in models
        ]
        common.pop("checkpoint", None)
        common["windows"] = arguments.windows
    return wanted


def line(row: Row, found: dict[str, float], first: dict[str, float]) -> str:
    """One line of the table."""
    tolerance = 1e-5 if row.dtype == "float32" else 1e-2
    nll, expected = found.get("nll"), first.get("nll")
    same = row.model != "llama" or nll is None or expected is None or abs(nll - expected) <= tolerance * expected
    speed = f"{found['tokens_per_second']:.0f} | {found['tokens_per_second'] / first['tokens_per_second']:.2f}x"
    cells = [
        row.question,
        row.adapter,
        row.model,
        str(row.skip_threshold or "none"),
        "" if nll is None else f"{nll:.7f}",
        f"{found['seconds_to_first']:.2f}" if "seconds_to_first" in found else "",
        speed if same else "differs from hf: no speed | ",
        f"{found['weights'] / 2**20:.0f}",
        f"{(found['peak'] - found['weights']) / 2**20:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def options() -> argparse.ArgumentParser:
    """Returns the command-line options."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser()
    parser.add_argument("--questions", default=",".join(QUESTIONS))
    parser.add_argument("--preset", default="350m" if gpu else None)
    parser.add_argument("--length", type=int, default=65536 if gpu else 2048)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--checkpoint", type=Path, default=DEMO, help="of the question `skipping`")
    parser.add_argument("--dtype")
    return parser


def main() -> None:
    """Prints one table."""
    gpu = torch.cuda.is_available()
    parser = options()
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measure(Row(**json.loads(arguments.row)))))
        return
    print(
        f"{machine()}, transformers {transformers.__version__}; "
        f"{arguments.windows} windows of {arguments.length} tokens\n"
    )
    print(
        "| question | adapter | model | skipping | NLL | seconds to first token | tokens/s | against the first row | "
        "weights MiB | peak above MiB |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    first: dict[str, dict[str, float]] = {}
    for row in rows(arguments):
        found = measure(row) if gpu else in_fresh_process(row)
        print(line(row, found, first.setdefault(row.question, found)), flush=True)


if __name__ == "__main__":
    main()
