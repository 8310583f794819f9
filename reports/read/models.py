"""Groups runs into evaluated models and names them.

An evaluated model is one checkpoint with one set of model settings. It is one line in a figure and one row in a table;
the column `setting` of the tidy table (one row for each number) holds its name.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sbeval.fingerprint.parts import changes
from sbeval.foreign_files import usable_number
from sbeval.reports.read.fields import display_name, grouped, length_text, ranked, unique_name
from sbeval.reports.read.files import Notes
from sbeval.reports.read.record_texts import (
    cache_text,
    cut_texts,
    extrapolation_text,
    rope_scaling_text,
    self_test_text,
    switched_off_texts,
    unread_text,
)
from sbeval.reports.read.runs import EvaluationRun, TaskResult, argument, mapping
from sbeval.results.intervals import MINIMUM_CLUSTERS
from sbeval.results.records import IDENTICAL_TARGETS, ModelRecord
from sbeval.rope_parameters import GLOBAL_LAYERS, rope_entries

ModelKey = tuple[str, ...]
_POSITION_WORDS = {"rope": "RoPE", "nope": "no positions", "alibi": "ALiBi", "nape": "NAPE"}
_WEIGHT_WORDS = {"ssmax": "SSMax", "entmax15": "entmax-1.5", "asentmax": "ASEntmax"}
SCHEME_NAMES = {
    "stickbreaking": "stick-breaking attention",
    **{name: f"softmax attention, {position}" for name, position in _POSITION_WORDS.items()},
    "fire": "softmax attention, FIRE",
    "forgetting": "forgetting attention",
    **{
        f"{name}-{kind}": f"{weights} attention, {position}"
        for kind, weights in _WEIGHT_WORDS.items()
        for name, position in _POSITION_WORDS.items()
    },
}
"""Attention scheme to its name, in the order in which a report lists models."""
_OF_THE_WEIGHTS = ("remainder", "head_norm", "seed")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedModel:
    """One checkpoint evaluated with one set of model settings: one line in a figure, one row in a table.

    Attributes:
        key: checkpoint and settings; runs with equal keys belong to the same model.
        label: name shown in the report, unique there.
        record: the model record of the newest run.
        runs: the runs (results files) of the model, newest first.
        parent: for a context-extended model, label of the model that was extended; None for any other model, or if the
            report does not have that model.
        seeds: number of checkpoints merged into this model; they differ only in their training seed.
        left_aside: (task, hash of its text, lengths) of every run that is not shown because its targets differ from
            those in the other runs of the task.
    """

    key: ModelKey
    label: str
    record: ModelRecord
    runs: tuple[EvaluationRun, ...]
    parent: str | None = None
    seeds: int = 1
    left_aside: tuple[tuple[str, str | None, str], ...] = ()

    @property
    def origin_length_tokens(self) -> int | None:
        """The training length in tokens; for a context-extended checkpoint, that of the model that was extended.

        Results at longer lengths are compared with this length, so that both models have the same reference length.
        """
        origin = self.record.extended_from or {}
        length = origin.get("length", origin.get("training_length_tokens"))
        return int(length) if isinstance(length, int) else self.record.training_length_tokens

    @property
    def declared_length_tokens(self) -> int | None:
        """The context length in tokens that configuration and RoPE scaling declare; at least the training length."""
        # only RoPE scalings of global layers count: sliding-window layers do not attend to the whole text
        entries = rope_entries(self.record.rope_scaling)
        stated = self.record.declared_length_tokens
        scaling = entries.get(GLOBAL_LAYERS, entries.get("", {}))
        factor = usable_number(scaling.get("factor")) or 1.0
        unscaled = scaling.get("original_max_position_embeddings") or self.origin_length_tokens
        scaled = int(unscaled * factor) if isinstance(unscaled, int) and factor > 1 else None
        return max(filter(None, (stated, scaled, self.record.training_length_tokens)), default=None)

    def task_runs(self) -> list[tuple[EvaluationRun, TaskResult]]:
        """Returns (run, task) for every task of every run, in order of preference.

        Runs on more samples come before runs on fewer (`--limit`), and newer before older ones. If two runs have the
        same number, readers use the first: a short run with `--limit` must not replace a complete evaluation.
        """
        pairs = [(run, task) for run in self.runs for task in run.tasks]
        return sorted(pairs, key=lambda pair: (_samples_allowed(pair[1]), pair[0].date), reverse=True)

    def uneven_documents(self, task: str) -> bool:
        """Whether a run recorded that a task's documents are too uneven in size for reliable intervals."""
        records = [result.record for _, result in self.task_runs() if display_name(result.name) == task]
        return any(record.uneven_documents for record in records if record is not None)


def _samples_allowed(task: TaskResult) -> float:
    return math.inf if task.limit_samples is None else task.limit_samples


def group_models(runs: Sequence[EvaluationRun], labels: Mapping[str, str] | None = None) -> list[EvaluatedModel]:
    """Groups runs into evaluated models and gives each model a short, unique name.

    It is the name of the checkpoint, followed in parentheses by the settings in which models of that name differ.

    Args:
        runs: the runs, one for each results file.
        labels: name to the name shown instead. A key may be a model name computed here, the name of a checkpoint, or,
            if no model has that name, the name of a text.
    """
    oldest_first = sorted(runs, key=lambda run: (run.date, str(run.path)))
    groups = grouped((_key(run), run) for run in reversed(_texts_by_one_name(oldest_first)))
    named = _unique_names({key: members[0] for key, members in groups.items()})
    checkpoint_names = {key: display_name(members[0].record.name) for key, members in groups.items()}
    chosen = _rename(named, checkpoint_names, labels or {})
    models = [
        EvaluatedModel(key=key, label=chosen[key], record=members[0].record, runs=tuple(members))
        for key, members in groups.items()
    ]
    of_texts = {name: label for name, label in (labels or {}).items() if name in text_names(models)}
    of_models = {*named.values(), *checkpoint_names.values()}
    models = _with_texts(models, {name: label for name, label in of_texts.items() if name not in of_models})
    models.sort(key=_order)
    return [dataclasses.replace(model, parent=_parent_label(model, models)) for model in models]


def text_names(models: Sequence[EvaluatedModel]) -> set[str]:
    """Returns the names of all texts that any of the models was scored on."""
    records = [task.record for model in models for run in model.runs for task in run.tasks]
    return {display_name(record.corpus) for record in records if record is not None and record.corpus is not None}


def _with_texts(models: Sequence[EvaluatedModel], labels: Mapping[str, str]) -> list[EvaluatedModel]:
    """Renames texts by `labels`. If two texts would get the same name, a number is added to one of the names."""
    if not labels:
        return list(models)
    chosen: dict[str, str] = {}
    for name in labels:
        taken = (text_names(models) - labels.keys()) | set(chosen.values())
        chosen[name] = unique_name(display_name(labels[name]), taken, "{} ({})")

    def labelled(task: TaskResult) -> TaskResult:
        record = task.record
        if record is None or record.corpus is None or (name := display_name(record.corpus)) not in chosen:
            return task
        return dataclasses.replace(task, record=dataclasses.replace(record, corpus=chosen[name]))

    def relabelled(run: EvaluationRun) -> EvaluationRun:
        return dataclasses.replace(run, tasks=tuple(map(labelled, run.tasks)))

    return [dataclasses.replace(model, runs=tuple(map(relabelled, model.runs))) for model in models]


def _texts_by_one_name(oldest_first: Sequence[EvaluationRun]) -> list[EvaluationRun]:
    """Gives every text the same name in all runs: the name in the newest run on the text.

    Texts are identified by their hash. One text may have several names, since files are renamed and older versions
    named texts differently. If a model ran a protocol on two texts of the same name, the later text gets a number.
    """
    hashed = [
        (run, task.name, task.record)
        for run in oldest_first
        for task in run.tasks
        if task.record is not None and task.record.corpus_sha256 is not None
    ]
    names = {(task, record.corpus_sha256): record.corpus for _, task, record in hashed}
    texts = grouped(
        ((names[task, record.corpus_sha256], record.protocol, _key(run)), record.corpus_sha256)
        for run, task, record in hashed
    )
    doubled = {name for (name, *_), digests in texts.items() if len(set(digests)) > 1}
    numbered: dict[object, str] = {}
    for (task_name, digest), name in names.items():
        if name in doubled:
            taken = {str(used) for used in names.values() if used != name} | {*numbered.values()}
            free = unique_name(name or "text", taken, "{} ({})")
            names[task_name, digest] = numbered.setdefault((name, digest), free)

    def named(task: TaskResult) -> TaskResult:
        if task.record is None or task.record.corpus_sha256 is None:
            return task
        corpus = names[task.name, task.record.corpus_sha256]
        return dataclasses.replace(task, record=dataclasses.replace(task.record, corpus=corpus))

    return [dataclasses.replace(run, tasks=tuple(named(task) for task in run.tasks)) for run in oldest_first]


def note_runs(models: Sequence[EvaluatedModel], notes: Notes) -> None:
    """Adds notes on failed self-tests, undone changes to a model, truncated answers and tensors that were not loaded.

    It also adds a note if fingerprints of older runs of a model differ from that of the newest run, apart from weights.
    """
    for model in models:
        for run in model.runs:
            if (text := self_test_text(run.record)) and mapping(run.record.self_test).get("sound") is not True:
                notes.add(run.path, f"self-test: {text}.")
            for text in switched_off_texts(run.record):
                notes.add(run.path, f"{text}.")
            for text in cut_texts(run.record):
                notes.add(run.path, text)
            if text := unread_text({"allowed": mapping(run.record.unread).get("allowed")}):
                notes.add(run.path, f"the model did not read all tensors of its checkpoint: {text}.")
        for run in model.runs[1:]:
            recorded = run.record.inputs and model.record.inputs
            if recorded and (changed := changes(run.record.inputs, model.record.inputs)):
                difference = display_name(changed)
                notes.add(
                    None,
                    f"{model.label}: older runs count as the same model as its newest one, although {difference}.",
                )


def with_one_set_of_targets(models: Sequence[EvaluatedModel], notes: Notes) -> tuple[EvaluatedModel, ...]:
    """Keeps, for each model and identical-targets task, only runs that scored the same targets.

    A note is added for each run that is dropped.
    If lengths were compared across runs with different targets, differences would come from the targets and not from
    the context.
    """
    return tuple(_with_one_set_of_targets(model, notes) for model in models)


def _with_one_set_of_targets(model: EvaluatedModel, notes: Notes) -> EvaluatedModel:
    by_text = grouped(
        ((task.name, task.record.corpus_sha256), task)
        for _, task in model.task_runs()
        if task.record is not None and task.record.protocol in IDENTICAL_TARGETS
    )
    shown = {id(task) for tasks in by_text.values() for task in _on_the_same_targets(tasks)}
    dropped = [task for tasks in by_text.values() for task in tasks if id(task) not in shown]
    for task in dropped:
        reason = "is not shown: as far as recorded, it scored other targets than the model's other runs of the task"
        remedy = "to score the same targets, run all lengths at once, or continue a fixed_target run"
        notes.add(None, f"{model.label}: a run of {task.name} at {_lengths(task)} {reason}; {remedy}.")
    left_aside = tuple(
        (task.name, task.record.corpus_sha256, _lengths(task)) for task in dropped if task.record is not None
    )
    dropped_ids = {id(task) for task in dropped}
    runs = [
        dataclasses.replace(run, tasks=tuple(task for task in run.tasks if id(task) not in dropped_ids))
        for run in model.runs
    ]
    return dataclasses.replace(model, runs=tuple(runs), left_aside=left_aside)


def _lengths(task: TaskResult) -> str:
    return ", ".join(map(length_text, task.record.lengths if task.record else ()))


def _on_the_same_targets(tasks: Sequence[TaskResult]) -> list[TaskResult]:
    """Returns those runs of one task that scored the same targets: those scored at the most context lengths.

    Targets with enough samples for a confidence interval are preferred to targets with fewer samples.
    """
    lengths: dict[object, set[int]] = defaultdict(set)
    enough: dict[object, bool] = {}
    for task in tasks:
        lengths[_targets(task)].update(task.record.lengths if task.record else ())
        enough[_targets(task)] = task.samples_used is None or task.samples_used >= MINIMUM_CLUSTERS
    chosen = max(lengths, key=lambda targets: (enough[targets], len(lengths[targets])), default=None)
    return [task for task in tasks if _targets(task) == chosen]


def _targets(task: TaskResult) -> object:
    """Returns a key that identifies the targets that a run of a task scored.

    It is the hash of the targets. Older versions recorded no hash. Their targets depended on the run's longest length,
    number of targets in a window and number of samples, which are then the key.
    """
    record = task.record
    if record is None:
        return None
    unrecorded = (record.lengths[-1:], record.targets_per_window, task.samples_used)
    return record.corpus_sha256, record.tokenizer_sha256, record.targets_sha256 or str(unrecorded)


def _key(run: EvaluationRun) -> ModelKey:
    """Returns the key of the model that a run evaluates: the checkpoint and the model settings."""
    identity = run.record.checkpoint_sha256 or argument(run.model_args, "pretrained") or run.record.name
    # equal hashes of a checkpoint imply equal values of these fields, which older versions did not record
    covered_by_hash = _OF_THE_WEIGHTS if run.record.checkpoint_sha256 else ()
    fields = ("" if field in covered_by_hash else describe(run) or "" for field, describe in _DISTINCTIONS.items())
    return (identity, *fields)


def without_cache(model: EvaluatedModel, models: Sequence[EvaluatedModel]) -> EvaluatedModel | None:
    """Returns the model that differs from this one only in its KV cache and has none replaced; None if there is none.

    It is also None if this model has no replaced cache.
    """
    place = 1 + [*_DISTINCTIONS].index("cache")
    if not model.key[place]:
        return None
    key = (model.key[0], "", *model.key[2:place], "", *model.key[place + 1 :])
    alike = [other for other in models if (other.key[0], "", *other.key[2:]) == key]
    same_label = [other for other in alike if other.key[1] == model.key[1]]
    return next(iter(same_label + alike), None)


_DISTINCTIONS: dict[str, Callable[[EvaluationRun], str | None]] = {
    "label": lambda run: run.label,
    "attention": lambda run: run.record.attention,
    "window": lambda run: f"window {length_text(run.record.sliding_window)}" if run.record.sliding_window else None,
    "rope_scaling": lambda run: rope_scaling_text(run.record.rope_scaling),
    "extrapolation": lambda run: extrapolation_text(run.record.extrapolation),
    "cache": lambda run: cache_text(mapping(run.record.cache)),
    "training_length": lambda run: (
        f"trained at {length_text(run.record.training_length_tokens)}" if run.record.training_length_tokens else None
    ),
    "remainder": lambda run: (
        f"remainder {run.record.remainder}" if run.record.remainder not in (None, "none") else None
    ),
    "head_norm": lambda run: "head norm" if run.record.head_norm else None,
    "dtype": lambda run: run.record.dtype,
    "skip": lambda run: f"skipping below {run.record.skip_threshold:g}" if run.record.skip_threshold else None,
    "source": lambda run: (run.record.backend or "").split(" ")[0] or None if run.described else run.model_source,
    "thinking": lambda run: f"thinking {run.record.thinking_tokens:,}" if run.record.thinking_tokens else None,
    "beginning": lambda run: (
        "answers not begun" if any(t.record and t.record.answer_prefix is False for t in run.tasks) else None
    ),
    "seed": lambda run: None if run.record.training_seed is None else f"seed {run.record.training_seed}",
}


def describe_facts(model: EvaluatedModel) -> tuple[str, ...]:
    """Returns the settings that can distinguish models with one checkpoint name, except label and training seed."""
    newest = model.runs[0]
    return tuple(describe(newest) or "" for field, describe in _DISTINCTIONS.items() if field not in ("label", "seed"))


def _unique_names(newest: Mapping[ModelKey, EvaluationRun]) -> dict[ModelKey, str]:
    names: dict[ModelKey, str] = {}
    for name, keys in grouped((display_name(run.record.name), key) for key, run in newest.items()).items():
        if len(keys) == 1:
            names[keys[0]] = name
            continue
        facts = {key: {field: describe(newest[key]) for field, describe in _DISTINCTIONS.items()} for key in keys}
        differing = [field for field in _DISTINCTIONS if len({facts[key][field] for key in keys}) > 1]
        without_seed = [field for field in differing if field != "seed"]
        if len({tuple(facts[key][field] for field in without_seed) for key in keys}) == len(keys):
            differing = without_seed
        texts = {key: ", ".join(text for field in differing if (text := facts[key][field])) for key in keys}
        for key in keys:
            same = sum(text == texts[key] for text in texts.values()) > 1
            parts = [part for part in (texts[key], _telling(key, keys, newest) if same else "") if part]
            names[key] = f"{name} ({', '.join(parts)})" if parts else name
    return names


def _telling(key: ModelKey, keys: Sequence[ModelKey], newest: Mapping[ModelKey, EvaluationRun]) -> str:
    """Returns a text that distinguishes a model from others whose name and settings are the same.

    It is the last path component in which the paths of all their checkpoints differ, or, if there is none, the first
    characters of the hash of the weights.
    """
    paths = {each: Path(argument(newest[each].model_args, "pretrained") or "").parts for each in keys}
    for place in range(1, 1 + min(map(len, paths.values()))):
        if len({path[-place] for path in paths.values()}) == len(keys):
            return display_name(paths[key][-place])
    return key[0][:8] if newest[key].record.checkpoint_sha256 else key[0]


def _rename(
    named: Mapping[ModelKey, str], checkpoint_names: Mapping[ModelKey, str], labels: Mapping[str, str]
) -> dict[ModelKey, str]:
    chosen: dict[ModelKey, str] = {}
    for key, name in named.items():
        if name in labels:
            label = display_name(labels[name])
        else:
            checkpoint = checkpoint_names[key]
            label = name.replace(checkpoint, display_name(labels.get(checkpoint, checkpoint)), 1)
        chosen[key] = unique_name(label, chosen.values(), "{} ({})")
    return chosen


def _order(model: EvaluatedModel) -> tuple[int, str, int, str]:
    rank, _ = ranked(model.record.attention or "", list(SCHEME_NAMES))
    return (rank, model.record.name, model.record.training_length_tokens or 0, model.label)


def _parent_label(model: EvaluatedModel, models: Sequence[EvaluatedModel]) -> str | None:
    origin = model.record.extended_from
    if not origin:
        return None
    sha256 = origin.get("sha256")
    name = str(origin.get("name", "")).rpartition("/")[2]
    parents = [
        other
        for other in models
        if other.key != model.key
        and (other.record.name == name if sha256 is None else other.record.checkpoint_sha256 == sha256)
    ]
    alike = [other for other in parents if other.key[2:4] == model.key[2:4]]
    return next((other.label for other in alike + parents), None)
