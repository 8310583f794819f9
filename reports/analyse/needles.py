"""Scores by needle depth and context length, from the samples of needle tasks."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from sbeval.reports.analyse.statistics import score_interval
from sbeval.reports.read.fields import context_metric
from sbeval.reports.read.results import TaskKey
from sbeval.reports.read.samples import SampleScores

NEEDLE_COLUMNS = ["setting", "task", "context_length_tokens", "depth_percent", "score", "low", "high", "samples"]
_FINEST_GRID = 21
_BIN_PERCENT = 10.0
_UNEVEN_PERCENT = 1.5


def needle_cells(samples: Mapping[TaskKey, SampleScores]) -> pd.DataFrame:
    """Returns one row a cell of every heatmap, columns `NEEDLE_COLUMNS`; a cell counts the samples of all seeds.

    Where a sample asks for several needles its depth is their mean.
    """
    rows = []
    for (label, task), scores in samples.items():
        cells: dict[tuple[int, float], list[float]] = defaultdict(list)
        for length, depth, cell in (found for one in scores.seeds or (scores,) for found in _cells(one)):
            cells[length, depth] += cell
        for (length, depth), cell in sorted(cells.items()):
            mean, count = float(np.mean(cell)), len(cell)
            stderr = float(np.std(cell, ddof=1)) / count**0.5 if count > 1 else 0.0
            low, high = score_interval(mean, stderr, count)
            rows.append((label, task, length, depth, mean, float(low), float(high), count))
    return pd.DataFrame(rows, columns=NEEDLE_COLUMNS)


def _cells(scores: SampleScores) -> Iterable[tuple[int, float, list[float]]]:
    """Yields (context length, depth in percent, scores of the samples)."""
    for (metric, _), values in scores.scores.items():
        parsed = context_metric(metric)
        if parsed is None or parsed[0] != "score" or parsed[1] not in scores.depths_percent:
            continue
        depths = scores.depths_percent[parsed[1]]
        found = [(depths[key], value) for key, value in values.items() if key in depths and 0 <= value <= 1]
        exact = sorted({depth for depth, _ in found})
        steps = [later - earlier for earlier, later in itertools.pairwise(exact)]
        grid = len(exact) <= _FINEST_GRID and (not steps or max(steps) - min(steps) <= _UNEVEN_PERCENT)
        groups: dict[float, list[float]] = defaultdict(list)
        for depth, score in found:
            groups[depth if grid else round(depth / _BIN_PERCENT) * _BIN_PERCENT].append(score)
        for depth, cell in sorted(groups.items()):
            yield parsed[1], depth, cell
