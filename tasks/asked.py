"""What a packaged task's YAML says of its options and its corpus; checked before torch and lm-eval are imported."""

from collections.abc import Iterable, Mapping
from typing import Any

from sbeval.corpora.split import Split
from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.settings import described, read_value, unknown_key
from sbeval.tasks.metadata import SampleOptions, TaskOptions
from sbeval.tasks.packaged import PREFIX, named
from sbeval.tasks.perplexity.options import CorpusOptions, PerplexityOptions
from sbeval.tasks.recall import options as recall
from sbeval.tasks.recall.labelled import task_labelled
from sbeval.tasks.recall.options import ManyShotOptions
from sbeval.tasks.recall.questions import associations, load_questions
from sbeval.tasks.ruler import options as ruler
from sbeval.tasks.ruler.options import CweOptions, FweOptions, NiahOptions, QaOptions, RulerOptions, VtOptions
from sbeval.tasks.ruler.qa import task_questions
from sbeval.tasks.ruler.texts import SENTENCE_RULE, Missing, MissingCorpus, load_essays

OPTIONS: tuple[type[RulerOptions], ...] = (
    NiahOptions,
    VtOptions,
    CweOptions,
    FweOptions,
    QaOptions,
    ManyShotOptions,
    recall.AssociationOptions,
    recall.TurnsOptions,
    recall.LongBenchOptions,
)

_HELP: tuple[tuple[str, type[TaskOptions]], ...] = (
    ("every sb_ task", TaskOptions),
    ("perplexity and attention spans: which text", CorpusOptions),
    ("perplexity: sb_wikitext, sb_stdlib, sb_pile, sb_pg19, sb_text", PerplexityOptions),
    ("attention spans: sb_span", recall.SpanOptions),
    ("tasks that draw samples: RULER, recall, copying", SampleOptions),
    ("RULER: sb_ruler", RulerOptions),
    ("needles by depth: sb_niah, sb_niah_forced, sb_json_kv, sb_association, sb_turns", ruler.PlacedOptions),
    ("needles: sb_niah, sb_niah_forced, sb_json_kv", NiahOptions),
    ("needles without a shared word: sb_association", recall.AssociationOptions),
    ("the n-th of some turns: sb_turns", recall.TurnsOptions),
    ("variable tracking: sb_ruler_vt", VtOptions),
    ("common words: sb_ruler_cwe", CweOptions),
    ("frequent words: sb_ruler_fwe", FweOptions),
    ("associative recall: sb_mqrar, sb_mqrar_text", recall.MqrarTextOptions),
    ("sb_mqrar, where it differs from sb_mqrar_text", recall.MqrarOptions),
    ("flip-flops: sb_flipflop", recall.FlipFlopOptions),
    ("copying: sb_copy", recall.CopyOptions),
    ("a passage: sb_copy_passage", recall.PassageOptions),
    ("marked words: sb_copy_selective", recall.SelectiveOptions),
    ("phrases by distance: sb_copy_phrase", recall.PhraseOptions),
    ("many-shot classification: sb_many_shot", ManyShotOptions),
    ("LongBench v2 by length: sb_longbench2", recall.LongBenchOptions),
)


def metadata_keys() -> list[tuple[str, list[tuple[str, str]]]]:
    """Returns, for each kind of task, the keys that no kind above it shares with the same meaning."""
    titled = []
    for title, kind in _HELP:
        parents = (parent for parent in kind.__mro__[1:] if issubclass(parent, TaskOptions))
        above = {line for parent in parents for line in described(parent)}
        if lines := [line for line in described(kind, without=kind.fixed) if line not in above]:
            titled.append((title, lines))
    return titled


def check_options(tasks: Iterable[str], metadata: Mapping[str, Any]) -> None:
    """Reads every option of the packaged tasks, and the corpora of RULER's, which stay in memory for them.

    Of other tasks, whose names and patterns may be among those given, the options are read that all have in common.

    Raises:
        UserError: naming the option, what it may be and what it is; or there is no text to read.
    """
    for place, options in [("", metadata), *metadata.items()]:
        if isinstance(options, Mapping) and (not place or place.startswith(PREFIX)):
            _check_shared(place, options)
    of_class = {name: definition for name, definition in named(tasks) if definition and "class" in definition}
    asked = {name: task_options(name, definition, metadata) for name, definition in of_class.items()}
    missing: dict[Missing, list[str]] = {}
    for name, options in asked.items():
        try:
            if isinstance(options, RulerOptions):
                corpus_facts(options)
        except MissingCorpus as error:
            for corpus in error.missing:
                missing.setdefault(corpus, []).append(name)
    if missing:
        raise MissingCorpus(list(missing), [name for names in missing.values() for name in names])


def check_keys(tasks: Iterable[str], keys: Iterable[str]) -> None:
    """Checks the metadata's keys where packaged tasks alone are asked for, since of others nobody knows what they read.

    Raises:
        UserError: no packaged task reads a key.
    """
    asked = dict(named(tasks))
    if None in asked.values():
        return
    known = {field for kind in (*OPTIONS, *(kind for _, kind in _HELP)) for field in kind.model_fields}
    for key in keys:
        if key not in known and not key.startswith(PREFIX):
            raise UserError(unknown_key(key, known, place="a packaged task", source="--metadata"))


def task_options(name: str, definition: Mapping[str, Any], metadata: Mapping[str, Any]) -> TaskOptions | None:
    """Returns the options of a packaged task as the task itself reads them, None where only its class knows them.

    Raises:
        UserError: one cannot be, or they name no text.
    """
    settings = definition.get("metadata") or {}
    if "ruler" in settings:
        return read_options(name, settings["ruler"], metadata)
    if (kind := options_class(definition["class"])) is None:
        return None
    options = kind.of_task(name, {key: settings[key] for key in settings if key in kind.model_fields} | dict(metadata))
    if isinstance(options, CorpusOptions):
        try:
            options.check_text(str(definition.get("dataset_name")))
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
    return options


def options_class(task_class: str) -> type[TaskOptions] | None:
    """Returns the options of a task without RULER's, by the class that its YAML names; None for one unknown here."""
    module, _, name = task_class.rpartition(".")
    if module.startswith(f"{__package__}.perplexity."):
        return PerplexityOptions
    return getattr(recall, f"{name.removesuffix('Task')}Options", None)


def read_options(task: str, definition: Mapping[str, Any], metadata: Mapping[str, Any]) -> RulerOptions:
    """Returns the options of one of RULER's tasks: those of its kind, which the keys of its `metadata.ruler` tell.

    Raises:
        UserError: no kind of task has such a definition, or an option cannot be.
    """
    kind = next((kind for kind in OPTIONS if definition.keys() <= kind.model_fields.keys()), None)
    if kind is None:
        expected = f"Expected metadata.ruler of {task} to hold the options of one kind of task"
        raise UserError(f"{expected}, found {', '.join(definition)}: begin with the YAML of a packaged task.")
    return kind.of_task(task, metadata, definition)


def corpus_facts(options: RulerOptions) -> tuple[str | None, str | None, str | None]:
    """Reads the corpus that one of RULER's tasks needs, which is kept for it, and returns its name, hash and source.

    All are None where the text is generated, but for what identifies a list of the user's.

    Raises:
        UserError: it cannot be loaded.
    """
    detail = None
    if isinstance(options, recall.AssociationOptions) and options.associations:
        detail = f"associations {associations(options.associations)[1][:16]}"
    if getattr(options, "type_haystack", None) == "essay":
        essays = load_essays(options.essays)
        return "essays", essays.sha256, f"{essays.source}, {SENTENCE_RULE}" + (f", {detail}" if detail else "")
    if isinstance(options, QaOptions):
        questions = task_questions(options)
        return options.dataset, questions.sha256, questions.source
    if isinstance(options, ManyShotOptions):
        labelled = task_labelled(options)
        return options.examples, labelled.sha256, labelled.source
    if isinstance(options, recall.LongBenchOptions):
        _, digest, source = load_questions(options.longbench2)
        return "longbench2", digest, source
    return None, None, detail


def _check_shared(place: str, options: Mapping[str, Any]) -> None:
    shared = {key: options[key] for key in TaskOptions.model_fields if options.get(key) is not None}
    TaskOptions.read(shared, place=place, source="--metadata")
    if options.get("split") is not None:
        read_value(Split, options["split"], name="split", source="--metadata")
    text = options.get("data_path")
    if isinstance(text, str) and not local_path(text).exists():
        raise UserError(f"Expected text at data_path {text!r}, found nothing there: check the path.")
