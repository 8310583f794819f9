"""Ordinary tasks through lm-eval's `hf` and through `sb`: greedy generation, and multiple choice with short contexts.

    python benchmarks/generation.py [--models llama,stickbreaking] [--batches 1,64] [--words 300] [--peers hf,static]
    python benchmarks/generation.py --choices 1500 [--models llama,stickbreaking] [--batches 64]
    python benchmarks/generation.py --differing 64 [--models llama,stickbreaking] [--batches 64]

Every row answers the same prompts of `--words` words with exactly `--new` tokens each, through lm-eval's
`generate_until`; a step is the time of all of them less that of half as many, over the steps between, so that reading
prompts and recording a step as a graph count to neither; times are medians of `--repeats`. The bytes are those of the
weights, read once a step, and of the keys and values that are there halfway, over the bandwidth of a copy measured in
the same run. `static` is `hf` with `cache_implementation=static`, which transformers compiles; its first two answers of
full length, in which it does, are not timed. `answers equal` counts those of the first row of its block. Models have
random weights: a Llama of 22 layers and 4 key heads, and a stick-breaking preset, whose queries and keys are shifted so
that no stick breaks (`stickbreaking`) or are as they are, so that sticks break within some twenty tokens (`breaking`).
`shipped` is the shipped stick-breaking checkpoint.

With `--choices`, that many questions have a context of `--words` words at most and four continuations of two to five.
`tokens` are those of all requests; `tokenizing` is timed by calling the adapter with everything after it left out, and
`model` is the rest. `of the matrices` is the share of the throughput of a large product, measured in the same run: two
operations a weight and token, attention and the vocabulary left out. `read` is how many positions `sb` has the model
read for each token, padding counted. Without a GPU everything is small.

With `--differing`, that many prompts are continued under two ways that differ in one thing: steps recorded or not, many
texts at a time or one, one text's blocks in few kernels or as they are. Answers are compared up to the first token that
differs, behind which they are answers to different texts; `one token in` is how many were compared for each that did.
Steps of one text that are not recorded take so long that an eighth of the prompts has to do.
"""

import argparse
import functools
import gc
import itertools
import logging
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from harness import DEMO, Row, random_model, shape_of, sources, tokenizer
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from measuring import copy_bandwidth, machine, matrix_throughput

from sbeval.model_adapters.batching import SlotLimits
from sbeval.model_adapters.generate.slots.fused_blocks import FusedBlocks
from sbeval.model_adapters.generate.slots.graph_capture import GraphCapture
from sbeval.model_adapters.generate.slots.schedule import Terms, generate, slot_bytes
from sbeval.model_adapters.generate.slots.served import fused_blocks
from sbeval.model_adapters.generate.texts import StopSequences, Text
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.model_adapters.score import requests as scoring
from sbeval.model_adapters.session import GPU_BATCH_TOKENS
from sbeval.scoring.scorer import TokenScorer

LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "training_length_tokens": 2048,
}


def prompts(count: int, words: int) -> list[str]:
    """Different stretches of the standard library's sources."""
    text = sources().split()
    return [" ".join(text[start * words : (start + 1) * words]) for start in range(count)]


def load(adapter: str, name: str, preset: str, dtype: str, batch: int | str, max_length: int) -> Any:
    """The lm-eval model of a row."""
    shape = LLAMA if name == "llama" and torch.cuda.is_available() else shape_of(preset)
    kind = "llama" if name == "llama" else "stickbreaking"
    options = {"question": "generation", "checkpoint": str(DEMO), "length": max_length, "windows": 1, "dtype": dtype}
    row = Row(adapter=adapter, model=kind, shape=shape, **options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "shipped":
        return StickBreakingLM(str(DEMO), device=device, dtype=dtype, max_length=max_length, batch_size=batch)
    with torch.device(device):
        model = random_model(row)
    if name == "breaking":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.bias.zero_()
                layer.self_attn.k_proj.bias.zero_()
    loaded = StickBreakingLM if adapter == "sb" else HFLM
    return loaded(model, tokenizer=tokenizer(row), max_length=max_length, batch_size=batch)


def generated(lm: Any, texts: list[str], new_tokens: int, **settings: Any) -> tuple[float, list[str]]:
    """Time of all answers, of exactly this many tokens each, and the answers."""
    options = {"until": [], "max_gen_toks": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, **settings}
    requests = [Instance("generate_until", {}, (text, options), index) for index, text in enumerate(texts)]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    answers = lm.generate_until(requests, disable_tqdm=True)
    return time.perf_counter() - started, answers


def rows(arguments: argparse.Namespace, bandwidth: float) -> Iterator[str]:
    """The table's lines."""
    gpu = torch.cuda.is_available()
    for name in arguments.models.split(","):
        for batch in map(int, arguments.batches.split(",")):
            texts = prompts(batch, arguments.words)
            first: tuple[float, list[str]] | None = None
            for adapter in [*filter(None, arguments.peers.split(",") if name == "llama" else []), "sb"]:
                settings = {"cache_implementation": "static"} if adapter == "static" else {}
                lm = load(adapter, name, arguments.preset, arguments.dtype, batch, arguments.max_length)
                tokens = sum(len(lm.tok_encode(text)) for text in texts) / batch
                weights = sum(x.nbytes for x in lm.model.parameters())
                if not lm.model.config.tie_word_embeddings:
                    weights -= lm.model.get_input_embeddings().weight.nbytes
                keys = batch * slot_bytes(lm.model, int(tokens + arguments.new / 2))
                for _ in range(2 if adapter == "static" else 1):  # which makes its cache anew for longer texts
                    generated(lm, texts, arguments.new if adapter == "static" else 12, **settings)
                if gpu:
                    held = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                seconds: dict[int, list[float]] = {1: [], arguments.new // 2: [], arguments.new: []}
                for _, tokens_each in itertools.product(range(arguments.repeats), seconds):
                    taken, answers = generated(lm, texts, tokens_each, **settings)
                    seconds[tokens_each].append(taken)
                one, half, new = map(statistics.median, seconds.values())
                step = (new - half) / (arguments.new - arguments.new // 2)
                least = (weights + keys) / bandwidth
                peak = (torch.cuda.max_memory_allocated() - held) / 2**20 if gpu else float("nan")
                first = first or (step, answers)
                same = sum(answer == expected for answer, expected in zip(answers, first[1], strict=True))
                yield (
                    f"| {name} | {adapter} | {batch} | {tokens:.0f} | {one * 1e3:.0f} | {step * 1e3:.2f} | "
                    f"{least * 1e3:.2f} | {step / least:.2f} | {first[0] / step:.1f} | "
                    f"{batch / step:.0f} | {batch * arguments.new / new:.0f} | {same} | {peak:.0f} |"
                )
                del lm
                gc.collect()
                if gpu:
                    torch.cuda.empty_cache()


def continued(
    lm: Any, texts: list[Any], new_tokens: int, *, slots: int, recorded: bool, fused: FusedBlocks | None
) -> list[list[int]]:
    """The answers' tokens."""
    terms = Terms(
        end_tokens=[],
        not_early=[],
        limits=SlotLimits(slots=slots, prompt_tokens=GPU_BATCH_TOKENS),
        graph_capture=GraphCapture(lm.model.device if recorded else torch.device("cpu")),
        fused=lambda: fused,
    )
    stops = StopSequences(lm.tokenizer, [])
    asked = [
        Text(key=key, prompt=np.array(text), budget_tokens=new_tokens, stops=stops) for key, text in enumerate(texts)
    ]
    answers = {key: continuation.tokens for key, continuation in generate(lm.model, asked, terms)}
    return [answers[key] for key in range(len(texts))]


def differing(arguments: argparse.Namespace) -> Iterator[str]:
    """The lines of `--differing`."""
    many = max(map(int, arguments.batches.split(",")))
    for name in arguments.models.split(","):
        lm = load("sb", name, arguments.preset, arguments.dtype, 1, arguments.max_length)
        texts = [lm.tok_encode(text) for text in prompts(arguments.differing, arguments.words)]
        run = functools.partial(continued, lm, new_tokens=arguments.new)
        few = fused_blocks(lm.model)
        one = run(texts, slots=1, recorded=True, fused=few)
        side_by_side = run(texts, slots=many, recorded=True, fused=None)
        fewer = texts[: max(1, len(texts) // 8)]
        for what, first, second in (
            ("one text, recorded and not", one, run(fewer, slots=1, recorded=False, fused=few)),
            ("one text, in few kernels and as it is", one, run(texts, slots=1, recorded=True, fused=None)),
            (f"{many} texts, recorded and not", side_by_side, run(texts, slots=many, recorded=False, fused=None)),
            (f"one text and {many}", one, side_by_side),
        ):
            pairs = list(zip(first, second, strict=False))
            same = [sum(itertools.accumulate((a == b for a, b in zip(*pair, strict=True)), min)) for pair in pairs]
            differ = sum(count < arguments.new for count in same)
            compared = sum(min(count + 1, arguments.new) for count in same)
            often = f"{compared / differ:,.0f}" if differ else f"more than {compared:,}"
            yield f"| {name} | {what} | {len(pairs)} | {len(pairs) - differ} | {often} |"


def choices(questions: int, most_words: int) -> list[Instance]:
    """Four continuations for each context."""
    words, draw = sources().split(), random.Random(0)
    found = []
    for _ in range(questions):
        start, count = draw.randrange(len(words) - 2 * most_words), draw.randint(20, most_words)
        context = " ".join(words[start : start + count])
        for extra in range(4):
            continuation = " " + " ".join(words[start + count : start + count + 2 + extra])
            found.append(Instance("loglikelihood", {}, (context, continuation), len(found)))
    return found


def choice_seconds(lm: Any, asked: list[Instance]) -> float:
    """Of all requests."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    lm.loglikelihood(asked, disable_tqdm=True)
    return time.perf_counter() - started


def tokenizing_seconds(adapter: str, lm: Any, asked: list[Instance]) -> float:
    """Returns the seconds of encoding only."""
    if adapter == "hf":
        lm._loglikelihood_tokens = lambda pairs, **_: [(0.0, False)] * len(pairs)
        return choice_seconds(lm, asked)
    whole = scoring.loglikelihood
    scoring.loglikelihood = lambda *_, **__: []
    found = choice_seconds(lm, asked)
    scoring.loglikelihood = whole
    return found


def choice_rows(arguments: argparse.Namespace, throughput: float) -> Iterator[str]:
    """The lines of `--choices`."""
    asked = choices(arguments.choices, arguments.words)
    read = [0]
    hidden = TokenScorer._hidden

    def counted(scorer: TokenScorer, input_ids: Any, *options: Any) -> Any:
        read[0] += input_ids.numel()
        return hidden(scorer, input_ids, *options)

    TokenScorer._hidden = counted  # type: ignore[method-assign]
    for name in arguments.models.split(","):
        for adapter, batch in itertools.product([*arguments.peers.split(","), "sb"], arguments.batches.split(",")):
            if adapter != "sb" and (name != "llama" or batch == "auto"):
                continue
            lm = load(adapter, name, arguments.preset, arguments.dtype, batch, arguments.max_length)
            tokens = sum(len(lm.tok_encode("".join(request.args))) - 1 for request in asked)
            choice_seconds(lm, asked[:64])
            read[0] = 0
            whole = choice_seconds(lm, asked)
            places = read[0] / tokens if read[0] else float("nan")
            encoding = tokenizing_seconds(adapter, lm, asked)
            embeddings = {lm.model.get_input_embeddings().weight, lm.model.get_output_embeddings().weight}
            weights = sum(x.numel() for x in lm.model.parameters()) - sum(x.numel() for x in embeddings)
            rate = tokens / (whole - encoding)
            yield (
                f"| {name} | {adapter} | {batch} | {whole:.2f} | {encoding:.2f} | {whole - encoding:.2f} | "
                f"{tokens:,} | {rate:,.0f} | {2 * weights * rate / throughput:.0%} | {places:.2f} |"
            )
            del lm


def main() -> None:
    """Prints one table."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="llama,stickbreaking,breaking")
    parser.add_argument("--batches", default="1,64" if gpu else "1,4")
    parser.add_argument("--words", type=int, default=300 if gpu else 30)
    parser.add_argument("--new", type=int, default=256 if gpu else 32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", default="hf,static" if gpu else "hf")
    parser.add_argument("--preset", default="1b" if gpu else None)
    parser.add_argument("--dtype", default="bfloat16" if gpu else "float32")
    parser.add_argument("--choices", type=int, default=0)
    parser.add_argument("--differing", type=int, default=0)
    parser.add_argument("--max_length", type=int, default=8192)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.choices:
        throughput = matrix_throughput(getattr(torch, arguments.dtype))
        print(f"{machine()}; a product of matrices does {throughput / 1e12:.1f} TFLOP/s\n")
        print(
            "| model | adapter | batch | seconds | of these tokenizing | model | tokens | tokens/s of the model | "
            "of the matrices | read |\n|---|---|---|---|---|---|---|---|---|---|"
        )
        for line in choice_rows(arguments, throughput):
            print(line, flush=True)
        return
    if arguments.differing:
        print(f"{machine()}; {arguments.dtype}, {arguments.new} new tokens\n")
        print("| model | what differs | answers | equal | one token in |\n|---|---|---|---|---|")
        for line in differing(arguments):
            print(line, flush=True)
        return
    bandwidth = copy_bandwidth()
    print(f"{machine()}, transformers {transformers.__version__}; a copy moves {bandwidth / 1e12:.2f} TB/s\n")
    print(
        "| model | adapter | batch | prompt tokens | first token ms | ms a step | bytes' ms | times the bytes | "
        "times the first row | tokens/s | tokens/s with the prompt | answers equal | peak above the model MiB |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for line in rows(arguments, bandwidth):
        print(line, flush=True)


if __name__ == "__main__":
    main()
