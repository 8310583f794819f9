"""The section "Samples": the documents whose NLL changes most, and prompts with expected and generated answers."""

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from sbeval.errors import UserError
from sbeval.foreign_files import parse_visible_json, usable_number
from sbeval.reports.analyse.panels import CORPUS_NAMES, safe_stem
from sbeval.reports.analyse.protocols import on_identical_targets
from sbeval.reports.read.fields import display_name, is_length, length_text
from sbeval.reports.read.files import Notes
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.results import Reader, TaskKey, averaging, records
from sbeval.reports.read.samples import DOCUMENT_SUMS
from sbeval.reports.section import NOT_MEASURED, Cell, Kind, Material, Section, Table
from sbeval.results.intervals import change_text, decimals
from sbeval.results.records import metric_key

SAMPLES_READ = 3
_LONGEST_LINE_BYTES = 64 * 2**20
_QUESTION_LETTERS = 140
_ANSWER_LETTERS = 160
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
_MODELS_AT_MOST = 6
_DOCUMENTS_AT_EITHER_END = 4


class Answer(NamedTuple):
    """A model's answer to one sample at one context length.

    Attributes:
        sample: number of the sample in its task (`doc_id`).
        context_length_tokens: the sample's context length; None for a task without context lengths.
        question: the end of the prompt, on one line.
        expected: the expected answers, joined by commas and cut to one line.
        text: the beginning of the generated answer, on one line.
        score: the sample's score at this length; None if the samples file has none.
    """

    sample: int
    context_length_tokens: int | None
    question: str
    expected: str
    text: str
    score: float | None


def _read(models: Sequence[EvaluatedModel], notes: Notes) -> dict[TaskKey, tuple[Answer, ...]]:
    """Reads the first samples of every task with generated answers, from the run whose numbers the report shows.

    If no answers can be read there, the next run's are taken, and a note says so.

    Returns:
        (model label, task name) to the answers to these samples.
    """
    by_task: dict[TaskKey, tuple[Answer, ...]] = {}
    without_answers: dict[TaskKey, Path] = {}
    for model in models:
        for run, task in model.task_runs():
            key = (model.label, display_name(task.name))
            if key in by_task:
                continue
            samples = () if task.samples is None else _first_samples(task.samples)
            answers = tuple(answer for sample in samples for answer in _answers(sample))
            if not answers:
                without_answers.setdefault(key, task.samples or run.path)
                continue
            by_task[key] = answers
            if key in without_answers:
                reason = f"no answers to {key[1]} could be read; the page shows those of {run.path.name}."
                notes.add(without_answers[key], reason)
    return by_task


def _first_samples(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the first samples of a file, up to the first unreadable line.

    It logs nothing for such a line: functions that read the whole file write a note on it.
    """
    try:
        with path.open("rb") as file:
            for line in itertools.islice(iter(lambda: file.readline(_LONGEST_LINE_BYTES), b""), SAMPLES_READ):
                sample = parse_visible_json(line.decode("utf-8", errors="replace"))
                if isinstance(sample, dict):
                    yield sample
    except (OSError, UserError):
        return


def _answers(sample: Mapping[str, Any]) -> Iterator[Answer]:
    requests, answers = sample.get("arguments"), sample.get("filtered_resps")
    if not isinstance(requests, dict) or not isinstance(answers, list) or len(requests) != len(answers):
        return
    doc = sample.get("doc")
    doc = doc if isinstance(doc, dict) else {}
    lengths = doc.get("lengths", [None])
    if not isinstance(lengths, list) or len(lengths) != len(answers):
        return
    expected = doc.get("references", sample.get("target"))
    expected = ", ".join(map(str, expected)) if isinstance(expected, list) else str(expected)
    for request, answer, length in zip(requests.values(), answers, lengths, strict=True):
        arguments = request if isinstance(request, dict) else {}
        prompt = arguments.get("arg_0")
        settings = arguments.get("arg_1")
        known = length is None or (type(length) is int and is_length(length))
        # the second argument of a generation request is a dictionary of settings; that of a scored request is a string
        if not isinstance(prompt, str) or not isinstance(settings, dict) or not isinstance(answer, str) or not known:
            return
        yield Answer(
            sample=number if type(number := sample.get("doc_id")) is int else 0,
            context_length_tokens=length,
            question=_end(prompt),
            expected=_beginning(expected),
            text=_beginning(answer),
            score=None if length is None else usable_number(sample.get(metric_key("score", length))),
        )


def _beginning(text: str) -> str:
    line = display_name(text[: 4 * _ANSWER_LETTERS]) if text.strip() else ""
    return line if len(line) <= _ANSWER_LETTERS else line[:_ANSWER_LETTERS].rstrip() + _ELLIPSIS


def _end(text: str) -> str:
    line = display_name(text[-4 * _QUESTION_LETTERS :])
    return line if len(line) <= _QUESTION_LETTERS else _ELLIPSIS + line[-_QUESTION_LETTERS:].lstrip()


# if several training seeds are merged into one model, the answers of the first seed are shown
ANSWERS = Reader(read=_read, pool=averaging(operator.itemgetter(0)))


def _section(material: Material) -> Section | None:
    """Builds the section "Samples"; None if no samples were logged that the section can show."""
    tables = [*_document_tables(material), *_answer_tables(material)]
    if not tables:
        return None
    return Section(
        identifier="samples",
        title="Samples",
        lead="Single documents and answers from the logged samples, as examples.",
        tables=tuple(tables),
    )


SAMPLES = Kind(section=_section, readers=(ANSWERS,))


def _document_tables(material: Material) -> Iterator[Table]:
    """Yields, for every text with identical targets, a table of the documents whose NLL changes most with context.

    Both the documents with the largest fall and those with the largest rise are listed.
    """
    for corpus in dict.fromkeys(key[1] for key in material.claims if key[2] == "fixed_target"):
        changes = {label: documents for label in material.looks if (documents := _changes(material, label, corpus))}
        if not changes:
            continue
        labels = list(changes)[:_MODELS_AT_MOST]
        shared = set.intersection(*(set(changes[label]) for label in labels))
        order = sorted(shared, key=lambda name: (float(np.mean([changes[label][name][0] for label in labels])), name))
        ends = list(dict.fromkeys(order[:_DOCUMENTS_AT_EITHER_END] + order[-_DOCUMENTS_AT_EITHER_END:]))
        title = f"{CORPUS_NAMES.get(corpus, corpus)}, single documents"
        helps = on_identical_targets("fixed_target", "below zero, the longer context helps.")
        yield Table.of(
            ("document", *(Cell(name=label) for label in labels)),
            [(Cell(name=name), *(_change_cell(*changes[label][name]) for label in labels)) for name in ends],
            stem=f"documents-{safe_stem(corpus)}",
            caption=f"{title}: NLL at the longest context minus NLL at the longest within the training length",
            explanation=(
                f"Nats per token on the same targets; {helps} Small print: NLL at both lengths. "
                f"{len(ends)} of {len(order)} documents, from the lowest change to the highest"
                + (" by the mean over the models." if len(labels) > 1 else ".")
            ),
            folded=title,
        )


def _changes(material: Material, label: str, corpus: str) -> dict[str, tuple[float, str]]:
    """Returns each document's NLL at the longest context length minus its NLL at the reference length.

    The reference length is the longest compared length within the training length.

    Args:
        material: the report's data.
        label: label of the model.
        corpus: name of the text.

    Returns:
        Document to (change in nats per token, a string with the NLL at both lengths). Only documents with the same
        number of targets at both lengths are included. Empty for a model without a known training length.
    """
    claim = material.claims.get((label, corpus, "fixed_target"))
    if claim is None or claim.reference_tokens is None or not claim.beyond_reference:
        return {}
    rows = material.results.measurements
    scored = rows[(rows["setting"] == label) & (rows["corpus"] == corpus) & (rows["protocol"] == "fixed_target")]
    sums = material.results.behind(DOCUMENT_SUMS, records(scored)[0])
    if sums is None:
        return {}
    columns = [sums.lengths.index(claim.reference_tokens), sums.lengths.index(max(claim.lengths))]
    lengths = [length_text(sums.lengths[column]) for column in columns]
    changes = {}
    for place, name in enumerate(sums.clusters):
        tokens = sums.tokens[place, columns]
        if tokens[0] == tokens[1] > 0:
            before, after = sums.nll_nats[place, columns] / tokens
            digits = decimals(after - before, least=2)
            both_nll = f"{before:.{digits}f} at {lengths[0]}, {after:.{digits}f} at {lengths[1]}"
            changes[display_name(name)] = (float(after - before), both_nll)
    return changes


def _change_cell(change: float, both_nll: str) -> Cell:
    return Cell(change_text(change)[0], small=(both_nll,))


def _answer_tables(material: Material) -> Iterator[Table]:
    answers = material.results[ANSWERS]
    for task in dict.fromkeys(task for _, task in answers):
        labels = [label for label in material.looks if (label, task) in answers][:_MODELS_AT_MOST]
        yield Table.of(
            ("end of the prompt", "context", "expected", *(Cell(name=label) for label in labels)),
            _answer_rows([answers[label, task] for label in labels]),
            stem=f"answers-{safe_stem(task)}",
            caption=f"{task}: the first samples",
            explanation="The beginning of each answer, on one line, coloured by the sample's score.",
            folded=f"{task}: prompts and answers",
            prose=True,
        )


def _answer_rows(by_model: Sequence[Sequence[Answer]]) -> Iterator[list[Cell]]:
    """Yields two table rows for each sample: its generated answers at the shortest and the longest context length."""
    by_place = [{(each.sample, each.context_length_tokens or 0): each for each in answers} for answers in by_model]
    places = sorted({place for answers in by_place for place in answers})
    for sample, group in itertools.groupby(places, key=lambda place: place[0]):
        lengths = [length for _, length in group]
        for length in dict.fromkeys((lengths[0], lengths[-1])):
            of_models = [answers.get((sample, length)) for answers in by_place]
            first = next(answer for answer in of_models if answer is not None)
            context = Cell(length_text(length) if length else "whole")
            cells = [context, Cell(first.expected), *map(_answer_cell, of_models)]
            heading = first.question if length == lengths[0] else "the same, in a longer text"
            yield [Cell(heading, quiet=True), *cells]


def _answer_cell(answer: Answer | None) -> Cell:
    if answer is None:
        return NOT_MEASURED
    text = answer.text or "(nothing)"
    score = answer.score
    verdict: Literal["better", "worse"] | None = None
    if score is not None and score >= 1:
        verdict = "better"
    elif score is not None and score <= 0:
        verdict = "worse"
    return Cell(text, verdict=verdict, quiet=not answer.text)
