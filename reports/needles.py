"""Scores by needle depth and context length, read from the samples of needle tasks."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sbeval.records import parse_metric_key
from sbeval.reports.names import shown_name
from sbeval.reports.notes import Notes
from sbeval.reports.samples import read_lines
from sbeval.reports.settings import Setting
from sbeval.reports.statistics import wilson_interval

NEEDLE_COLUMNS = ["setting", "task", "context_length_tokens", "depth_percent", "score", "low", "high", "samples"]
_FINEST_GRID = 21
_BIN_PERCENT = 10.0
_UNEVEN_PERCENT = 1.5


def tabulate_needles(settings: Sequence[Setting], notes: Notes) -> pd.DataFrame:
    """Returns one row a cell of every heatmap, columns `NEEDLE_COLUMNS`.

    Only the newest run with samples of a setting and task counts, length by length. Where a sample asks for several
    needles its depth is their mean.
    """
    rows: list[dict[str, Any]] = []
    for setting in settings:
        seen: dict[str, set[int]] = defaultdict(set)
        for run in setting.runs:
            for task in run.tasks:
                if task.samples is None or task.record is None or task.record.family != "ruler":
                    continue
                scores = read_depth_scores(task.samples, notes)
                fresh = {length: found for length, found in scores.items() if length not in seen[task.name]}
                seen[task.name] |= set(fresh)
                for length, found in fresh.items():
                    name = shown_name(task.name)
                    rows += [{"setting": setting.label, "task": name, **cell} for cell in _cells(length, found)]
    return pd.DataFrame.from_records(rows, columns=NEEDLE_COLUMNS) if rows else pd.DataFrame(columns=NEEDLE_COLUMNS)


def read_depth_scores(path: Path, notes: Notes) -> dict[int, list[tuple[float, float]]]:
    """Returns context length to (depth in percent, score) of every sample that records both."""
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for sample in read_lines(path, notes):
        depths = _depths(sample.get("doc"))
        for key, value in sample.items():
            parsed = parse_metric_key(key)
            if parsed is None or parsed[0] != "score" or not isinstance(value, int | float):
                continue
            depth = depths.get(parsed[1])
            if depth is not None and 0 <= value <= 1:
                found[parsed[1]].append((depth, float(value)))
    return dict(found)


def _depths(document: object) -> dict[int, float]:
    if not isinstance(document, Mapping):
        return {}
    lengths, percents = document.get("lengths"), document.get("depths_percent")
    if not isinstance(lengths, list) or not isinstance(percents, list):
        return {}
    depths: dict[int, float] = {}
    for length, needles in zip(lengths, percents, strict=False):
        if isinstance(length, int) and isinstance(needles, list) and needles:
            depths[length] = sum(float(needle) for needle in needles) / len(needles)
    return depths


def _cells(length: int, found: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    exact = sorted({depth for depth, _ in found})
    steps = [later - earlier for earlier, later in itertools.pairwise(exact)]
    grid = len(exact) <= _FINEST_GRID and (not steps or max(steps) - min(steps) <= _UNEVEN_PERCENT)
    groups: dict[float, list[float]] = defaultdict(list)
    for depth, score in found:
        groups[depth if grid else round(depth / _BIN_PERCENT) * _BIN_PERCENT].append(score)
    cells = []
    for depth, scores in sorted(groups.items()):
        low, high = wilson_interval(sum(scores), len(scores))
        cells.append(
            {
                "context_length_tokens": length,
                "depth_percent": depth,
                "score": sum(scores) / len(scores),
                "low": low,
                "high": high,
                "samples": len(scores),
            }
        )
    return cells
