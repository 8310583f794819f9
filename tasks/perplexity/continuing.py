"""Finds finished results that a run with other context lengths continues; nothing is loaded for it.

Targets of `fixed_target` are chosen by the longest length of a run. A later run with other lengths in the same folder
would score other targets, and a report never joins the two. Such a run takes the targets of the finished one.
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
from sbeval.tasks.packaged import named
from sbeval.tasks.perplexity.inputs import load_corpus
from sbeval.tasks.perplexity.options import MOST_TARGETS, PerplexityOptions

_PROTOCOL = "fixed_target"
_NO_SETTING = CACHE_ARGUMENTS | {
    *("pretrained", "tokenizer", "peft", "delta", "revision", "subfolder", "max_length", "dtype"),
    *("batch_size", "max_batch_size", "device", "parallelize", "max_memory_per_gpu", "max_cpu_memory"),
    *("trust_remote_code", "context_parallel", "tp_plan"),
}
"""Arguments of a model that choose no targets and name no other model, or that are compared by their content."""
_TEXT = ("data_path", "dataset", "dataset_config", "dataset_split", "text_field", "split")
_CHOOSING = ("bos", "separator", "blocks_per_document", "context", "seed", "riffled_documents", "piece_tokens")
"""Options that choose the targets of a text."""
_UNCONTINUED = 'or add "continues": "none" to --metadata to score other targets'


class Found(NamedTuple):
    """What finished results mean for a run: the file to continue by task, and sentences for the user."""

    files: dict[str, Path]
    sentences: list[str]


class _Finished(NamedTuple):
    """A task of a results file. `record` holds the fields of a `TaskRecord`, `config` is the whole run's."""

    path: Path
    metadata: Mapping[str, Any]
    record: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def lengths(self) -> list[int]:
        return list(self.record["lengths"])

    @property
    def room(self) -> int:
        """The left context, in tokens, that every target has."""
        return int(self.record.get("room_tokens") or self.lengths[-1])


class _Run(NamedTuple):
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
) -> Found:
    """Looks in an output folder for results that a run with these arguments continues.

    Args:
        tasks: names and patterns of tasks and groups.
        model: name of lm-eval's model.
        model_args: arguments of the model by name.
        metadata: options of tasks, as `--metadata` gives them.
        limit: lm-eval's `--limit`.
        output_path: lm-eval's `--output_path`.

    Raises:
        UserError: the run would score different targets, and it cannot score those of the finished results.
    """
    found = Found({}, [])
    wanted = {name: of for name, of in named(tasks) if of and str(of.get("class")).startswith(f"{__package__}.")}
    if not wanted:
        return found
    finished: dict[str, list[_Finished]] = defaultdict(list)
    for task, entry in _finished(output_path):
        finished[task].append(entry)
    run = _Run(model, model_args, metadata, limit)
    for task, definition in wanted.items():
        if candidates := finished.get(task):
            options = PerplexityOptions.of_task(task, {**_settings_of(definition), **model_args, **metadata})
            if options.continues is None:  # neither a file nor "none"
                _add(found, task, str(definition.get("dataset_name")), options, run, candidates)
    return found


def _settings_of(definition: Mapping[str, Any]) -> dict[str, Any]:
    settings = definition.get("metadata") or {}
    return {key: settings[key] for key in settings if key in PerplexityOptions.model_fields}


def _finished(output_path: str) -> Iterator[tuple[str, _Finished]]:
    """Yields the tasks of an output folder's results files with identical targets, the newest file first."""
    path = local_path(output_path)
    folder, pattern = (path.parent, f"{path.stem}_*.json") if path.suffix == ".json" else (path, "results_*.json")
    files = [file for file in folder.rglob(pattern) if file.is_file()] if folder.is_dir() else []
    for file in sorted(files, key=date_of, reverse=True):
        try:
            results = read_json_object(file, "results of lm-eval", most=MOST_RESULTS_BYTES)
        except UserError:
            continue  # `sbeval report` says what is wrong with it
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
    found: Found, task: str, corpus: str, options: PerplexityOptions, run: _Run, candidates: Sequence[_Finished]
) -> None:
    """Adds what the finished results of one task mean for the run."""
    sets: dict[str, list[_Finished]] = defaultdict(list)
    reasons: dict[str, Path] = {}
    for entry in candidates:
        if not _is_same_model(run, entry) or not _is_same_label(run, entry):
            continue
        if not _has_same_text(task, corpus, options, run, entry):
            continue
        if (reason := _difference(task, options, run, entry)) is not None:
            reasons.setdefault(reason, entry.path)
        else:
            sets[str(entry.record["targets_sha256"])].append(entry)
    if sets:
        entries = max(sets.values(), key=lambda entries: len(_lengths(entries)))
        _continue(found, task, options, entries)
    elif reasons:
        reason, path = next(iter(reasons.items()))
        if options.context_lengths is not None:
            found.sentences.append(
                f"{task}: this run does not continue {path}, since {reason}. Its targets may differ from that run's, "
                "and a report then shows one of both runs. Give the same options to add lengths, or another "
                "--output_path."
            )


def _continue(found: Found, task: str, options: PerplexityOptions, entries: Sequence[_Finished]) -> None:
    newest = entries[0]
    done = _lengths(entries)
    path, asked = newest.path, options.context_lengths
    if asked is None:
        if not done <= set(options.default_lengths):
            found.sentences.append(
                f"{task}: this run does not continue {path}, since it names no context_lengths. A report shows one of "
                f"both runs: name the lengths to add with --metadata '{{\"context_lengths\": [...]}}'."
            )
        return
    targets = options.targets_per_window or max(1, min(MOST_TARGETS, asked[0] // 2))
    width = newest.record.get("targets_per_window")
    if done <= set(asked):
        other_end = None
        if asked[-1] != newest.room:
            other_end = "longest"
        elif width and targets != width:
            other_end = "shortest"
        if other_end is not None and newest.record.get("protocol") == _PROTOCOL:
            found.sentences.append(
                f"{task}: this run repeats the lengths of {path} on other targets, since its {other_end} context "
                "differs. NLL at the same length may differ for that reason. A report shows one of both runs: this "
                f"one, unless fewer than {MINIMUM_CLUSTERS} of its documents are scored."
            )
        return
    together = json.dumps(sorted({*done, *asked}))
    remedy = f'Run all lengths at once, with "context_lengths": {together} in --metadata, {_UNCONTINUED}.'
    if newest.record.get("protocol") != _PROTOCOL:
        if asked[-1] != newest.room:
            found.sentences.append(
                f"{task}: this run does not continue {path}, since only fixed_target can. Its targets may differ from "
                f"that run's, and a report then shows one of both runs. To have one curve, run all lengths at once, "
                f'with "context_lengths": {together} in --metadata.'
            )
        return
    if asked[-1] > newest.room:
        raise UserError(
            f"{task}: expected context_lengths of at most {newest.room} tokens, found {asked[-1]}: the targets of "
            f"{path} were chosen to have {newest.room} tokens before them, and other targets make another curve. "
            f"{remedy}"
        )
    if isinstance(width, int) and asked[0] < width:
        raise UserError(
            f"{task}: expected context_lengths of at least {width} tokens, found {asked[0]}: {path} scored {width} "
            f"targets a window, and other targets make another curve. {remedy}"
        )
    if asked[-1] == newest.room and targets == width:
        return  # the same targets anyway
    found.files[task] = path
    found.sentences.append(
        f"{task}: continues {path}, which has results at {_shown(done)}. This run scores the same targets, so that a "
        'report joins both runs. To score other targets, add "continues": "none" to --metadata.'
    )


def _lengths(entries: Iterable[_Finished]) -> set[int]:
    return {length for entry in entries for length in entry.lengths}


def _shown(lengths: Iterable[int]) -> str:
    *others, last = (str(length) for length in sorted(lengths))
    return f"{', '.join(others)} and {last} tokens" if others else f"{last} tokens"


def _of_task(task: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    entry = metadata.get(task)
    return {**metadata, **(entry if isinstance(entry, Mapping) else {})}


def _is_same_model(run: _Run, entry: _Finished) -> bool:
    """Whether the model has the same name or weights, and the same arguments beside those that choose no targets."""
    given = entry.config.get("model_args")
    if not isinstance(given, Mapping) or entry.config.get("model") != run.model:
        return False
    settings = [
        {key: str(value) for key, value in of.items() if key not in _NO_SETTING} for of in (run.arguments, given)
    ]
    if settings[0] != settings[1]:
        return False
    before = _inputs(entry)
    now = _parts(run)
    if "weights" in before and "weights" in now:
        return before["weights"] == now["weights"] and before.get("peft: weights") == now.get("peft: weights")
    return run.arguments.get("pretrained") == given.get("pretrained")


def _is_same_label(run: _Run, entry: _Finished) -> bool:
    return run.metadata.get(LABEL) == entry.metadata.get(LABEL)


def _inputs(entry: _Finished) -> dict[str, str]:
    record = entry.config.get("sbeval")
    inputs: Any = record.get("inputs") if isinstance(record, Mapping) else None
    return inputs if fits(inputs, dict[str, str]) else {}


def _parts(run: _Run) -> dict[str, str]:
    """Returns the parts of the model's files by name; those of a large file are hashed once for all of this run."""
    parts = run_inputs({"model_args": run.arguments}).parts
    return {name: value for name, value in parts.items() if name not in versions()}


def _has_same_text(task: str, corpus: str, options: PerplexityOptions, run: _Run, entry: _Finished) -> bool:
    """Whether the text is the same, by its content where it lies on this machine, else by its name."""
    if options.dataset is None and (options.data_path is not None or corpus == "stdlib"):
        try:
            return corpus_sha256(load_corpus(corpus, options, None)) == entry.record.get("corpus_sha256")
        except (UserError, AttributeError, TypeError):  # split by the tokenizer, or no text: the task says so
            pass
    before = _of_task(task, entry.metadata)
    return all(before.get(name) == _of_task(task, {**run.arguments, **run.metadata}).get(name) for name in _TEXT)


def _difference(task: str, options: PerplexityOptions, run: _Run, entry: _Finished) -> str | None:
    """Returns what makes the targets of finished results others, in words; None where nothing is known to."""
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
