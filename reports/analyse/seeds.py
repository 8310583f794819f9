"""Shows checkpoints that differ in their training seed alone as one line: the mean over seeds, with their spread.

The mean's interval over documents is the mean of the seeds' intervals: all seeds are scored on the same documents, so
averaging seeds does not narrow it. A task counts the seeds that ran it; a length that one of these lacks is left out
with a note.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import pandas as pd

from sbeval.reports.analyse.positions import PositionSums
from sbeval.reports.analyse.statistics import wilson_interval
from sbeval.reports.read.fields import shown_name
from sbeval.reports.read.models import EvaluatedModel, describe_facts, length_text
from sbeval.reports.read.notes import Notes
from sbeval.reports.read.results import Results, records
from sbeval.reports.read.sample_scores import averaged
from sbeval.reports.read.samples import SumsByDocument

T = TypeVar("T")
SEED_COLUMNS = ["seeds", "seed_low", "seed_high"]
_NUMBERED = re.compile(r"(?P<name>.+?)[-_. ]?s(?:eed)?[-_ ]?(?P<seed>\d+)", re.IGNORECASE)
_IDENTITY = [
    "task",
    "family",
    "corpus",
    "corpus_sha256",
    "protocol",
    "metric",
    "filter",
    "context_length_tokens",
    "text_length_tokens",
    "max_length_tokens",
    "few_shot",
    "tokenizer_sha256",
]


def pool_seeds(results: Results, labels: Mapping[str, str] | None = None) -> Results:
    """Returns the results with one model for each group of seeds; the measurements gain `SEED_COLUMNS`.

    Args:
        results: every model by itself.
        labels: names to show in place of a group's own.
    """
    groups = seed_groups(results.models)
    if not groups:
        return results
    taken = {model.label for model in results.models} - {one.label for group in groups.values() for one in group}
    pooled_label: dict[str, str] = {}
    pooled: dict[str, EvaluatedModel] = {}
    for name, members in groups.items():
        label = shown_name((labels or {}).get(name, name))
        label = label if label not in taken else f"{label} ({len(members)} seeds)"
        taken.add(label)
        runs = sorted((run for one in members for run in one.runs), key=lambda run: run.date, reverse=True)
        pooled[label] = dataclasses.replace(
            members[0], key=("seeds", label), label=label, runs=tuple(runs), seeds=len(members)
        )
        pooled_label |= {one.label: label for one in members}
    models = []
    for model in results.models:
        one = pooled.get(pooled_label.get(model.label, ""), model)
        if one not in models:
            models.append(one)
    models = [
        dataclasses.replace(one, parent=pooled_label.get(one.parent, one.parent) if one.parent else None)
        for one in models
    ]
    return dataclasses.replace(
        results,
        models=tuple(models),
        measurements=_measurements(results.measurements, pooled_label, pooled, results.notes),
        positions=_positions(results.positions, pooled_label),
        needles=_needles(results.needles, pooled_label),
        spans=_spans(results.spans, pooled_label, results.notes),
        documents=_pooled(results.documents, pooled_label, SumsByDocument.averaged),
        samples=_pooled(results.samples, pooled_label, averaged),
        position_sums=_pooled(results.position_sums, pooled_label, PositionSums.averaged),
    )


def seed_groups(models: Sequence[EvaluatedModel]) -> dict[str, list[EvaluatedModel]]:
    """Returns a name to the models that differ in their seed alone, for groups of two or more.

    Seeds and recipes are read from the records; where a checkpoint keeps none, from names such as `model-seed1`.
    """
    found: dict[tuple[object, ...], list[tuple[object, EvaluatedModel]]] = defaultdict(list)
    for model in models:
        record = model.record
        name: str | None = record.recipe
        seed: object = record.training_seed
        if name is None or seed is None:
            match = _NUMBERED.fullmatch(record.name)
            if match is None:
                continue
            name, seed = match["name"], int(match["seed"])
        found[(name, *describe_facts(model), record.parameters, record.format)].append((seed, model))
    groups: dict[str, list[EvaluatedModel]] = {}
    for key, members in found.items():
        if len(members) > 1 and len({seed for seed, _ in members}) == len(members):
            name, count = shown_name(str(key[0])), 2
            while name in groups:
                name, count = f"{shown_name(str(key[0]))} ({count})", count + 1
            groups[name] = [model for _, model in members]
    return groups


def _measurements(
    rows: pd.DataFrame, pooled_label: Mapping[str, str], pooled: Mapping[str, EvaluatedModel], notes: Notes
) -> pd.DataFrame:
    inside = rows["setting"].isin(pooled_label.keys())
    own = rows[inside].copy()
    own["setting"] = own["setting"].map(pooled_label)
    geometric = own["metric"].str.contains("perplexity")
    values = ["value", "ci95_low", "ci95_high"]
    own["lowest"], own["highest"] = own["value"], own["value"]
    own.loc[geometric, values] = np.log(own.loc[geometric, values])
    grouped = own.groupby(["setting", *_IDENTITY], dropna=False, sort=False)
    means = grouped.agg(
        {
            **{column: "first" for column in rows.columns if column not in ("setting", *_IDENTITY)},
            **{column: "mean" for column in (*values, "stderr")},
            **{column: "min" for column in ("tokens", "clusters", "samples", "lowest")},
            "highest": "max",
        }
    ).reset_index()
    means["seeds"] = grouped.size().to_numpy()
    spread = means["metric"].str.contains("perplexity")
    means.loc[spread, values] = np.exp(means.loc[spread, values])
    means = means.rename(columns={"lowest": "seed_low", "highest": "seed_high"})
    ran = own.assign(original=rows.loc[inside, "setting"]).groupby(["setting", "task"])["original"].nunique()
    wanted = pd.Series([ran[key] for key in zip(means["setting"], means["task"], strict=True)], index=means.index)
    for row in records(ran.rename("ran").reset_index()):
        label, all_seeds = row["setting"], pooled[row["setting"]].seeds
        if row["ran"] < all_seeds:
            notes.add(
                None, f"{label}: {row['task']} was run with {row['ran']} of {all_seeds} seeds, and rests on these."
            )
    gaps: dict[tuple[str, str], set[int]] = defaultdict(set)
    for row in records(means[means["seeds"] < wanted].dropna(subset=["context_length_tokens"])):
        gaps[row["setting"], row["task"]].add(int(row["context_length_tokens"]))
    for (label, task), lengths in gaps.items():
        where = ", ".join(map(length_text, sorted(lengths)))
        notes.add(None, f"{label}: {task} at {where} was not run with every seed, and is not shown there.")
    means = means[means["seeds"] == wanted]
    return pd.concat([rows[~inside], means], ignore_index=True)[[*rows.columns, *SEED_COLUMNS]]


def _positions(rows: pd.DataFrame, pooled_label: Mapping[str, str]) -> pd.DataFrame:
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


def _needles(rows: pd.DataFrame, pooled_label: Mapping[str, str]) -> pd.DataFrame:
    inside = rows["setting"].isin(pooled_label.keys())
    if not inside.any():
        return rows
    own = rows[inside].copy()
    own["setting"] = own["setting"].map(pooled_label)
    own["score"] = own["score"] * own["samples"]
    keys = ["setting", "task", "context_length_tokens", "depth_percent"]
    cells = own.groupby(keys, sort=False)[["score", "samples"]].sum().reset_index()
    intervals = [wilson_interval(hits, trials) for hits, trials in zip(cells["score"], cells["samples"], strict=True)]
    cells["low"], cells["high"] = [low for low, _ in intervals], [high for _, high in intervals]
    cells["score"] = cells["score"] / cells["samples"]
    return pd.concat([rows[~inside], cells[rows.columns]], ignore_index=True)


def _spans(rows: pd.DataFrame, pooled_label: Mapping[str, str], notes: Notes) -> pd.DataFrame:
    """Keeps one seed of each group: heads of different seeds have nothing to do with each other."""
    labels = rows["setting"].map(lambda label: pooled_label.get(label, label))
    kept: dict[str, str] = {}
    for original, label in zip(rows["setting"], labels, strict=True):
        kept.setdefault(label, original)
    for label in dict.fromkeys(labels[rows["setting"] != labels.map(kept)]):
        notes.add(None, f"{label}: attention spans are shown for one of its seeds, since heads cannot be averaged.")
    return rows.assign(setting=labels)[(rows["setting"] == labels.map(kept)).to_numpy()].reset_index(drop=True)


def _pooled(
    found: Mapping[tuple[str, str], T], pooled_label: Mapping[str, str], average: Callable[[Sequence[T]], T]
) -> dict[tuple[str, str], T]:
    parts: dict[tuple[str, str], list[T]] = defaultdict(list)
    for (label, task), one in found.items():
        parts[pooled_label.get(label, label), task].append(one)
    return {key: members[0] if len(members) == 1 else average(members) for key, members in parts.items()}
