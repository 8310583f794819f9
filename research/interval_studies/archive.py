"""Reads archives of `docs/results` for the studies of intervals, and writes their tables."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sbeval.reports.read.files import Notes
from sbeval.reports.read.samples import SumsByDocument, read_document_sums

STREAM, FIXED = "sb_stdlib_stream", "sb_stdlib_fixed_target"
NAMES = {
    "stickbreaking": "stick-breaking",
    "stickbreaking_remainder": "stick-breaking, remainder bias",
    "stickbreaking_remainder_norm": "stick-breaking, remainder bias, head norm",
    "rope": "RoPE",
    "rope_dynamic1": "RoPE, `dynamic:1` at evaluation",
    "rope_dynamic4": "RoPE, `dynamic:4` at evaluation",
    "rope_4x": "RoPE, trained at 4x length",
    "rope_4x_dynamic": "RoPE, trained at 4x length with `dynamic:4`",
    "nope": "NoPE",
    "alibi": "ALiBi",
    "fire": "FIRE",
    "forgetting": "FoX",
    "rope_window_256": "RoPE, window 1/4x",
    "rope_window_512": "RoPE, window 1/2x",
    "rope_window_1024": "RoPE, window 1x",
    "ssmax": "SSMax, RoPE",
    "entmax": "entmax-1.5, RoPE",
    "asentmax": "ASEntmax, RoPE",
    "nape": "NAPE",
    "nape_asentmax": "ASEntmax, NAPE",
    "stickbreaking_extended": "stick-breaking, extended to 4x",
    "rope_extended": "RoPE, extended to 4x with `dynamic:4`",
}


def read_tasks(
    folder: Path,
) -> tuple[dict[tuple[str, str], dict[str, Any]], dict[tuple[str, str], SumsByDocument]]:
    """Reads lm-eval's files below `results/`: metrics and per-document sums by scheme and task."""
    metrics: dict[tuple[str, str], dict[str, Any]] = {}
    sums: dict[tuple[str, str], SumsByDocument] = {}
    for file in sorted(folder.glob("results/*/*/results_*.json")):
        scheme = file.parents[1].name.removeprefix("scheme_")
        date = file.stem.removeprefix("results_")
        for task, values in json.loads(file.read_text(encoding="utf-8"))["results"].items():
            metrics[scheme, task] = {key.partition(",")[0]: value for key, value in values.items()}
            samples = file.with_name(f"samples_{task}_{date}.jsonl")
            if samples.is_file() and (found := read_document_sums(samples, Notes())) is not None:
                sums[scheme, task] = found
    return metrics, sums


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)] + [""]
