"""Finds finished results that a run with other context lengths continues, before a model is loaded.

`fixed_target` chooses its targets by the longest context length of a run. A later run with other lengths in the same
output folder would score other targets, and a report never joins the two. Such a run takes over the targets of the
finished run instead.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sbeval.corpora import corpus_sha256
from sbeval.errors import UserError
from sbeval.fingerprint.evaluation import run_inputs
from sbeval.fingerprint.parts import changes, versions
from sbeval.fingerprint.tasks import CACHE_ARGUMENTS
from sbeval.foreign_files import MOST_RESULTS_BYTES, fits, read_json_object
from sbeval.hub_names import local_path
from sbeval.results.intervals import MINIMUM_CLUSTERS
from sbeval.results.records import IDENTICAL_TARGETS, LABEL
from sbeval.results.saving import date_of
from sbeval.tasks.packaged import expand_names
from sbeval.tasks.perplexity.inputs import load_corpus
from sbeval.tasks.perplexity.options import MOST_TARGETS, PerplexityOptions

_PROTOCOL = "fixed_target"
_NO_SETTING = CACHE_ARGUMENTS | {
    *("pretrained", "tokenizer", "peft", "delta", "revision", "subfolder", "max_length", "dtype"),
    *("batch_size", "max_batch_size", "device", "parallelize", "max_memory_per_gpu", "max_cpu_memory"),
    *("trust_remote_code", "context_parallel", "tp_plan"),
}
"""Model arguments that do not have to be equal: they do not change the targets, or their files are compared instead."""
_TEXT = ("data_path", "dataset", "dataset_config", "dataset_split", "text_field", "split")
_CHOOSING = ("bos", "separator", "blocks_per_document", "context", "seed", "riffled_documents", "piece_tokens")
"""Options that decide which targets of a text are scored."""
_NEW_TARGETS_REMEDY = 'or add "continues": "none" to --metadata to score other targets'


class Continuations(NamedTuple):
    """The results file that each task continues (`files`, by task name), and sentences that explain it to the user."""

    files: dict[str, Path]
    sentences: list[str]


class _Finished(NamedTuple):
    """One task of a results file: path, the task's metadata, its `TaskRecord` as JSON, and the file's `config`."""

    path: Path
    metadata: Mapping[str, Any]
    record: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def lengths(self) -> list[int]:
        return list(self.record["lengths"])

    @property
    def room(self) -> int:
        """Number of tokens that precede every target: the longest context length at which it can be scored."""
        return int(self.record.get("room_tokens") or self.lengths[-1])


class _Run(NamedTuple):
    """The run that is about to start: model, model arguments, metadata and `--limit`."""

    model: str
    arguments: Mapping[str, Any]
    metadata: Mapping[str, Any]
    limit: float | None


def find_finished(
    tasks: Iterable[str],
    *,
    model: str,
    model_args: Mapping[str, Any],
    metadata: Mapping[str, Any],
    limit: float | None,
    output_path: str,
) -> Continuations:
    """Searches an output folder for results that a run with these arguments continues.

    Args:
        tasks: names and patterns of tasks and groups.
        model: lm-eval's name of the model.
        model_args: arguments of the model by name.
        metadata: options of tasks from `--metadata`.
        limit: lm-eval's `--limit`.
        output_path: lm-eval's `--output_path`.

    Raises:
        UserError: the run would score other targets than the finished run, and it cannot score the finished run's
            targets, because one of its context lengths is too long or too short for them.
    """
    continuations = Continuations({}, [])
    perplexity_tasks = {
        name: settings
        for name, settings in expand_names(tasks)
        if settings and str(settings.get("class")).startswith(f"{__package__}.")
    }
    if not perplexity_tasks:
        return continuations
    finished: dict[str, list[_Finished]] = defaultdict(list)
    for task, entry in _finished_tasks(output_path):
        finished[task].append(entry)
    run = _Run(model, model_args, metadata, limit)
    for task, definition in perplexity_tasks.items():
        if candidates := finished.get(task):
            options = PerplexityOptions.of_task(task, {**_yaml_options(definition), **model_args, **metadata})
            if options.continues is None:  # neither a file nor "none"
                _add(continuations, task, str(definition.get("dataset_name")), options, run, candidates)
    return continuations


def _yaml_options(definition: Mapping[str, Any]) -> dict[str, Any]:
    settings = definition.get("metadata") or {}
    return {key: settings[key] for key in settings if key in PerplexityOptions.model_fields}


def _finished_tasks(output_path: str) -> Iterator[tuple[str, _Finished]]:
    """Yields the tasks in an output folder whose protocol has the same targets at every length, newest file first."""
    path = local_path(output_path)
    folder, pattern = (path.parent, f"{path.stem}_*.json") if path.suffix == ".json" else (path, "results_*.json")
    files = [file for file in folder.rglob(pattern) if file.is_file()] if folder.is_dir() else []
    for file in sorted(files, key=date_of, reverse=True):
        try:
            results = read_json_object(file, "results of lm-eval", most=MOST_RESULTS_BYTES)
        except UserError:
            continue  # `sbeval report` explains what is wrong with the file
        config: Any = results.get("config")
        configs: Any = results.get("configs")
        for task, settings in configs.items() if isinstance(configs, dict) and isinstance(config, dict) else ():
            metadata: Any = settings.get("metadata") if isinstance(settings, dict) else None
            record = metadata.get("sbeval") if isinstance(metadata, dict) else None
            if not isinstance(record, dict) or record.get("protocol") not in IDENTICAL_TARGETS:
                continue
            if fits(record.get("lengths"), list[int]) and record["lengths"] and record.get("targets_sha256"):
                yield str(task), _Finished(file, metadata, record, config)


def _add(
    continuations: Continuations,
    task: str,
    corpus: str,
    options: PerplexityOptions,
    run: _Run,
    candidates: Sequence[_Finished],
) -> None:
    """Decides which of a task's finished results the run continues, and adds the decision to `continuations`."""
    entries_by_targets: dict[str, list[_Finished]] = defaultdict(list)
    reasons: dict[str, Path] = {}
    for entry in candidates:
        if not _is_same_model(run, entry) or not _is_same_label(run, entry):
            continue
        if not _has_same_text(task, corpus, options, run, entry):
            continue
        if (reason := _difference(task, options, run, entry)) is not None:
            reasons.setdefault(reason, entry.path)
        else:
            entries_by_targets[str(entry.record["targets_sha256"])].append(entry)
    if entries_by_targets:
        entries = max(entries_by_targets.values(), key=lambda entries: len(_lengths(entries)))
        _continue(continuations, task, options, entries)
    elif reasons:
        reason, path = next(iter(reasons.items()))
        if options.context_lengths is not None:
            continuations.sentences.append(
                f"{task}: this run does not continue {path}, because {reason}. Its targets may differ from those of "
                "that run; a report then shows only one of the two runs. To add lengths, use the same options; "
                "otherwise use another --output_path."
            )


def _continue(
    continuations: Continuations, task: str, options: PerplexityOptions, entries: Sequence[_Finished]
) -> None:
    """Lets the task continue the newest of finished results that share their targets, or notes why it does not.

    Raises:
        UserError: a requested length is too long or too short for the finished targets.
    """
    newest = entries[0]
    path = newest.path
    finished_lengths = _lengths(entries)
    requested = options.context_lengths
    if requested is None:
        if not finished_lengths <= set(options.default_lengths):
            continuations.sentences.append(
                f"{task}: this run does not continue {path}, because it sets no context_lengths. A report shows only "
                f"one of the two runs: name the lengths to add with --metadata '{{\"context_lengths\": [...]}}'."
            )
        return
    targets = options.targets_per_window or max(1, min(MOST_TARGETS, requested[0] // 2))
    width = newest.record.get("targets_per_window")
    if finished_lengths <= set(requested):
        changed_end = None
        if requested[-1] != newest.room:
            changed_end = "longest"
        elif width and targets != width:
            changed_end = "shortest"
        if changed_end is not None and newest.record.get("protocol") == _PROTOCOL:
            continuations.sentences.append(
                f"{task}: this run repeats the lengths of {path} on other targets, because its {changed_end} context "
                "length differs. NLL at the same length may differ for that reason. A report shows only one of the two "
                f"runs: this one, unless fewer than {MINIMUM_CLUSTERS} of its documents are scored."
            )
        return
    all_lengths = json.dumps(sorted({*finished_lengths, *requested}))
    remedy = f'Run all lengths at once, with "context_lengths": {all_lengths} in --metadata, {_NEW_TARGETS_REMEDY}.'
    if newest.record.get("protocol") != _PROTOCOL:
        if requested[-1] != newest.room:
            continuations.sentences.append(
                f"{task}: this run does not continue {path}, because only fixed_target can. Its targets may differ "
                "from those of that run; a report then shows only one of the two runs. To get one curve, run all "
                f'lengths at once, with "context_lengths": {all_lengths} in --metadata.'
            )
        return
    if requested[-1] > newest.room:
        raise UserError(
            f"{task}: expected context_lengths of at most {newest.room} tokens, found {requested[-1]}: the targets of "
            f"{path} were chosen to have {newest.room} tokens before them, and other targets make another curve. "
            f"{remedy}"
        )
    if isinstance(width, int) and requested[0] < width:
        raise UserError(
            f"{task}: expected context_lengths of at least {width} tokens, found {requested[0]}: {path} scored {width} "
            f"targets a window, and other targets make another curve. {remedy}"
        )
    if requested[-1] == newest.room and targets == width:
        return  # the run chooses the same targets anyway
    continuations.files[task] = path
    continuations.sentences.append(
        f"{task}: continues {path}, which has results at {_listed(finished_lengths)}. This run scores the same "
        'targets, so a report joins both runs. To score other targets, add "continues": "none" to --metadata.'
    )


def _lengths(entries: Iterable[_Finished]) -> set[int]:
    return {length for entry in entries for length in entry.lengths}


def _listed(lengths: Iterable[int]) -> str:
    """Formats lengths for a sentence, such as "512, 1024 and 2048 tokens"."""
    *shorter, longest = (str(length) for length in sorted(lengths))
    return f"{', '.join(shorter)} and {longest} tokens" if shorter else f"{longest} tokens"


def _of_task(task: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of one task: the entry under its name overrides the settings for all tasks."""
    entry = metadata.get(task)
    return {**metadata, **(entry if isinstance(entry, Mapping) else {})}


def _is_same_model(run: _Run, entry: _Finished) -> bool:
    """Whether both runs evaluate the same model: equal relevant arguments, and equal hashes of the weights.

    If a run has no such hash, the model names are compared instead.
    """
    finished_arguments = entry.config.get("model_args")
    if not isinstance(finished_arguments, Mapping) or entry.config.get("model") != run.model:
        return False
    settings = [
        {key: str(value) for key, value in arguments.items() if key not in _NO_SETTING}
        for arguments in (run.arguments, finished_arguments)
    ]
    if settings[0] != settings[1]:
        return False
    before = _inputs(entry)
    now = _parts(run)
    if "weights" in before and "weights" in now:
        return before["weights"] == now["weights"] and before.get("peft: weights") == now.get("peft: weights")
    return run.arguments.get("pretrained") == finished_arguments.get("pretrained")


def _is_same_label(run: _Run, entry: _Finished) -> bool:
    return run.metadata.get(LABEL) == entry.metadata.get(LABEL)


def _inputs(entry: _Finished) -> dict[str, str]:
    """Returns the recorded hashes of the finished run's model files by name; empty if none are recorded."""
    record = entry.config.get("sbeval")
    inputs: Any = record.get("inputs") if isinstance(record, Mapping) else None
    return inputs if fits(inputs, dict[str, str]) else {}


def _parts(run: _Run) -> dict[str, str]:
    """Returns the hashes of this run's model files by name; a large file is hashed only once in this process."""
    parts = run_inputs({"model_args": run.arguments}).parts
    return {name: value for name, value in parts.items() if name not in versions()}


def _has_same_text(task: str, corpus: str, options: PerplexityOptions, run: _Run, entry: _Finished) -> bool:
    """Whether both runs read the same text: compares hashes if the text is local, else the options that name it."""
    if options.dataset is None and (options.data_path is not None or corpus == "stdlib"):
        try:
            return corpus_sha256(load_corpus(corpus, options, None)) == entry.record.get("corpus_sha256")
        # the text is unreadable, which the task reports, or is split by tokens, and there is no tokenizer here
        except (UserError, AttributeError, TypeError):
            pass
    before = _of_task(task, entry.metadata)
    return all(before.get(name) == _of_task(task, {**run.arguments, **run.metadata}).get(name) for name in _TEXT)


def _difference(task: str, options: PerplexityOptions, run: _Run, entry: _Finished) -> str | None:
    """Describes a setting that differs and that targets depend on; None if all such settings are equal."""
    before = _of_task(task, entry.metadata)
    for name in _CHOOSING:
        was = PerplexityOptions.model_fields[name].default if before.get(name) is None else before[name]
        if str(was) != str(getattr(options, name)):
            return f"{name} was {was} there and is {getattr(options, name)} here"
    width = entry.record.get("targets_per_window")
    if options.targets_per_window is not None and options.targets_per_window != width:
        return f"targets_per_window was {width} there and is {options.targets_per_window} here"
    if (was := entry.config.get("limit")) != run.limit:
        return f"--limit was {_limit(was)} there and is {_limit(run.limit)} here"
    if (inputs := _inputs(entry)) and (changed := changes(inputs, _parts(run))):
        return f"the model's files differ ({changed})"
    return None


def _limit(limit: Any) -> str:
    return f"{limit:g}" if isinstance(limit, int | float) else "not given"
