"""Selects the models and tasks that a report shows, chooses the baseline, and merges training seeds into one model.

The baseline is the model whose numbers are subtracted from those of all others. Checkpoints that differ only in their
training seed are shown as one model: the mean over seeds, with the lowest and the highest value of a seed. Its
confidence interval is over documents. The lower end is the mean of the lower ends that the seeds have, and the upper
end likewise: all seeds are scored on the same documents, so averaging seeds does not narrow the interval. For each task
the mean is over the seeds that ran it. A context length that one of these seeds lacks is left out, with a note.
"""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
import pandas as pd

from sbeval.errors import UserError
from sbeval.reports.read.fields import display_name, length_text, name_list, unique_name
from sbeval.reports.read.files import Notes
from sbeval.reports.read.models import EvaluatedModel, describe_facts, group_models
from sbeval.reports.read.results import NUMBER_KEYS, Results, records, restricted
from sbeval.results.records import IDENTICAL_TARGETS

SEED_COLUMNS = ["seeds", "seed_low", "seed_high"]
_NUMBERED = re.compile(r"(?P<name>.+?)(?:[-_. ]s|[-_. ]?seed)[-_ ]?(?P<seed>\d+)", re.IGNORECASE)
_IDENTITY = [*NUMBER_KEYS, "family", "corpus", "tokenizer_sha256", "targets_sha256"]


def restrict(results: Results, only: Iterable[str]) -> Results:
    """Keeps only the models and tasks whose names match patterns such as `demo-*`.

    Patterns that match model names restrict the models, and patterns that match task names restrict the tasks. Without
    a pattern for models, those with results of the tasks are kept.

    Raises:
        UserError: a pattern matches neither a model nor a task.
    """
    labels = [model.label for model in results.models]
    labels_by_task = results.labels_by_task
    tasks = list(labels_by_task)
    selected_labels: list[str] = []
    selected_tasks: list[str] = []
    for pattern in only:
        matching_labels = [model.label for model in results.models if _matches(pattern, *_names(model))]
        matching_tasks = [task for task in tasks if _matches(pattern, task)]
        if not matching_labels and not matching_tasks:
            names = f"the models are {', '.join(labels)}; the tasks are {', '.join(tasks)}"
            raise UserError(f"{pattern!r} matches no model and no task: {names}.")
        selected_labels += matching_labels
        selected_tasks += matching_tasks
    shown_tasks = set(selected_tasks or tasks)
    if selected_tasks and not selected_labels:
        selected_labels = [label for task in selected_tasks for label in labels_by_task[task]]
    shown_labels = set(selected_labels or labels)
    models = [
        dataclasses.replace(model, parent=model.parent if model.parent in shown_labels else None)
        for model in results.models
        if model.label in shown_labels
    ]
    return dataclasses.replace(
        results,
        models=tuple(models),
        measurements=restricted(results.measurements, shown_labels, shown_tasks),
        by_reader={reader: restricted(rows, shown_labels, shown_tasks) for reader, rows in results.by_reader.items()},
    )


def _matches(pattern: str, *names: str) -> bool:
    return any(pattern == name or fnmatchcase(name, pattern) for name in names)


def _names(model: EvaluatedModel) -> tuple[str, ...]:
    return tuple(name for name in (model.label, model.record.name, model.record.recipe) if name)


def choose_baseline(models: Iterable[EvaluatedModel], requested: str | None) -> str:
    """Returns the label of the baseline: the model whose numbers are subtracted from those of the others.

    It is the requested model if a name is given, else the first RoPE model, else the first model.

    Raises:
        UserError: no model has the requested name.
    """
    known = list(models)
    rope = [model for model in known if model.record.attention == "rope"]
    chosen = rope or known if requested is None else [model for model in known if requested in _names(model)]
    if not chosen:
        labels = ", ".join(model.label for model in known)
        raise UserError(f"Expected the baseline to be one of the models {labels}, found {requested!r}.")
    return chosen[0].label


def comparable(table: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Keeps the rows of models that have the same tokenizer as the baseline or whose tokenizer is not recorded."""
    if table.empty:
        return table
    tokenizers = table.groupby("setting", sort=False)["tokenizer_sha256"].first()
    wanted = tokenizers.get(baseline, tokenizers.iloc[0])
    same = [label for label, tokenizer in tokenizers.items() if tokenizer == wanted or pd.isna(tokenizer)]
    return table[table["setting"].isin(same)]


def pool_seeds(results: Results, labels: Mapping[str, str] | None = None) -> Results:
    """Merges training seeds: returns results in which checkpoints that differ only in their seed are one model.

    The columns `SEED_COLUMNS` are added to the table of measurements.

    Args:
        results: results in which every seed is a model.
        labels: name of a group of seeds to the name that the report shows instead.
    """
    notes = results.notes
    groups = seed_groups(results.models, notes)
    if not groups:
        return results
    taken = {model.label for model in results.models} - {seed.label for group in groups.values() for seed in group}
    pooled_label: dict[str, str] = {}
    pooled: dict[str, EvaluatedModel] = {}
    for name, members in groups.items():
        label = display_name((labels or {}).get(name, name))
        label = label if label not in taken else f"{label} ({len(members)} seeds)"
        taken.add(label)
        runs = sorted((run for member in members for run in member.runs), key=lambda run: run.date, reverse=True)
        pooled[label] = dataclasses.replace(
            members[0],
            key=("seeds", label),
            label=label,
            runs=tuple(runs),
            seeds=len(members),
            left_aside=tuple(aside for member in members for aside in member.left_aside),
        )
        pooled_label |= {member.label: label for member in members}
    models: dict[str, EvaluatedModel] = {}
    for model in results.models:
        label = pooled_label.get(model.label, model.label)
        parent = pooled_label.get(model.parent or "", model.parent)
        models.setdefault(label, dataclasses.replace(pooled.get(label, model), parent=parent))
    return dataclasses.replace(
        results,
        models=tuple(models.values()),
        measurements=_measurements(results.measurements, pooled_label, pooled, notes),
        by_reader={reader: reader.pool(rows, pooled_label, notes) for reader, rows in results.by_reader.items()},
    )


def seed_groups(models: Sequence[EvaluatedModel], notes: Notes | None = None) -> dict[str, list[EvaluatedModel]]:
    """Returns name of a group to its models: two or more that differ only in their training seed.

    If two models of a recipe have the same seed, the seeds of this recipe are not merged, and `notes` gets a sentence.

    Training recipe and seed are read from the model records. The recipe may name its seed, as `recipe-seed1` does. If a
    record has no recipe or seed, they are read from a model name such as `model-seed1`.
    """
    by_recipe: dict[tuple[object, ...], list[tuple[object, EvaluatedModel]]] = defaultdict(list)
    for model in models:
        record = model.record
        name: str | None = record.recipe
        seed: object = record.training_seed
        if name is None or seed is None:
            match = _NUMBERED.fullmatch(record.name)
            if match is None:
                continue
            name = match["name"]
            seed = int(match["seed"])
        elif (match := _NUMBERED.fullmatch(name)) and int(match["seed"]) == seed:
            name = match["name"]
        by_recipe[(name, *describe_facts(model), record.parameters, record.format)].append((seed, model))
    groups: dict[str, list[EvaluatedModel]] = {}
    for key, members in by_recipe.items():
        seeds = Counter(seed for seed, _ in members)
        if len(seeds) < 2:
            continue
        if len(seeds) == len(members):
            name = unique_name(display_name(str(key[0])), groups, "{} ({})")
            groups[name] = [model for _, model in members]
        elif notes is not None:
            repeated = max(seeds, key=lambda seed: seeds[seed])
            alike = name_list(model.label for seed, model in members if seed == repeated)
            notes.add(None, f"the seeds of recipe {key[0]!r} are not merged: {alike} have the same seed, {repeated}")
    return groups


def _measurements(
    rows: pd.DataFrame, pooled_label: Mapping[str, str], pooled: Mapping[str, EvaluatedModel], notes: Notes
) -> pd.DataFrame:
    inside = rows["setting"].isin(pooled_label.keys())
    seed_rows = rows[inside].copy()
    seed_rows["setting"] = seed_rows["setting"].map(pooled_label)
    # under protocols without identical targets, seeds are averaged even if they were scored on different targets
    seed_rows.loc[~seed_rows["protocol"].isin(IDENTICAL_TARGETS), "targets_sha256"] = None
    geometric = seed_rows["metric"].str.contains("perplexity")
    values = ["value", "ci95_low", "ci95_high"]
    seed_rows["seed_low"], seed_rows["seed_high"] = seed_rows["value"], seed_rows["value"]
    seed_rows.loc[geometric, values] = np.log(seed_rows.loc[geometric, values])
    grouped = seed_rows.groupby(["setting", *_IDENTITY], dropna=False, sort=False)
    means = grouped.agg(
        {
            **{column: "first" for column in rows.columns if column not in ("setting", *_IDENTITY)},
            **{column: "mean" for column in (*values, "stderr")},
            **{column: "min" for column in ("tokens", "clusters", "samples", "seed_low")},
            "seed_high": "max",
        }
    ).reset_index()
    means["seeds"] = grouped.size().to_numpy()
    spread = means["metric"].str.contains("perplexity")
    means.loc[spread, values] = np.exp(means.loc[spread, values])
    ran = seed_rows.assign(original=rows.loc[inside, "setting"]).groupby(["setting", "task"])["original"].nunique()
    wanted = pd.Series([ran[key] for key in zip(means["setting"], means["task"], strict=True)], index=means.index)
    for row in records(ran.rename("ran").reset_index()):
        label = row["setting"]
        all_seeds = pooled[row["setting"]].seeds
        if row["ran"] < all_seeds:
            seeds = f"{row['ran']} of {all_seeds} seeds"
            notes.add(None, f"{label}: {row['task']} was run with {seeds}; its numbers are means over these.")
    gaps: dict[tuple[str, str], set[int]] = defaultdict(set)
    for row in records(means[means["seeds"] < wanted].dropna(subset=["context_length_tokens"])):
        gaps[row["setting"], row["task"]].add(int(row["context_length_tokens"]))
    for (label, task), lengths in gaps.items():
        where = ", ".join(map(length_text, sorted(lengths)))
        reason = "was not run with every seed on the same targets, and is not shown there."
        notes.add(None, f"{label}: {task} at {where} {reason}")
    means = means[means["seeds"] == wanted]
    return pd.concat([rows[~inside], means], ignore_index=True)[[*rows.columns, *SEED_COLUMNS]]


def check_labels(results: Results, labels: Mapping[str, str]) -> None:
    """Checks that each key of `labels` is the name of a model, a group of seeds or a text.

    Raises:
        UserError: a key is none of these.
    """
    models = group_models([run for model in results.models for run in model.runs])
    names = {name for model in models for name in (model.label, display_name(model.record.name))}
    known = names | set(seed_groups(models))
    known |= set(results.texts)
    for name in labels:
        if name not in known:
            raise UserError(f"Expected --label to name one of {', '.join(sorted(known))}, found {name!r}.")
