"""Current model families with lm-eval's `hf` and with `sb`, in turns on the same random weights: time and memory.

    PYTHONPATH=benchmarks python benchmarks/architectures/families.py
        [--families llama,gemma3_text,...] [--tokens 65536] [--prompt-tokens 16384]

Of each family a model of some 300M to 500M parameters (8 layers, width 2,048, bf16), loaded from files, scores one
window through `loglikelihood_rolling`, and continues four prompts by 32 tokens through `generate_until`, at batch size
4. One call of each kind goes before the clock; then come `--rounds` pairs, of which the table has the medians. Memory
is the peak of one window above what both models hold, and the weights of one. `hf, flex_attention` and `sb, eager` have
what the name says as their `attn_implementation`. Where memory runs out, that is what the table says.
Without a GPU all is small, and says only that it runs.
"""

import argparse
import functools
import gc
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from harness import text_of, tokenizer
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from measuring import machine

from sbeval.model_adapters.lm import StickBreakingLM

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", "bfloat16") if GPU else ("cpu", "float32")
WIDTH = 2048 if GPU else 256
HEADS: dict[str, Any] = {"num_attention_heads": WIDTH // 64, "num_key_value_heads": WIDTH // 256, "head_dim": 64}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": WIDTH // 2}
STATES: dict[str, Any] = {"mamba_n_heads": WIDTH // 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
DELTA: dict[str, Any] = {"linear_num_key_heads": WIDTH // 128, "linear_num_value_heads": WIDTH // 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**HEADS, "num_attention_heads": max(1, WIDTH // 128), "head_dim": 128},
    "gemma3_text": {
        **{"sliding_window": 1024 if GPU else 32, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4},
        "query_pre_attn_scalar": 256,
    },
    "gpt_oss": {
        **{**HEADS, "sliding_window": 128 if GPU else 32, "num_local_experts": 8, "num_experts_per_tok": 2},
        "intermediate_size": WIDTH // 4,
    },
    "qwen3_next": {**HEADS, "num_experts": 8, "shared_expert_intermediate_size": WIDTH // 2, **EXPERTS, **DELTA},
    "granitemoehybrid": {
        **{**HEADS, **STATES, "layer_types": [*["mamba"] * 4, "attention", *["mamba"] * 3]},
        **{"num_local_experts": 0, "shared_intermediate_size": WIDTH * 2},
    },
    "nemotron_h": {
        **{**HEADS, "layers_block_type": ["mamba", "mlp", "mamba", "attention"] * 2},
        **{"mamba_num_heads": WIDTH // 32, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8},
    },
}
COMMON: dict[str, Any] = {
    **{"hidden_size": WIDTH, "num_hidden_layers": 8, "vocab_size": 4096, "max_position_embeddings": 2**17},
    **{"intermediate_size": WIDTH * 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
}
SCALED = {"gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}}}


def loaded(family: str, adapter: str, tokens: int, dtype: str = DTYPE) -> Any:
    """A model with the family's random weights in one of the two adapters."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](**{**COMMON, **FAMILIES[family], **SCALED.get(family, {})})
    name = adapter.partition(", ")[2]
    named = {"attn_implementation": name} if name else {}
    kind: Any = StickBreakingLM if adapter.startswith("sb") else HFLM
    with tempfile.TemporaryDirectory() as folder:
        with torch.device(DEVICE):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model.save_pretrained(folder)
        tokenizer(ROW).save_pretrained(folder)
        del model
        gc.collect()  # or its weights would count as the adapter's
        lm = kind(folder, dtype=dtype, device=DEVICE, max_length=tokens, batch_size=4, **named)
    lm.tok_encode = functools.cache(lm.tok_encode)  # not what is compared
    return lm


class Row:
    """A stand-in for the parts that `harness.tokenizer` reads: one token per byte."""

    checkpoint = None


ROW: Any = Row()


@functools.cache
def shared_text(tokens: int) -> str:
    """The text of all windows or prompts."""
    return text_of(tokens, tokenizer(ROW))


def window(lm: Any, tokens: int) -> float:
    """The log-likelihood of one window."""
    text = shared_text(tokens)
    (value,) = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0, ("", 0, 1))], True)
    return float(value)


def continued(lm: Any, tokens: int) -> list[str]:
    """Four prompts continued by 32 tokens."""
    settings = {"until": [], "max_gen_toks": 32, "min_new_tokens": 32, "do_sample": False}
    texts = [shared_text(tokens + 4)[place : place + tokens] for place in range(4)]
    requests = [
        Instance("generate_until", {}, (text, dict(settings)), place, ("", place, 1))
        for place, text in enumerate(texts)
    ]
    return list(lm.generate_until(requests, disable_tqdm=True))


def attempted(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """Returns a call's result or error, its seconds, and its peak GiB above the memory allocated before."""
    gc.collect()
    held = 0
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    started = time.perf_counter()
    try:
        value = run()
    except torch.OutOfMemoryError:
        return "out of memory", float("nan"), float("nan")
    except Exception as error:  # a family that an adapter does not run is one line of the table
        return f"{type(error).__name__}: {str(error)[:60]}", float("nan"), float("nan")
    seconds = time.perf_counter() - started
    return value, seconds, (torch.cuda.max_memory_allocated() - held) / 2**30 if GPU else float("nan")


def measured(family: str, adapters: list[str], arguments: argparse.Namespace) -> None:
    """Prints the rows of one family."""
    models, weights = {}, {}
    for adapter in adapters:
        before = torch.cuda.memory_allocated() if GPU else 0
        try:
            models[adapter] = loaded(family, adapter, arguments.tokens, arguments.dtype)
        except Exception as error:  # as above
            print(f"| {family} | {adapter} | {type(error).__name__}: {str(error)[:80]} |", flush=True)
            continue
        weights[adapter] = (torch.cuda.memory_allocated() - before) / 2**30 if GPU else 0.0
    works = {"window": (window, arguments.tokens), "generation": (continued, arguments.prompt_tokens)}
    for name in arguments.work.split(","):
        work, tokens = works[name]
        values: dict[str, Any] = {}
        times: dict[str, list[float]] = {adapter: [] for adapter in models}
        peak = dict.fromkeys(models, 0.0)
        for turn in range(1 + arguments.rounds):
            for adapter, lm in models.items():
                if isinstance(values.get(adapter), str):  # it failed before
                    continue
                values[adapter], seconds, gibibytes = attempted(functools.partial(work, lm, tokens))
                if turn:
                    times[adapter].append(seconds)
                    peak[adapter] = max(peak[adapter], gibibytes)
        for adapter in models:
            value, took = values[adapter], times[adapter]
            if isinstance(value, str):
                print(f"| {family} | {name} | {adapter} | {value} |", flush=True)
                continue
            shown = f"{value / tokens:.6f}" if isinstance(value, float) else f"{hash(tuple(value)) % 10**6}"
            memory = f"{peak[adapter] + weights[adapter]:.1f} GiB ({weights[adapter]:.1f} of weights)"
            spread = f"{min(took):.3f} to {max(took):.3f}"
            print(
                f"| {family} | {name} | {adapter} | {statistics.median(took):.3f} s ({spread}) | {memory} | {shown} |",
                flush=True,
            )


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--adapters", default="hf;sb", help="separated by semicolons: hf;hf, eager;sb")
    parser.add_argument("--work", default="window,generation")
    parser.add_argument("--tokens", type=int, default=65536 if GPU else 256)
    parser.add_argument("--prompt-tokens", type=int, default=16384 if GPU else 64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default=DTYPE)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    print(machine())
    for family in arguments.families.split(","):
        with torch.no_grad():
            measured(family, arguments.adapters.split(";"), arguments)
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
