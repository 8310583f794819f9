"""Scores by needle depth and context length, from the samples of needle tasks."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.reports.analyse.statistics import wilson_interval
from sbeval.reports.read.fields import context_metric
from sbeval.reports.read.sample_scores import SampleScores

NEEDLE_COLUMNS = ["setting", "task", "context_length_tokens", "depth_percent", "score", "low", "high", "samples"]
_FINEST_GRID = 21
_BIN_PERCENT = 10.0
_UNEVEN_PERCENT = 1.5


def tabulate_needles(samples: Mapping[tuple[str, str], SampleScores]) -> pd.DataFrame:
    """Returns one row a cell of every heatmap, columns `NEEDLE_COLUMNS`, from (model label, task) to its samples.

    Where a sample asks for several needles its depth is their mean.
    """
    rows: list[dict[str, Any]] = []
    for (label, task), scores in samples.items():
        for (metric, _), values in scores.scores.items():
            parsed = context_metric(metric)
            if parsed is None or parsed[0] != "score" or parsed[1] not in scores.depths_percent:
                continue
            depths = scores.depths_percent[parsed[1]]
            found = [(depths[key], value) for key, value in values.items() if key in depths and 0 <= value <= 1]
            rows += [{"setting": label, "task": task, **cell} for cell in _cells(parsed[1], found)]
    return pd.DataFrame.from_records(rows, columns=NEEDLE_COLUMNS) if rows else pd.DataFrame(columns=NEEDLE_COLUMNS)


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
