"""Scores one real model with `hf`, `sb`, vLLM in process and vLLM's completions server, and compares the numbers.

    python -m research.real_models.engines real/smollm2 --text real/texts/modules.jsonl.gz --out real/engines

Every backend runs in fp32 on the same tokens: each protocol that sums of log-probabilities answer, on few and short
texts, and three tasks of RULER as a chat. One table holds the largest difference to `hf` by task, in nats per token,
and another the prompt tokens that were sent to the server beside those that its `usage` counts. vLLM runs on a CPU with
the packages that `research/real_models/vllm_environment.sh` installs.
"""

import argparse
import gzip
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from research.real_models.served import VLLM_ENVIRONMENT, counted, served

TEXT_TASKS = ("rolling", "stream", "position", "fixed_target", "sliding", "riffled", "pairs")
# the least lengths in tokens at which these tasks have room for a sample with SmolLM2's tokenizer, rounded up
RECALL_TOKENS = {
    "sb_niah_single_1_forced": 256,
    "sb_json_kv_forced": 840,
    "sb_association_forced": 384,
    "sb_turns_forced": 384,
    "sb_copy_passage": 128,
    "sb_copy_selective": 256,
    "sb_copy_phrase": 256,
    "sb_mqrar": 128,
    "sb_mqrar_text": 128,
    "sb_flipflop": 128,
    "sb_many_shot_file": 256,
}
CHAT_TASKS = ("sb_niah_single_1", "sb_ruler_vt", "sb_ruler_cwe")
LINES = "lines"
"""A task of lm-eval's own kind, `loglikelihood`: a line of code behind the one before it."""
BATCH_SIZE = "8"
"""Prompts of one request to vLLM."""
BACKENDS = ("hf", "sb", "vllm-server", "vllm")
REFERENCE = "hf"
OF_TEXT = ("word_", "byte_", "bits_per_byte")
"""Metrics that follow from the NLL and the text's words and bytes."""
Metrics = dict[str, dict[str, float]]
"""A number by task and metric."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Tasks that each backend runs in one command.

    Attributes:
        name: a folder of results.
        tasks: their names.
        metadata: their options.
        longest: tokens of the longest prompt with its answer.
        options: further options of the command.
    """

    name: str
    tasks: Sequence[str]
    metadata: Mapping[str, object]
    longest: int
    options: Sequence[str] = ()


def scored(text: Path, out: Path, lengths: Sequence[int], documents: int) -> Evaluation:
    """Returns every protocol that sums of log-probabilities answer; writes its texts, cut from those of `text`."""
    with gzip.open(text, "rt", encoding="utf-8") as lines:
        texts = [str(json.loads(line)["text"]) for line in lines][:6]
    characters = 8 * max(lengths)  # room for one window and more
    _write(out / "documents.jsonl", [{"text": of[:characters]} for of in texts])
    pairs = [{"context": of[: characters - 100], "target": of[characters - 100 : characters]} for of in texts]
    _write(out / "pairs.jsonl", pairs)
    short = [[line.strip() for line in of.splitlines() if 10 <= len(line.strip()) <= 40][:20] for of in texts[:3]]
    labelled = [{"text": line, "label": str(label)} for label, of in enumerate(short) for line in of]
    _write(out / "labels.jsonl", labelled)
    lines = [{"line": first, "next": following} for of in short for first, following in itertools.pairwise(of)]
    _write(out / "lines.jsonl", lines)
    task = {
        "task": LINES,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str((out / "lines.jsonl").resolve())}},
        "output_type": "loglikelihood",
        "test_split": "test",
        "doc_to_text": "{{line}}",
        "doc_to_target": "{{next}}",
        "target_delimiter": "\n",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    }
    (out / "tasks").mkdir(exist_ok=True)
    (out / "tasks" / "lines.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    metadata: dict[str, object] = {
        "data_path": str(out / "documents.jsonl"),
        "context_lengths": lengths,
        "num_samples": 1,
        "sb_text_riffled": {"context_lengths": lengths[-1:], "piece_tokens": lengths[-1] // 8},
        "sb_text_pairs": {"data_path": str(out / "pairs.jsonl")},
    }
    of_task: dict[str, dict[str, object]] = {
        "sb_mqrar": {"pairs": 16},
        "sb_mqrar_text": {"pairs": 8},
        "sb_many_shot_file": {"examples_file": str(out / "labels.jsonl")},
    }
    for name, tokens in RECALL_TOKENS.items():
        metadata[name] = {"context_lengths": [tokens], **of_task.get(name, {})}
    return Evaluation(
        name="scored",
        tasks=[*(f"sb_text_{task}" for task in TEXT_TASKS), *RECALL_TOKENS, LINES],
        metadata=metadata,
        longest=max(*lengths, *RECALL_TOKENS.values()),
        options=("--limit", str(documents), "--include_path", str(out / "tasks")),
    )


def generated(lengths: Sequence[int], samples: int) -> Evaluation:
    """Returns three tasks of RULER with the model's chat template."""
    return Evaluation(
        name="generated",
        tasks=CHAT_TASKS,
        metadata={"context_lengths": lengths, "num_samples": samples},
        longest=max(lengths),
        options=("--apply_chat_template", "--log_samples"),
    )


def _write(file: Path, rows: Sequence[Mapping[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def execute(backend: str, evaluation: Evaluation, model: str, arguments: Mapping[str, object], out: Path) -> Metrics:
    """Runs one command; returns its numbers by task and metric, none where it failed."""
    folder = out / evaluation.name / backend
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "sbeval", "run", "--model", model, "--tasks", ",".join(evaluation.tasks)]
    command += ["--model_args", json.dumps(arguments), "--metadata", json.dumps(evaluation.metadata)]
    command += ["--output_path", str(folder), *evaluation.options]
    command += ["--device", "cpu"] if model in ("hf", "sb") else ["--batch_size", BATCH_SIZE]
    started, log = time.monotonic(), folder / "log"
    with log.open("w") as output:
        ended = subprocess.run(command, env={**VLLM_ENVIRONMENT}, stdout=output, stderr=output, check=False)
    seconds = time.monotonic() - started
    print(f"{evaluation.name}, {backend}: exit code {ended.returncode} after {seconds:.0f} s", flush=True)
    if ended.returncode:
        print(f"    {log.read_text().strip().splitlines()[-1][:500]}", flush=True)
        return {}
    newest = max(folder.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    return numbers(json.loads(newest.read_text(encoding="utf-8"))["results"])


def numbers(results: Mapping[str, Mapping[str, object]]) -> Metrics:
    """Returns the metrics of a results file that are numbers, once; a perplexity becomes its logarithm, in nats."""
    kept: Metrics = {}
    for task, metrics in results.items():
        for metric, value in metrics.items():
            name = metric.partition(",")[0]
            if isinstance(value, bool) or not isinstance(value, int | float) or "stderr" in name:
                continue
            if name.startswith(OF_TEXT):
                continue
            perplexity = "perplexity" in name and value > 0
            label = name.replace("perplexity", "nll") if perplexity else name
            kept.setdefault(task, {})[label] = math.log(value) if perplexity else float(value)
    return kept


def in_nats(metric: str) -> bool:
    """Whether a metric is a negative log-likelihood or a difference of two."""
    return any(word in metric.partition("@")[0] for word in ("nll", "gain"))


def differences(reference: Mapping[str, float], other: Mapping[str, float]) -> tuple[float | None, list[str]]:
    """Returns the largest difference of an NLL, None where there is none, and what else is not equal.

    A metric that one of both lacks is not equal.
    """
    both = reference.keys() & other.keys()
    nats = [abs(reference[metric] - other[metric]) for metric in both if in_nats(metric)]
    rest = {metric for metric in both if not in_nats(metric) and reference[metric] != other[metric]}
    return max(nats, default=None), sorted(rest | (reference.keys() ^ other.keys()))


def print_table(results: Mapping[str, Metrics]) -> float:
    """Prints one row a task with each backend's difference to the reference; returns the largest in nats."""
    others = [name for name in results if name != REFERENCE]
    print("| task | NLLs | " + " | ".join(f"{name}: largest difference" for name in others) + " | not equal |")
    print("|---|---|" + "---|" * (len(others) + 1))
    largest = 0.0
    for task, reference in results[REFERENCE].items():
        cells, unequal = [], []
        for name in others:
            nats, rest = differences(reference, results[name].get(task, {}))
            cells.append("" if nats is None else f"{nats:.1e}")
            unequal += [f"{name}: {metric}" for metric in rest]
            largest = max(largest, nats or 0.0)
        print(f"| `{task}` | {sum(map(in_nats, reference))} | {' | '.join(cells)} | {', '.join(unequal)} |")
    return largest


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="gzipped JSON lines with documents")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=1, help="documents or samples of each scored task")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128], help="scored context lengths in tokens")
    parser.add_argument("--chat_lengths", type=int, nargs="*", default=[1024, 2048], help="of RULER in tokens")
    parser.add_argument("--samples", type=int, default=1, help="samples of each RULER task and length")
    parser.add_argument("--backends", nargs="*", default=[*BACKENDS], choices=BACKENDS)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    evaluations = [scored(options.text, options.out, options.lengths, options.documents)]
    if options.chat_lengths:
        evaluations.append(generated(options.chat_lengths, options.samples))
    results: dict[str, dict[str, Metrics]] = {evaluation.name: {} for evaluation in evaluations}
    counts = {}
    model, most_tokens = str(options.model), max(evaluation.longest for evaluation in evaluations) + 256
    loaded: dict[str, object] = {"pretrained": model, "dtype": "float32", "max_length": most_tokens}

    def keep(backend: str, name: str, given: Mapping[str, object], evaluation: Evaluation) -> None:
        if metrics := execute(backend, evaluation, name, given, options.out):
            results[evaluation.name][backend] = metrics

    if "vllm-server" in options.backends:
        with served(options.model, options.out / "server.log", most_tokens) as (address, _):
            for evaluation in evaluations:
                with counted(address) as (relay, usage):
                    completions = {
                        "model": "model",
                        "base_url": f"{relay}/v1/completions",
                        "tokenizer": model,
                        "tokenizer_backend": "huggingface",
                        "max_length": most_tokens,
                        "num_concurrent": 1,
                    }
                    keep("vllm-server", "local-completions", completions, evaluation)
                    counts[evaluation.name] = usage
    for evaluation in evaluations:
        if "hf" in options.backends:
            keep("hf", "hf", {**loaded, "softmax_dtype": "float32"}, evaluation)
        if "sb" in options.backends:
            keep("sb", "sb", loaded, evaluation)
        if "vllm" in options.backends:
            in_process = {
                "pretrained": model,
                "dtype": "float32",
                "max_model_len": most_tokens,
                "enforce_eager": True,
                "enable_prefix_caching": False,
            }
            keep("vllm", "vllm", in_process, evaluation)
    for evaluation in evaluations:
        answered = results[evaluation.name]
        if REFERENCE not in answered or len(answered) < 2:
            raise SystemExit(f"There is nothing to compare: see the logs in {options.out / evaluation.name}.")
        print(f"\n{evaluation.name}: difference to {REFERENCE}, in nats per token")
        largest = print_table({name: answered[name] for name in BACKENDS if name in answered})
        print(f"largest difference of an NLL: {largest:.2e} nats per token")
    print("\n| requests to the server | prompt tokens sent | by `usage` | generated | requests whose counts differ |")
    print("|---|---|---|---|---|")
    for name, usage in counts.items():
        print(f"| {name}: {usage.requests} | {usage.sent} | {usage.read} | {usage.generated} | {usage.unequal} |")


if __name__ == "__main__":
    main()
