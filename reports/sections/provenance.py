"""Where every number comes from: model, arguments, hashes, versions, machine, date and file of every run."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sbeval.reports.read.models import EvaluatedModel, length_text, rope_scaling_text
from sbeval.reports.read.notes import Notes
from sbeval.reports.read.runs import EvaluationRun, TaskResult
from sbeval.reports.sections.section import Section
from sbeval.reports.write.html import Markup, element, join, name


def provenance_section(models: tuple[EvaluatedModel, ...], output_dir: Path) -> Section:
    """Builds the section with one fold a run."""
    folds = [_fold(model, run, output_dir) for model in models for run in model.runs]
    return Section(
        identifier="provenance",
        title="Provenance",
        lead="What produced the numbers: one entry for every result file, newest first within a model.",
        content=tuple(folds),
    )


def notes_section(notes: Notes, output_dir: Path) -> Section | None:
    """Builds the section on what was left out, None where nothing was."""
    if not notes:
        return None
    items = []
    for note in notes:
        place = join([_link(note.path, output_dir), ": "]) if note.path else ""
        items.append(element("li", place, note.reason))
    return Section(
        identifier="left-out",
        title="Left out",
        lead="What was found but is not shown, and why.",
        content=(element("ul", *items, attributes={"class": "caveats"}),),
    )


def run_facts(run: EvaluationRun) -> dict[str, str]:
    """Returns the facts of a run in reading order; a fact that was not recorded is left out."""
    record = run.record
    facts: dict[str, Any] = {
        "date": f"{run.date:%Y-%m-%d %H:%M} UTC",
        "command": record.command,
        "command, rebuilt": None if record.command else f"{rebuilt_command(run)} (the file does not keep the original)",
        "model": f"{record.name} ({record.format})",
        "checkpoint hash": record.checkpoint_sha256,
        "parameters": f"{record.parameters:,}" if record.parameters else None,
        "attention": record.attention,
        "remainder": record.remainder if record.remainder != "none" else None,
        "head norm": "yes" if record.head_norm else None,
        "recipe": record.recipe,
        "training seed": record.training_seed,
        "window": f"{record.sliding_window:,} tokens" if record.sliding_window else None,
        "position scaling": rope_scaling_text(record.rope_scaling),
        "training length": f"{record.training_length_tokens:,} tokens" if record.training_length_tokens else None,
        "extended from": _extension(record.extended_from),
        "dtype": record.dtype,
        "kernels": record.kernels,
        "skip threshold": f"{record.skip_threshold:g}" if record.skip_threshold else None,
        "longest input": f"{record.max_length:,} tokens" if record.max_length else None,
        "documents limited to": f"{run.limit:g}" if run.limit is not None else None,
        "GPU": record.gpu or ("none recorded (CPU)" if run.described else None),
        "versions": _versions(run),
        "seeds": _seeds(run.raw),
        "batch size": _mapping(run.raw.get("config")).get("batch_size"),
        "git": run.raw.get("git_hash"),
    }
    return {key: str(value) for key, value in facts.items() if value not in (None, "", {})}


def rebuilt_command(run: EvaluationRun) -> str:
    """Returns a command line with the model, its arguments, the tasks and the limit that the results file names."""
    parts = ["lm_eval", "--model", run.model_source]
    if run.model_args:
        parts += ["--model_args", run.model_args]
    parts += ["--tasks", ",".join(task.name for task in run.tasks)]
    if run.limit is not None:
        parts += ["--limit", f"{run.limit:g}"]
    return shlex.join(parts)


def task_facts(task: TaskResult) -> str:
    """Returns the facts of a task in one line."""
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
        f"{record.targets_per_window} targets a window" if record.targets_per_window else "",
        _own_share(record.own_document_share),
        f"tokenizer {record.tokenizer_sha256[:12]}" if record.tokenizer_sha256 else "",
        f"seed {record.seed}" if record.seed is not None else "",
    ]
    return "; ".join(part for part in parts if part)


def _fold(model: EvaluatedModel, run: EvaluationRun, output_dir: Path) -> Markup:
    entries = [join([element("dt", key), element("dd", value)]) for key, value in run_facts(run).items()]
    entries.append(join([element("dt", "result file"), element("dd", _link(run.path, output_dir))]))
    for task in run.tasks:
        detail = [task_facts(task)]
        if task.samples is not None:
            detail += [" ", _link(task.samples, output_dir, "samples")]
        entries.append(join([element("dt", task.name), element("dd", *detail)]))
    title = element("summary", name(model.label), f", {run.date:%Y-%m-%d %H:%M}")
    return element("details", title, element("dl", *entries))


def _link(path: Path, output_dir: Path, words: str | None = None) -> Markup:
    target = os.path.relpath(path, output_dir)
    return element("a", words or path.name, attributes={"href": quote(target)})


def _versions(run: EvaluationRun) -> str:
    versions = dict(run.record.versions)
    for key, package in (("lm_eval_version", "lm_eval"), ("transformers_version", "transformers")):
        if run.raw.get(key):
            versions.setdefault(package, str(run.raw[key]))
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def _seeds(raw: Mapping[str, Any]) -> str:
    config = _mapping(raw.get("config"))
    seeds = {key.removesuffix("_seed"): config[key] for key in config if key.endswith("_seed")}
    return ", ".join(f"{key} {value}" for key, value in seeds.items() if value is not None)


def _extension(origin: Mapping[str, Any] | None) -> str | None:
    return None if not origin else ", ".join(f"{key} {value}" for key, value in origin.items() if value is not None)


def _own_share(share: Mapping[str, float] | None) -> str:
    if not share:
        return ""
    parts = [f"{length_text(int(length))} {value:.0%}" for length, value in share.items() if length.isdigit()]
    return "targets whose left context is all their own document: " + ", ".join(parts)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
