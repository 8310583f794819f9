"""Writes result and samples files as lm-eval 0.4.13 lays them out, with the facts `sbeval.results.records` defines.

The curves follow a small measured pair (training length 1024): stick-breaking keeps falling, RoPE breaks at twice the
training length. Documents differ in size and difficulty, and each keeps its own level at every length.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sbeval.reports import build_report, load_results
from sbeval.reports.build import assemble
from sbeval.reports.section import Report
from sbeval.results.records import ClusterSums, ModelRecord, TaskRecord, metric_key

LENGTHS = [256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
CURVES = {
    "stickbreaking": [2.223, 2.06, 1.950, 1.877, 1.827, 1.799, 1.791, 1.788, 1.787],
    "rope": [2.205, 2.05, 1.936, 3.087, 4.097, 4.639, 4.952, 5.151, 5.29],
    "nope": [2.321, 2.17, 2.063, 2.456, 3.657, 5.121, 6.512, 7.675, 8.4],
    "alibi": [2.231, 2.08, 1.97, 1.93, 1.92, 1.915, 1.915, 1.915, 1.915],
    "fire": [2.22, 2.06, 1.95, 2.05, 2.31, 2.63, 2.98, 3.2, 3.4],
}
BYTES_PER_TOKEN = 3.1
Task = tuple[str, dict[str, Any], dict[str, Any] | None, list[dict[str, Any]]]
"""Task name, results, the task's record, samples."""

TOKENIZER = "9f" * 32


def model_record(attention: str, **changes: Any) -> ModelRecord:
    facts: dict[str, Any] = {
        "name": {"stickbreaking": "demo-sb", "rope": "demo-rope"}.get(attention, f"demo-{attention}"),
        "checkpoint_sha256": f"{attention:x<8}".encode().hex().ljust(64, "0")[:64],
        **{"format": "sbeval", "training_length_tokens": 1024, "attention": attention, "dtype": "bfloat16"},
        **{"parameters": 4_328_192, "max_length": 65536, "gpu": "NVIDIA H100 80GB HBM3"},
        "kernels": "triton" if attention == "stickbreaking" else "sdpa",
        "versions": {"torch": "2.13.0", "triton": "3.7.1", "transformers": "5.23.0", "sbeval": "0.1.0"},
        "peak_memory_bytes": 2_147_483_648 if attention == "stickbreaking" else 1_932_735_283,
        "tokens_per_second": 412_345.6 if attention == "stickbreaking" else 501_234.5,
    }
    return ModelRecord(**(facts | changes))


def perplexity_task(
    protocol: str,
    curve: list[float],
    *,
    lengths: list[int] = LENGTHS,
    corpus: str = "stdlib",
    documents: int = 60,
    size_log_deviation: float = 0.7,
    seed: int = 0,
    **record: Any,
) -> Task:
    generator = np.random.default_rng(seed)
    document_tokens = np.maximum(64, generator.lognormal(8.2, size_log_deviation, documents).astype(int))
    level = generator.normal(0.0, 0.25, documents)
    model_noise = np.random.default_rng(seed + int(1000 * curve[0]))
    results: dict[str, Any] = {"alias": f"sb_{corpus}_{protocol}"}
    samples: list[dict[str, Any]] = [
        {"doc_id": index, "doc": {"block": index}, "target": "", "filter": "none", "doc_hash": f"{index:064x}"}
        | {"arguments": {"gen_args_0": {"arg_0": f"sb:{index}", "arg_1": 256}}}
        | {"resps": [["-1.0"]], "filtered_resps": ["-1.0"]}
        for index in range(4)
    ]
    for length, nll in zip(lengths, curve, strict=True):
        per_token = nll + level + model_noise.normal(0.0, 0.015, documents)
        sums = per_token * document_tokens
        values = _bootstrap(sums, document_tokens, np.random.default_rng(1))
        tokens = int(document_tokens.sum())
        for metric, transform in {
            "nll": lambda value: value,
            "token_perplexity": np.exp,
            "bits_per_byte": lambda value: value / math.log(2) / BYTES_PER_TOKEN,
        }.items():
            results[f"{metric_key(metric, length)},none"] = float(transform(sums.sum() / tokens))
            results[f"{metric_key(metric, length)}_stderr,none"] = "N/A"
            results[f"{metric_key(metric + '_ci95', length)},none"] = [
                float(transform(edge)) for edge in np.quantile(values, [0.025, 0.975])
            ]
        results[f"{metric_key('tokens', length)},none"] = tokens
        results[f"{metric_key('clusters', length)},none"] = documents
        for index, sample in enumerate(samples):
            share = range(index, documents, len(samples))
            sample[metric_key("nll", length)] = [
                list(
                    ClusterSums(f"lib/module_{place:02d}.py", float(nats), int(size), size / 2, size * BYTES_PER_TOKEN)
                )
                for place, nats, size in zip(share, sums[share].tolist(), document_tokens[share].tolist(), strict=True)
            ]
    facts = {
        **{"family": "perplexity", "corpus": corpus, "corpus_detail": "CPython 3.11.9", "protocol": protocol},
        "corpus_sha256": hashlib.sha256(corpus.encode()).hexdigest(),
        "targets_per_window": 128 if protocol == "fixed_target" else None,
        **{"separator": "<|endoftext|>", "bos": "text", "lengths": lengths, "tokenizer_sha256": TOKENIZER},
        **{"seed": 1234, "lm_eval_version": "0.4.13"},
    }
    return f"sb_{corpus}_{protocol}", results, TaskRecord(**(facts | record)).to_json(), samples


def _bootstrap(sums: np.ndarray, tokens: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    draws = generator.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=500)
    return (draws @ sums) / (draws @ tokens)


def write_run(
    folder: Path,
    model: ModelRecord | None,
    tasks: Sequence[Task],
    *,
    date: str = "2026-11-20T10-00-00.000001",
    seconds: float = 1_795_000_000.0,
    log_samples: bool = True,
    pretrained: str | None = None,
    limit: float | None = None,
    extra: dict[str, Any] | None = None,
    arguments_bytes: int = 0,
) -> Path:
    """Writes one run and returns the results file; `arguments_bytes` pads every sample as long prompts do."""
    name = pretrained or (f"/checkpoints/{model.name}" if model else "org/model")
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "results": {task: results for task, results, _, _ in tasks},
        "group_subtasks": {},
        "configs": {
            task: {
                "task": task,
                "metadata": {"version": 1.0, "sbeval": metadata} if metadata else {"version": 1.0},
                "metric_list": [{"metric": key.partition(",")[0]} for key in results],
            }
            for task, results, metadata, _ in tasks
        },
        "versions": {task: 1.0 for task, _, _, _ in tasks},
        "n-shot": {task: 0 for task, _, _, _ in tasks},
        "higher_is_better": {task: {} for task, _, _, _ in tasks},
        "n-samples": {task: {"original": len(samples), "effective": len(samples)} for task, _, _, samples in tasks},
        "config": {
            "model": "sb" if model else "hf",
            "model_args": {"pretrained": name, "dtype": "bfloat16"},
            **({"sbeval": dataclasses.asdict(model)} if model else {}),
            "batch_size": 1,
            "limit": limit,
            **{"random_seed": 0, "numpy_seed": 1234, "torch_seed": 1234, "fewshot_seed": 1234},
        },
        "git_hash": "abc1234",
        "date": seconds,
        "transformers_version": "5.23.0",
        "lm_eval_version": "0.4.13",
        "model_source": "sb" if model else "hf",
        "model_name": name,
        "total_evaluation_time_seconds": "94.5",
    } | (extra or {})
    path = folder / f"results_{date}.json"
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    if log_samples:
        for task, _, _, samples in tasks:
            if samples:
                haystack = ('A grain of "text" in a haystack.\n' * arguments_bytes)[:arguments_bytes]
                prompt = {"gen_args_0": {"arg_0": haystack}}
                with (folder / f"samples_{task}_{date}.jsonl").open("w", encoding="utf-8") as file:
                    for sample in samples:
                        padded = _padded(sample, prompt) if arguments_bytes else sample
                        file.write(json.dumps(padded, ensure_ascii=False) + "\n")
    return path


def _padded(sample: dict[str, Any], prompt: dict[str, Any]) -> dict[str, Any]:
    """Puts the prompt where lm-eval has it: after the document, before the answers."""
    first = {key: sample[key] for key in ("doc_id", "doc", "target") if key in sample}
    middle = {"arguments": prompt, "resps": [["?"]], "filtered_resps": ["?"], "filter": "none"}
    return first | middle | sample | {"arguments": prompt}


def write_pair(folder: Path, protocol: str, **task: Any) -> Path:
    """Writes one perplexity task of stick-breaking and of RoPE and returns the folder."""
    for attention in ("stickbreaking", "rope"):
        tasks = [perplexity_task(protocol, CURVES[attention], **task)]
        write_run(folder / attention, model_record(attention), tasks)
    return folder


def write_demo_pair(folder: Path) -> None:
    """Writes stick-breaking and RoPE, both trained at 1024, under two protocols at 256 to 65536."""
    for attention in ("stickbreaking", "rope"):
        curve = CURVES[attention]
        falling = [value - 0.05 * math.log2(1 + place) for place, value in enumerate(curve)]
        tasks = [perplexity_task("stream", curve), perplexity_task("fixed_target", falling)]
        write_run(folder / f"demo-{attention}", model_record(attention), tasks)


def position_task(
    curve: list[float],
    *,
    corpus: str = "stdlib",
    longest: int = 65536,
    by_document: bool = True,
    uneven_documents: bool | None = None,
) -> Task:
    """Returns one `position` task: NLL by position follows the curve over lengths, harder at the start.

    The targets of a bin go round among 40 documents, so bins of fewer than 5 positions have targets in fewer than 20.
    """
    edges = [2**power for power in range(int(math.log2(longest)) + 1)]
    bins = []
    for first, last in zip([1, *[edge + 1 for edge in edges[:-1]]], edges, strict=True):
        known = np.interp(math.log2(last), [math.log2(length) for length in LENGTHS], curve)
        start = 4.0 / math.sqrt(last) if last < 512 else 0.0
        bins.append([first, last, float(known + start - 0.1), 4 * (last - first + 1)])
    bins.append([longest + 1, longest + 1, 9.0, 4])  # cut short by the window's end
    intervals = [[nll - 0.1, nll + 0.2] for _, _, nll, _ in bins[:-1]] + [None]
    name = f"sb_{corpus}_position"
    record = TaskRecord(
        **{"family": "perplexity", "corpus": corpus, "corpus_sha256": "c0" * 32, "protocol": "position"},
        **{"lengths": [longest], "tokenizer_sha256": TOKENIZER, "bos": "text", "uneven_documents": uneven_documents},
    )
    results = {
        "alias": name,
        "position_nll,none": bins,
        "position_nll_stderr,none": "N/A",
        "position_nll_ci95,none": intervals,
        "position_clusters,none": [40] * (len(bins) - 1) + [4],
    }
    return name, results, record.to_json(), _position_samples(bins, curve) if by_document else []


def _position_samples(bins: list[list[Any]], curve: list[float]) -> list[dict[str, Any]]:
    levels = np.random.default_rng(int(1000 * curve[0])).normal(0.0, 0.05, 40)
    rows = []
    for _, _, nll, tokens in bins:
        counts = np.bincount(np.arange(tokens) % 40, minlength=40)
        own = nll + levels - (levels * counts).sum() / tokens
        rows.append([[f"file_{d:02d}.py", float(own[d] * counts[d]), int(counts[d])] for d in range(40) if counts[d]])
    halves = [[[name, nats / 2, count / 2] for name, nats, count in bin_rows] for bin_rows in rows]
    return [{"doc_id": index, "filter": "none", "position_nll": halves} for index in range(2)]


def ruler_task(
    name: str,
    limit_tokens: int,
    *,
    lengths: list[int] = LENGTHS[:7],
    depths: int = 11,
    repeats: int = 5,
    seed: int = 0,
    ceiling: float = 0.97,
) -> Task:
    """Returns one needle task on a grid of depths; needles further back than `limit_tokens` are mostly missed."""
    generator = np.random.default_rng(seed)
    samples = []
    for index in range(depths * repeats):
        depth = 100.0 * (index % depths) / (depths - 1)
        depths_percent = [[depth] for _ in lengths] if name not in DEPTHLESS else [[] for _ in lengths]
        doc = {"index": index, "lengths": lengths, "references": ["1234567"], "depths_percent": depths_percent}
        sample: dict[str, Any] = {"doc_id": index, "doc": doc, "target": "1234567", "filter": "none"}
        for length in lengths:
            back = length * (1 - depth / 100)
            share = ceiling if back <= limit_tokens else 0.06
            sample[metric_key("score", length)] = float(generator.random() < share)
        samples.append(sample)
    results: dict[str, Any] = {"alias": name}
    for length in lengths:
        scores = np.array([sample[metric_key("score", length)] for sample in samples])
        results[f"{metric_key('score', length)},none"] = float(scores.mean())
        results[f"{metric_key('score', length)}_stderr,none"] = float(scores.std(ddof=1) / math.sqrt(len(scores)))
    record = TaskRecord(family="ruler", protocol=name, lengths=lengths, seed=42, tokenizer_sha256=TOKENIZER)
    return name, results, record.to_json(), samples


RULER_TASKS = [
    *[f"sb_niah_{kind}" for kind in ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3")],
    *[f"sb_niah_{kind}" for kind in ("multivalue", "multiquery")],
    *[f"sb_ruler_{kind}" for kind in ("vt", "cwe", "fwe", "qa_squad", "qa_hotpot")],
]
DEPTHLESS = ("sb_ruler_cwe", "sb_ruler_fwe")


def ordinary_task(name: str, metric: str, value: float, *, stderr: float = 0.01, samples: int = 0) -> Task:
    """Returns an ordinary task; with samples, a question that one model answers is answered by every better one."""
    order = np.random.default_rng(7).permutation(samples)
    lines = [
        {"doc_id": place, "filter": "none", "metrics": [metric], "doc_hash": f"{place:064x}", metric: float(rank)}
        for place, rank in enumerate(order < round(value * samples))
    ]
    results = {"alias": name, f"{metric},none": value, f"{metric}_stderr,none": stderr}
    if samples:
        results[f"{metric}_stderr,none"] = math.sqrt(value * (1 - value) / samples)
    return name, results, None, lines


def text_of(results: Path, file: str = "summary.md", **options: Any) -> str:
    """A file of the report on these results, which is written beside them without images."""
    page = build_report([results], results.parent / "report", image_formats=(), **options)
    return page.with_name(file).read_text(encoding="utf-8")


def reported(folder: Path, **labels: str) -> Report:
    """Returns what a page would be written from, without images."""
    results = load_results([folder], labels=labels)
    return assemble(results, baseline=None, publish=lambda spec, stem: (stem, ()), folder=folder)
