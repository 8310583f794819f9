"""Writes the results of whole experiments: position schemes with seeds, context extensions, and probes of recall.

The schemes are those of `research/paper_experiments/recipes`, read from there; their curves are made up, of the
kinds such models show: falling, flat, broken at the training length, and broken at a multiple of it.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from result_files import (
    CURVES,
    RULER_TASKS,
    TOKENIZER,
    Task,
    model_record,
    ordinary_task,
    perplexity_task,
    position_task,
    ruler_task,
    write_demo_pair,
    write_run,
)

from sbeval.results.records import ModelRecord, TaskRecord, metric_key
from sbeval.training.recipe import read_mapping

RECIPES = Path(__file__).parents[2] / "research" / "paper_experiments" / "recipes"
LENGTHS = [256 << step for step in range(9)]
SCHEMES = sorted(file.name.removesuffix(".yaml") for file in RECIPES.iterdir())


def scheme_model(scheme: str, seed: int = 0, **changes: Any) -> ModelRecord:
    """Returns the record that the adapter writes for a checkpoint trained with a recipe."""
    recipe = _recipe(scheme)["model"]
    scaling = recipe.get("rope_parameters")
    facts = {
        **{"name": scheme, "recipe": scheme, "training_seed": seed},
        "checkpoint_sha256": f"{SCHEMES.index(scheme) * 100 + seed:064x}",
        "training_length_tokens": recipe["training_length_tokens"],
        **{key: recipe.get(key) for key in ("sliding_window", "remainder", "head_norm")},
        "rope_scaling": {key: scaling[key] for key in ("rope_type", "factor")} if scaling else None,
    }
    weights = recipe.get("attention_weights")
    return model_record(recipe["attention"] + (f"-{weights}" if weights else ""), **(facts | changes))


def scheme_curve(scheme: str, seed: int, lengths: Sequence[int]) -> list[float]:
    facts = _recipe(scheme)["model"]
    reach = {"stickbreaking": 1 << 30, "alibi": 1 << 30}.get(facts["attention"], facts["training_length_tokens"])
    window = facts.get("sliding_window")
    sight = window * 4 if window else (4096 if facts["attention"] == "alibi" else 1 << 30)
    reach = 1 << 30 if window and window < 1024 else reach * (2 if "dynamic" in scheme else 1)
    steep = {"fire": 0.35, "nope": 0.9}.get(facts["attention"], 0.7)
    level = 1.7 + 0.02 * (SCHEMES.index(scheme) % 5) + 0.012 * ((seed * 7) % 3 - 1)
    return [
        level
        + 0.6 * (256 / min(length, sight)) ** 0.5
        + steep * (1 + 0.1 * seed) * max(0.0, math.log2(length / reach)) ** 0.8
        for length in lengths
    ]


def write_schemes(folder: Path, *, seeds: int = 1, arguments_bytes: int = 0) -> None:
    """Writes one run for each scheme and seed, as `sbeval run --tasks sb_stdlib` does."""
    for scheme in SCHEMES:
        for seed in range(seeds):
            curve = scheme_curve(scheme, seed, LENGTHS)
            tasks = [perplexity_task("stream", curve), perplexity_task("fixed_target", curve), position_task(curve)]
            place, seconds = folder / f"{scheme}-{seed}", 1_795_000_000.0 + seed
            write_run(place, scheme_model(scheme, seed), tasks, seconds=seconds, arguments_bytes=arguments_bytes)


def write_extensions(folder: Path, *, schemes: Sequence[str] = ("scheme_stickbreaking", "scheme_rope")) -> None:
    """Writes checkpoints before and after `sbeval extend --context 4096`, on the Pile."""
    for scheme in schemes:
        parent = scheme_model(scheme)
        origin = {"name": parent.name, "sha256": parent.checkpoint_sha256, "training_length_tokens": 1024}
        child = scheme_model(
            scheme,
            name=f"{scheme}-4k",
            checkpoint_sha256=f"e7{SCHEMES.index(scheme):062x}",
            training_length_tokens=4096,
            extended_from=origin,
            recipe=None,
            rope_scaling={"rope_type": "yarn", "factor": 4.0} if "rope" in scheme else None,
        )
        before = scheme_curve(scheme, 0, LENGTHS)
        after = [min(nll, 1.69 + 0.6 * (256 / length) ** 0.5) for nll, length in zip(before, LENGTHS, strict=True)]
        after = [nll + 0.3 * max(0, place - 6) * ("rope" in scheme) for place, nll in enumerate(after)]
        for model, curve in ((parent, before), (child, after)):
            write_run(folder / f"{model.name}-pile", model, [perplexity_task("rolling", curve, corpus="pile_10k")])


def span_task(attention: str, *, layers: int = 8, heads: int = 3, lengths: Sequence[int] = LENGTHS[2:7]) -> Task:
    """Returns attention spans: most heads short, a few as wide as the context, one of them empty."""
    width = np.random.default_rng(layers * heads).lognormal(3.5, 1.0, (layers, heads))
    width[2, 1] = width[5, 0] = 1e9
    results: dict[str, Any] = {"alias": "sb_span"}
    for length in lengths:
        rows: list[list[float | None]] = []
        for layer in range(layers):
            for head in range(heads):
                spans: list[float | None] = [min(length * share, width[layer, head] * share) for share in (0.5, 0.9, 1)]
                rest = 0.3 / (1 + layer) if attention == "stickbreaking" else 0.0
                sink, entropy = (0.0, 2.0) if attention == "stickbreaking" else (0.3, math.log(length))
                seen = (layer, head) != (0, 2)
                rows.append([layer, head, *(spans if seen else [None] * 3), rest, sink, entropy if seen else None])
        results[f"{metric_key('attention_span', length)},none"] = rows
        known = [row[3] for row in rows if row[3] is not None]
        results[f"{metric_key('span90', length)},none"] = sum(known) / len(known)
        results[f"{metric_key('remaining_stick', length)},none"] = float(np.mean([row[5] for row in rows]))
    record = TaskRecord(family="span", protocol="span", lengths=list(lengths), tokenizer_sha256=TOKENIZER)
    return "sb_span", results, record.to_json(), []


def mqrar_task(capacity: int, *, pairs: Sequence[int] = (32, 64, 96, 128, 160, 192), samples: int = 50) -> Task:
    """Returns MQRAR scores of a model that recalls as many pairs as its capacity."""
    results: dict[str, Any] = {"alias": "sb_mqrar"}
    lines: list[dict[str, Any]] = [
        {"doc_id": index, "doc": {"index": index}, "filter": "none"} for index in range(samples)
    ]
    generator = np.random.default_rng(capacity)
    for count in pairs:
        score = 0.999 if count <= capacity else max(0.02, 0.9 * capacity / count)
        for metric, value in (("exact_match", score), ("answer_nll", -math.log(score)), ("chance", 1 / 4096)):
            key = metric_key(f"{metric}_{count}_pairs", 768)
            numbers = np.full(samples, value)
            if metric == "exact_match":
                numbers = np.clip(generator.normal(value, 0.02, samples), 0, 1)
            for line, number in zip(lines, numbers, strict=True):
                line[key] = float(number)
            results[f"{key},none"] = float(np.mean(numbers))
            results[f"{key}_stderr,none"] = float(np.std(numbers, ddof=1) / math.sqrt(samples))
    record = TaskRecord(family="recall", protocol="mqrar", lengths=[768], seed=42)
    return "sb_mqrar", results, record.to_json(), lines


def flipflop_task(reach: int, *, lengths: Sequence[int] = LENGTHS[1:7], samples: int = 50) -> Task:
    """Returns flip-flop scores of a model that remembers a bit over `reach` tokens."""
    results: dict[str, Any] = {"alias": "sb_flipflop"}
    for length in lengths:
        score = 1.0 if length <= reach else 0.5 + 0.5 * reach / length
        for metric, value in (("exact_match", score), ("answer_nll", 1 - score), ("chance", 0.5)):
            results[f"{metric_key(metric, length)},none"] = value
            spread = math.sqrt(score * (1 - score) / samples) if metric == "exact_match" else 0.0
            results[f"{metric_key(metric, length)}_stderr,none"] = spread
    record = TaskRecord(family="recall", protocol="flipflop", lengths=list(lengths), seed=42)
    return "sb_flipflop", results, record.to_json(), []


def write_everything(folder: Path) -> None:
    """Writes a broad set: two models with all kinds of tasks, and two more position schemes without samples."""
    write_demo_pair(folder)
    for attention, reach in (("stickbreaking", 6000), ("rope", 1024)):
        tasks = [
            ruler_task(name, reach, seed=index, ceiling=0.97 if index < 8 else 0.6)
            for index, name in enumerate(RULER_TASKS)
        ]
        shift = 0.02 if attention == "stickbreaking" else 0.0
        tasks += [
            position_task(CURVES[attention]),
            ordinary_task("hellaswag", "acc_norm", 0.312 + shift),
            ordinary_task("piqa", "acc", 0.601 + shift),
            ordinary_task("wikitext", "word_perplexity", 88.2 - 100 * shift, stderr=float("nan")),
            span_task(attention),
            mqrar_task(160 if attention == "stickbreaking" else 64),
            flipflop_task(1 << 20 if attention == "stickbreaking" else 1024),
        ]
        later = {"date": "2026-11-20T12-00-00.000001", "seconds": 1_795_003_600.0}
        write_run(folder / f"tasks-{attention}", model_record(attention), tasks, **later)
    for attention in ("nope", "alibi"):
        stream = perplexity_task("stream", CURVES[attention])
        write_run(folder / f"demo-{attention}", model_record(attention), [stream], log_samples=False)


def _recipe(scheme: str) -> dict[str, Any]:
    return read_mapping(scheme, RECIPES)[0]
