"""Effective attention spans of every layer and head, read from the results files."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.foreign_files import usable_number
from sbeval.reports.read.fields import context_metric, shown_name
from sbeval.reports.read.files import Notes
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.results import Reader

SPAN_COLUMNS = [
    *("setting", "task", "context_length_tokens", "layer", "head"),
    *("span50", "span90", "span99", "remainder", "first_token", "entropy"),
]
METRIC = "attention_span"


def tabulate_spans(models: Sequence[EvaluatedModel], notes: Notes) -> pd.DataFrame:
    """Returns one row a layer, head and context length, columns `SPAN_COLUMNS`; spans in keys, NaN where there is none.

    Of several runs of one model the first of `EvaluatedModel.task_runs` counts, length by length.
    """
    rows: list[dict[str, Any]] = []
    for model in models:
        seen: dict[str, set[int]] = defaultdict(set)
        for _, task in model.task_runs():
            name = shown_name(task.name)
            for key, heads in task.metrics.items():
                parsed = context_metric(key)
                if parsed is None or parsed[0] != METRIC or not isinstance(heads, list) or parsed[1] in seen[name]:
                    continue
                seen[name].add(parsed[1])
                where = {"setting": model.label, "task": name, "context_length_tokens": parsed[1]}
                rows += [{**where, **head} for found in heads if (head := _head(found)) is not None]
    return pd.DataFrame(rows, columns=SPAN_COLUMNS)


def _head(found: object) -> dict[str, float] | None:
    # results of earlier versions end with the remaining stick
    if not isinstance(found, list) or len(found) not in (6, 8) or not all(type(place) is int for place in found[:2]):
        return None
    numbers = [math.nan if (number := usable_number(value)) is None else number for value in found[2:]]
    return {"layer": found[0], "head": found[1], **dict(zip(SPAN_COLUMNS[5:], numbers, strict=False))}


def _one_seed(rows: pd.DataFrame, pooled_label: Mapping[str, str], notes: Notes) -> pd.DataFrame:
    """Keeps one seed of each group: heads of different seeds have nothing to do with each other."""
    labels = rows["setting"].map(lambda label: pooled_label.get(label, label))
    kept: dict[str, str] = {}
    for original, label in zip(rows["setting"], labels, strict=True):
        kept.setdefault(label, original)
    for label in dict.fromkeys(labels[rows["setting"] != labels.map(kept)]):
        notes.add(None, f"{label}: attention spans are shown for one of its seeds, since heads cannot be averaged.")
    return rows.assign(setting=labels)[(rows["setting"] == labels.map(kept)).to_numpy()].reset_index(drop=True)


SPANS = Reader(read=tabulate_spans, pool=_one_seed)
