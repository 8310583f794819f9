"""Counts of samples that were left out or cut, since their prompts do not fit a context length, as text."""

from collections.abc import Hashable

import pandas as pd

from sbeval.reports.read.fields import grouped, length_text, quote_name
from sbeval.reports.read.results import LENGTH, records

COUNTS = ("left_out_samples", "cut_samples", "samples", "samples_sha256")
"""Columns of the tidy table on samples that do not fit."""
_MOST_NAMED = 4


def on_other_samples(rows: pd.DataFrame) -> bool:
    """Whether numbers of one curve, at several context lengths, are of different samples.

    `rows` are those of one model; a curve of several tasks has one row for each task and length.
    """
    if "samples_sha256" not in rows:
        return False
    tasks = rows["task"] if "task" in rows else pd.Series("", index=rows.index)
    return any(of_task.nunique(dropna=False) > 1 for _, of_task in rows["samples_sha256"].groupby(tasks))


def samples_key(digests: pd.Series) -> str | None:
    """Returns a hash key of the samples behind a mean over tasks; None if none of the tasks left samples out."""
    return None if digests.isna().all() else "+".join(digests.fillna("all").astype(str))


def unfit_cell(row: dict[Hashable, object] | dict[str, object]) -> tuple[str, ...]:
    """Returns the small print of a number's cell: how many samples were left out or cut; empty if none was."""
    notes = (("left_out_samples", "left out"), ("cut_samples", "cut"))
    return tuple(f"{count:,} {word}" for column, word in notes if (count := _count(row.get(column))))


def unfit_sentence(rows: pd.DataFrame) -> str:
    """Returns the sentence of a caption that counts the samples left out or cut, by task and length; "" if none was.

    `rows` are rows of the tidy table that one figure shows.
    """
    if "left_out_samples" not in rows:
        return ""
    known = [row for row in records(rows.drop_duplicates(["setting", "task", LENGTH])) if unfit_cell(row)]
    several_tasks, several_models = (rows[column].nunique() > 1 for column in ("task", "setting"))
    sentences = []
    for column, words in (("left_out_samples", "Left out, since they do not fit"), ("cut_samples", "Cut to fit")):
        places = grouped(
            (
                (row["task"] if several_tasks else "", row["setting"] if several_models else ""),
                f"{count:,} of {_all_samples(row):,} at {length_text(int(row[LENGTH]))}",
            )
            for row in known
            if (count := _count(row[column]))
        )
        parts = [
            ", ".join(counts) + (f" in {task}" if task else "") + (f" with {quote_name(model)}" if model else "")
            for (task, model), counts in places.items()
        ]
        if parts:
            more = f"; and in {len(parts) - _MOST_NAMED} more cases" if len(parts) > _MOST_NAMED else ""
            sentences.append(f"{words}: {'; '.join(parts[:_MOST_NAMED])}{more} samples.")
    if any(on_other_samples(of_model) for _, of_model in rows.groupby("setting")):
        sentences.append("Lines are not joined between lengths at which other samples were left.")
    return " ".join(sentences)


def _all_samples(row: dict[str, object]) -> int:
    return _count(row["samples"]) + _count(row["left_out_samples"])


def _count(value: object) -> int:
    return 0 if value is None or pd.isna(value) else int(value)  # type: ignore[call-overload]
