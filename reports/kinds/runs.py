"""Three sections: speed and memory of each run, provenance of every number, and notes on data that was left out."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sbeval.errors import visible
from sbeval.reports.analyse.findings import parameters_text
from sbeval.reports.read.fields import display_name, length_text
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.record_texts import (
    extrapolation_text,
    rope_scaling_text,
    self_test_text,
    sentence_text,
    switched_off_texts,
    unread_text,
)
from sbeval.reports.read.runs import EvaluationRun, TaskResult, mapping
from sbeval.reports.section import Cell, Fact, Fold, Kind, Link, Material, Section, Table

_SPEED = ("tokens per second", "peak memory", "minutes", "longest context", "kernels", "dtype", "machine")
_TASKS_AT_MOST = 2
_NOT_RECORDED = "not recorded"


def _speed(material: Material) -> Section:
    """Builds the section "Speed and memory"."""
    table = Table.of(
        ("model", *_SPEED),
        (_speed_row(model, run) for model in material.results.models for run in model.runs),
        stem="speed",
        caption="Speed and memory of every run",
        explanation=(
            "Scored tokens per second of model time over the whole run, all lengths together. Runs on different "
            "machines or at different lengths are not comparable."
        ),
    )
    return Section(identifier="speed", title="Speed and memory", tables=(table,))


def _tasks(run: EvaluationRun) -> str:
    names = [display_name(task.name) for task in run.tasks]
    return ", ".join(names) if len(names) <= _TASKS_AT_MOST else f"{names[0]} and {len(names) - 1} more tasks"


def _speed_row(model: EvaluatedModel, run: EvaluationRun) -> list[Cell]:
    size = f"{parameters_text(model.record.parameters)} parameters, " if model.record.parameters else ""
    heading = Cell(name=model.label, small=(size + _tasks(run),), in_files=model.label)
    record = run.record
    lengths = [length for task in run.tasks if task.record for length in task.record.lengths]
    texts = [
        f"{record.tokens_per_second:,.0f}" if record.tokens_per_second else _NOT_RECORDED,
        f"{record.peak_memory_bytes / 2**30:.2f} GiB" if record.peak_memory_bytes else _NOT_RECORDED,
        _minutes(run),
        length_text(max(lengths)) if lengths else _NOT_RECORDED,
        record.kernels or _NOT_RECORDED,
        record.dtype or _NOT_RECORDED,
        record.gpu or ("CPU" if run.described else _NOT_RECORDED),
    ]
    return [heading, *(Cell(cell, missing=cell == _NOT_RECORDED) for cell in texts)]


def _minutes(run: EvaluationRun) -> str:
    try:
        return f"{float(run.raw['total_evaluation_time_seconds']) / 60:.1f}"
    except (KeyError, TypeError, ValueError):
        return _NOT_RECORDED


def _provenance(material: Material) -> Section:
    """Builds the section "Provenance": facts about each run, which the page shows after a click."""
    folds = [_fold(model, run, material.folder) for model in material.results.models for run in model.runs]
    return Section(
        identifier="provenance",
        title="Provenance",
        lead="The runs behind the numbers: one entry for every result file, the newest of a model first.",
        folds=tuple(folds),
    )


def _left_out(material: Material) -> Section | None:
    """Builds the section "Notes" on data that the report left out; None if there are no notes."""
    if not (notes := material.results.notes):
        return None
    links = [_link(note.path, material.folder) if note.path else None for note in notes]
    return Section(
        identifier="left-out",
        title="Notes",
        lead="Results that are not shown, or are shown with a reservation, and why.",
        remarks=tuple(Fact(text=note.reason, link=link) for note, link in zip(notes, links, strict=True)),
    )


SPEED = Kind(section=_speed)
PROVENANCE = Kind(section=_provenance)
LEFT_OUT = Kind(section=_left_out)


def run_facts(run: EvaluationRun) -> dict[str, str]:
    """Returns name of a fact to the fact about a run, in the order shown; facts that were not recorded are left out."""
    record = run.record
    facts: dict[str, Any] = {
        "date": f"{run.date:%Y-%m-%d %H:%M} UTC",
        "command": record.command,
        "command, rebuilt": None if record.command else f"{rebuilt_command(run)} (the file does not keep the original)",
        "model": f"{record.name} ({record.format})",
        "answered by": record.backend,
        "checkpoint hash": record.checkpoint_sha256,
        "parameters": f"{record.parameters:,}" if record.parameters else None,
        "attention": record.attention,
        "remainder": record.remainder if record.remainder != "none" else None,
        "head norm": "yes" if record.head_norm else None,
        "recipe": record.recipe,
        "training seed": record.training_seed,
        "window": f"{record.sliding_window:,} tokens" if record.sliding_window else None,
        "position scaling": rope_scaling_text(record.rope_scaling),
        "extrapolation": extrapolation_text(record.extrapolation),
        "training length": f"{record.training_length_tokens:,} tokens" if record.training_length_tokens else None,
        "extended from": _listed(record.extended_from or {}),
        "tensors left unread": unread_text(record.unread),
        "dtype": record.dtype,
        "kernels": record.kernels,
        "self-test": self_test_text(record),
        "special tokens": sentence_text(record.added_tokens),
        "switched off": "; ".join(switched_off_texts(record)) or None,
        "skip threshold": f"{record.skip_threshold:g}" if record.skip_threshold else None,
        "longest input": _longest_input(run),
        "documents limited to": f"{run.limit:g}" if run.limit is not None else None,
        "GPU": record.gpu or ("none recorded (CPU)" if run.described else None),
        "versions": _versions(run),
        "seeds": _seeds(run.raw),
        "batch size": mapping(run.raw.get("config")).get("batch_size"),
        "git": run.raw.get("git_hash"),
    }
    return {key: str(value) for key, value in facts.items() if value not in (None, "", {})}


def _longest_input(run: EvaluationRun) -> str | None:
    """Returns, in words, the longest context length scored and, for tasks without these, the model's `max_length`."""
    lengths = [length for task in run.tasks if task.record for length in task.record.lengths]
    longest = f"{max(lengths):,} tokens" if lengths else ""
    bounded = run.record.max_length if any(not (task.record and task.record.lengths) for task in run.tasks) else None
    bound = f"{bounded:,} tokens{' in tasks without context lengths' if lengths else ''}" if bounded else ""
    return ", ".join(part for part in (longest, bound) if part) or None


def rebuilt_command(run: EvaluationRun) -> str:
    """Rebuilds lm-eval's command line from the model, arguments, tasks and limit that the results file records."""
    parts = ["lm_eval", "--model", run.model_source]
    if run.model_args:
        parts += ["--model_args", run.model_args]
    parts += ["--tasks", ",".join(task.name for task in run.tasks)]
    if run.limit is not None:
        parts += ["--limit", f"{run.limit:g}"]
    return shlex.join(parts)


def task_facts(task: TaskResult) -> str:
    """Returns the facts about one task of a run in one line."""
    record = task.record
    if record is None:
        shots = "" if task.few_shot is None else f"{task.few_shot}-shot"
        return ", ".join(part for part in (shots, f"version {task.version}" if task.version else "") if part)
    parts = [
        f"{record.family}, {record.protocol}",
        f"lengths {', '.join(length_text(length) for length in record.lengths)}" if record.lengths else "",
        f"left out {', '.join(map(length_text, record.dropped_lengths))}" if record.dropped_lengths else "",
        f"corpus {record.corpus} {(record.corpus_sha256 or '')[:12]}".rstrip() if record.corpus else "",
        record.corpus_detail or "",
        f"BOS {record.bos}" if record.bos else "",
        f"separator {record.separator!r}" if record.separator is not None else "",
        f"{record.targets_per_window} targets per window" if record.targets_per_window else "",
        _own_share(record.own_document_share),
        f"tokenizer {record.tokenizer_sha256[:12]}" if record.tokenizer_sha256 else "",
        f"seed {record.seed}" if record.seed is not None else "",
    ]
    return "; ".join(part for part in parts if part)


def _fold(model: EvaluatedModel, run: EvaluationRun, folder: Path) -> Fold:
    facts = [Fact(name=name, text=text) for name, text in run_facts(run).items()]
    facts.append(Fact(name="result file", link=_link(run.path, folder)))
    for task in run.tasks:
        link = None if task.samples is None else _link(task.samples, folder, "samples")
        facts.append(Fact(name=task.name, text=task_facts(task), link=link))
    return Fold(name=model.label, suffix=f", {run.date:%Y-%m-%d %H:%M}", facts=tuple(facts))


def _link(path: Path, folder: Path, text: str | None = None) -> Link:
    target = quote(os.fsencode(os.path.relpath(path, folder)))  # bytes: a file name need not be UTF-8
    return Link(target=target, text=text or visible(path.name))


def _versions(run: EvaluationRun) -> str:
    versions = dict(run.record.versions)
    for key, package in (("lm_eval_version", "lm_eval"), ("transformers_version", "transformers")):
        if run.raw.get(key):
            versions.setdefault(package, str(run.raw[key]))
    return _listed(versions)


def _seeds(raw: Mapping[str, Any]) -> str:
    config = mapping(raw.get("config"))
    return _listed({key.removesuffix("_seed"): config[key] for key in config if key.endswith("_seed")})


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)


def _own_share(share: Mapping[str, float] | None) -> str:
    if not share:
        return ""
    parts = [f"{length_text(int(length))} {value:.0%}" for length, value in share.items() if length.isdigit()]
    return "share of targets whose whole left context is their own document: " + ", ".join(parts)
