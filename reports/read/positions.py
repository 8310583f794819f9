"""NLL by position in one long window: a row a bin of positions, and sums of every source document in every bin."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sbeval.foreign_files import usable_number
from sbeval.reports.read.fields import shown_name
from sbeval.reports.read.files import Notes
from sbeval.reports.read.measurements import interval_ends, typed_frame
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.results import Reader, averaging
from sbeval.reports.read.sample_lines import read_lines

POSITION_COLUMNS = [
    "setting",
    "task",
    "corpus",
    "corpus_sha256",
    "context_length_tokens",
    "first",
    "last",
    "nll",
    "ci95_low",
    "ci95_high",
    "tokens",
    "clusters",
    "tokenizer_sha256",
]
UNLOGGED = "were not logged (--log_samples)"
NOT_BY_DOCUMENT = "hold no sums by position and document"
Bin = tuple[int, int]
"""First and last position."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SumsByPosition:
    """Sums of one run by bin of positions and source document.

    Attributes:
        sums: bin to (document to [NLL in nats, tokens]).
        obstacle: why there are none; empty where there are.
    """

    sums: Mapping[Bin, Mapping[str, NDArray[np.float64]]]
    obstacle: str = ""

    @classmethod
    def averaged(cls, parts: Sequence["SumsByPosition"]) -> "SumsByPosition":
        """Averages NLL over models scored on the same text; a bin stays where all have the same targets in it."""
        if obstacle := next((part.obstacle for part in parts if part.obstacle), ""):
            return cls(sums={}, obstacle=obstacle)
        sums = {}
        for place, first in parts[0].sums.items():
            found = [part.sums.get(place, {}) for part in parts]
            if all(scored_targets(one) == scored_targets(first) for one in found):
                sums[place] = {document: np.mean([one[document] for one in found], axis=0) for document in first}
        return cls(sums=sums)


def tabulate_positions(models: Sequence[EvaluatedModel], notes: Notes) -> pd.DataFrame:
    """Returns one row a position bin, columns `POSITION_COLUMNS`, of the run that counts."""
    rows: list[dict[str, Any]] = []
    for model in models:
        for run, task in model.task_runs():
            record = task.record
            context: dict[str, Any] = {
                "setting": model.label,
                "task": shown_name(task.name),
                "corpus": shown_name(record.corpus) if record and record.corpus else None,
                "corpus_sha256": record.corpus_sha256 if record else None,
                "context_length_tokens": record.lengths[0] if record and record.lengths else math.nan,
                "tokenizer_sha256": record.tokenizer_sha256 if record else None,
                "results_file": str(run.path),
            }
            for key, value in task.metrics.items():
                if _is_bins(key, value):
                    rows += _position_rows(context, value, task.metrics, key.partition(",")[2])
    frame = typed_frame(rows, [*POSITION_COLUMNS, "results_file"])
    counting = frame.groupby(["setting", "task", "corpus_sha256"], dropna=False)["results_file"]
    return frame[frame["results_file"] == counting.transform("first")][POSITION_COLUMNS].reset_index(drop=True)


def _position_rows(
    context: Mapping[str, Any], bins: Sequence[Any], metrics: Mapping[str, Any], filter_name: str
) -> list[dict[str, Any]]:
    intervals = _list_beside(metrics, "position_nll_ci95", filter_name, len(bins))
    clusters = _list_beside(metrics, "position_clusters", filter_name, len(bins))
    rows = []
    for item, ends, count in zip(bins, intervals, clusters, strict=True):
        if (
            isinstance(item, list)
            and len(item) == 4
            and all(usable_number(part) is not None for part in item)
            and item[3] > 0
        ):
            low, high = interval_ends(ends)
            number = usable_number(count)
            rows.append(
                {
                    **context,
                    "first": item[0],
                    "last": item[1],
                    "nll": item[2],
                    "ci95_low": low,
                    "ci95_high": high,
                    "tokens": item[3],
                    "clusters": math.nan if number is None else number,
                }
            )
    return rows


def _list_beside(metrics: Mapping[str, Any], name: str, filter_name: str, length: int) -> Sequence[Any]:
    value = metrics.get(f"{name},{filter_name}", metrics.get(name))
    return value if isinstance(value, list) and len(value) == length else [None] * length


def _pool_positions(rows: pd.DataFrame, pooled_label: Mapping[str, str], notes: Notes) -> pd.DataFrame:
    """Averages seeds bin by bin, where every seed has the bin."""
    inside = rows["setting"].isin(pooled_label.keys())
    own = rows[inside].copy()
    own["original"], own["setting"] = own["setting"], own["setting"].map(pooled_label)
    values = {**dict.fromkeys(("nll", "ci95_low", "ci95_high"), "mean"), **dict.fromkeys(("tokens", "clusters"), "min")}
    keys = [column for column in rows.columns if column not in values]
    means = own.groupby(keys, dropna=False, sort=False).agg({**values, "original": "nunique"})
    means = means.reset_index()
    ran = own.groupby(["setting", "task"])["original"].nunique()
    wanted = [ran[key] for key in zip(means["setting"], means["task"], strict=True)]
    means = means[means["original"] == wanted]
    return pd.concat([rows[~inside], means[rows.columns]], ignore_index=True)


def read_positions(models: Sequence[EvaluatedModel], notes: Notes) -> dict[tuple[str, str], SumsByPosition]:
    """Returns (model label, task) to the sums of the run that counts (`EvaluatedModel.task_runs`)."""
    found: dict[tuple[str, str], SumsByPosition] = {}
    for model in models:
        for _, task in model.task_runs():
            key = (model.label, shown_name(task.name))
            bins = next((value for name, value in task.metrics.items() if _is_bins(name, value)), None)
            if bins is not None and key not in found:
                found[key] = (
                    SumsByPosition(sums={}, obstacle=UNLOGGED)
                    if task.samples is None
                    else read_position_sums(task.samples, [_bin(one) for one in bins], notes, samples=task.samples_used)
                )
    return found


def read_position_sums(
    path: Path, bins: Sequence[Bin | None], notes: Notes, *, samples: float | None
) -> SumsByPosition:
    """Adds up the rows [document, NLL in nats, tokens] of every sample, bin by bin; a row not finite is left out."""
    sums: dict[Bin, dict[str, NDArray[np.float64]]] = {}
    bad_rows = 0
    for sample in read_lines(path, notes, samples=samples):
        rows_by_bin = sample.get("position_nll")
        if not isinstance(rows_by_bin, list):
            continue
        for place, rows in zip(bins, rows_by_bin, strict=False):
            for row in rows if isinstance(rows, list) and place is not None else ():
                if not isinstance(row, list) or len(row) != 3:
                    return SumsByPosition(sums={}, obstacle=NOT_BY_DOCUMENT)
                nll, tokens = map(usable_number, row[1:])
                bad_rows += nll is None or tokens is None
                if nll is not None and tokens is not None and tokens > 0 and place is not None:
                    documents = sums.setdefault(place, {})
                    documents[str(row[0])] = documents.get(str(row[0]), 0.0) + np.array([nll, tokens])
    if bad_rows:
        notes.add(path, f"{bad_rows} sums by position are not finite numbers and were left out.")
    return SumsByPosition(sums=sums, obstacle="" if sums else NOT_BY_DOCUMENT)


def scored_targets(documents: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Returns the targets scored in each document of a bin."""
    return {document: float(values[1]) for document, values in documents.items()}


def _is_bins(name: str, value: object) -> bool:
    return name.partition(",")[0] == "position_nll" and isinstance(value, list)


def _bin(item: object) -> Bin | None:
    if isinstance(item, list) and len(item) == 4 and all(type(end) is int for end in item[:2]):
        return item[0], item[1]
    return None


POSITIONS = Reader(read=tabulate_positions, pool=_pool_positions)
POSITION_SUMS = Reader(read=read_positions, pool=averaging(SumsByPosition.averaged))
