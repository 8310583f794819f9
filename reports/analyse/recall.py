"""Recall scores by number of pairs, by distance and by context length, taken apart from their metric names."""

import math
import re
from collections.abc import Mapping

import pandas as pd

from sbeval.reports.analyse.statistics import share_interval

SOLVED = 0.99
_METRIC = re.compile(r"(?P<metric>exact_match|answer_nll|chance)(?:_(?P<pairs>\d+)_(?P<unit>pairs|tokens))?")
RECALL_COLUMNS = [
    *("setting", "task", "metric", "pairs", "unit", "context_length_tokens", "value", "ci95_low", "ci95_high")
]
UNITS = {"pairs": "pairs", "tokens": "tokens back"}


def recall_scores(measurements: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of recall tasks, columns `RECALL_COLUMNS` and those of seeds.

    `pairs` counts what `unit`, a value of `UNITS`, says: pairs of a sequence, or tokens since an answer was read; both
    are NA where a metric names neither.
    Intervals of shares are those of `share_interval`.
    """
    rows = measurements[measurements["family"] == "recall"].copy()
    parts = rows["metric"].str.extract(f"^{_METRIC.pattern}$")
    rows["metric"], rows["pairs"] = parts["metric"], pd.to_numeric(parts["pairs"]).astype("Int64")
    rows["unit"] = parts["unit"].map(UNITS)
    rows = rows.dropna(subset=["metric", "context_length_tokens"])
    lows, highs = share_interval(rows)
    share = rows["metric"] == "exact_match"
    rows.loc[share, "ci95_low"], rows.loc[share, "ci95_high"] = lows[share], highs[share]
    seeds = [column for column in ("seeds", "seed_low", "seed_high") if column in rows]
    return rows[[*RECALL_COLUMNS, *seeds]].reset_index(drop=True)


def intervals(scores: pd.DataFrame, model: str, column: str) -> dict[int, tuple[str, str]]:
    """Returns what a column counts to the ends of one model's interval, as shares are written."""
    own = scores[(scores["setting"] == model) & scores["ci95_low"].notna()]
    rows = own[[column, "ci95_low", "ci95_high"]].itertuples(index=False, name=None)
    return {int(count): (f"{low:.1%}", f"{high:.1%}") for count, low, high in rows}


def is_drawn(metric: str) -> bool:
    """Whether `recall_scores` holds a metric of a recall task."""
    return _METRIC.fullmatch(metric) is not None


def solved_up_to(scores: Mapping[int, float], threshold: float = SOLVED) -> int | None:
    """Returns the largest number such that every one up to it is solved, None where the smallest is not."""
    solved = None
    for count in sorted(scores):
        if math.isnan(scores[count]) or scores[count] < threshold:
            break
        solved = count
    return solved
