"""A few samples of each task that generates text, as a person reads them: what was asked, expected and answered."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sbeval.errors import UserError
from sbeval.foreign_files import parse_json, usable_number
from sbeval.reports.read.fields import is_length, shown_name
from sbeval.reports.read.files import Notes
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.results import Reader, TaskKey
from sbeval.results.records import metric_key

SAMPLES_READ = 3
_LONGEST_LINE_BYTES = 64 * 2**20
_QUESTION_LETTERS, _ANSWER_LETTERS = 140, 160
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a model wrote for one sample at one context length.

    Attributes:
        sample: number of the sample in its task.
        context_length_tokens: None for a task without context lengths.
        question: the end of the prompt, on one line.
        expected: what should be answered.
        text: the beginning of the answer, on one line.
        score: the sample's score, None where the file holds none by that name.
    """

    sample: int
    context_length_tokens: int | None
    question: str
    expected: str
    text: str
    score: float | None


def read_answers(models: Sequence[EvaluatedModel], notes: Notes) -> dict[TaskKey, tuple[Answer, ...]]:
    """Reads the first samples of every task that generates; of several runs the one whose numbers count."""
    found: dict[TaskKey, tuple[Answer, ...]] = {}
    for model in models:
        for _, task in model.task_runs():
            key = (model.label, shown_name(task.name))
            if task.samples is None or key in found:
                continue
            answers = tuple(answer for sample in _first_samples(task.samples) for answer in _answers(sample))
            if answers:
                found[key] = answers
    return found


def _first_samples(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the first samples of a file; what cannot be read is noted by those who read the whole file."""
    try:
        with path.open("rb") as file:
            for line in itertools.islice(iter(lambda: file.readline(_LONGEST_LINE_BYTES), b""), SAMPLES_READ):
                sample = parse_json(line.decode("utf-8", errors="replace"))
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
        prompt, settings = (request.get("arg_0"), request.get("arg_1")) if isinstance(request, dict) else (None, None)
        known = length is None or (type(length) is int and is_length(length))
        # what is generated comes with the settings of its generation; scored text with the text
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
    line = shown_name(text[: 4 * _ANSWER_LETTERS]) if text.strip() else ""
    return line if len(line) <= _ANSWER_LETTERS else line[:_ANSWER_LETTERS].rstrip() + _ELLIPSIS


def _end(text: str) -> str:
    line = shown_name(text[-4 * _QUESTION_LETTERS :])
    return line if len(line) <= _QUESTION_LETTERS else _ELLIPSIS + line[-_QUESTION_LETTERS:].lstrip()


def _one_seed(
    found: Mapping[TaskKey, tuple[Answer, ...]], pooled_label: Mapping[str, str], notes: Notes
) -> dict[TaskKey, tuple[Answer, ...]]:
    """Keeps the answers of one seed of each group."""
    kept: dict[TaskKey, tuple[Answer, ...]] = {}
    for (label, task), answers in found.items():
        kept.setdefault((pooled_label.get(label, label), task), answers)
    return kept


ANSWERS = Reader(read=read_answers, pool=_one_seed)
