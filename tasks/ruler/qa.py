"""Question answering over documents: questions in the layouts of SQuAD 2 and of HotpotQA's distractor setting."""

import dataclasses
import functools
import hashlib
import json
import random
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.keeping.cache import cache_folder
from sbeval.keeping.content import cached_by_content
from sbeval.keeping.writing import whole_file
from sbeval.tasks.draws import seeded_order, seeded_ranks
from sbeval.tasks.ruler.drafts import Generator, ListDraft, Steps
from sbeval.tasks.ruler.haystacks import running_totals
from sbeval.tasks.ruler.options import QaOptions
from sbeval.tasks.ruler.texts import Missing, MissingCorpus
from sbeval.tasks.ruler.wording import qa_document, qa_source, task_wording

MOST_DOCUMENTS = 10_000
PARAGRAPHS = ("a.\n\n", "A")


_KEYS = {"squad": "squad", "hotpotqa": "hotpot"}
"""Maps a data set to the option that names a local copy of it."""


class Question(NamedTuple):
    """One answerable question.

    Attributes:
        text: the question.
        answers: the distinct aliases of its answer.
        gold: indices of the documents that contain the answer.
        more: indices of further documents from the same article.
    """

    text: str
    answers: Sequence[str]
    gold: Sequence[int]
    more: Sequence[int] = ()


class QaCorpus(NamedTuple):
    """A corpus of documents and questions.

    Attributes:
        documents: the distinct documents, sorted; prompts are filled with them.
        questions: the questions in the order of the file.
        sha256: hash of the file.
        source: a local path or an address.
    """

    documents: Sequence[str]
    questions: Sequence[Question]
    sha256: str
    source: str


def task_questions(options: QaOptions) -> QaCorpus:
    """Returns the questions that a task's options name.

    Raises:
        UserError: the file is missing, it cannot be downloaded, or it has another layout.
    """
    return load_qa(options.dataset, getattr(options, _KEYS[options.dataset]))


@cached_by_content(2, argument=1)
def load_qa(dataset: str, path: str | None) -> QaCorpus:
    """Reads a corpus from a local file; if `path` is None, downloads the file, but only once."""
    raw, source = (_read_file(local_path(path)), path) if path else _download(dataset)
    try:
        documents, questions = (_squad if dataset == "squad" else _hotpotqa)(json.loads(raw))
    except (ValueError, KeyError, TypeError) as error:
        layout = "SQuAD 2 (data, paragraphs, qas)" if dataset == "squad" else "HotpotQA's distractor setting"
        raise UserError(
            f"Expected {source} in the layout of {layout}, and found another layout ({error!r}); name a file in that "
            "layout."
        ) from error
    if not questions:
        raise UserError(f"{source} holds no answerable question; name another file.")
    return QaCorpus(documents=documents, questions=questions, sha256=hashlib.sha256(raw).hexdigest(), source=source)


def _squad(data: Mapping[str, Any]) -> tuple[list[str], list[Question]]:
    articles = [[paragraph["context"] for paragraph in article["paragraphs"]] for article in data["data"]]
    documents = sorted({context for contexts in articles for context in contexts})
    number = {context: i for i, context in enumerate(documents)}
    questions = []
    for article, contexts in zip(data["data"], articles, strict=True):
        for paragraph in article["paragraphs"]:
            gold = number[paragraph["context"]]
            more = [i for i in dict.fromkeys(number[context] for context in contexts) if i != gold]
            for entry in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in entry["answers"]))
                if not entry["is_impossible"] and answers:
                    questions.append(Question(text=entry["question"], answers=answers, gold=(gold,), more=tuple(more)))
    return documents, questions


def _hotpotqa(data: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Question]]:
    contexts = [[f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]] for entry in data]
    documents = sorted({document for context in contexts for document in context})
    number = {document: i for i, document in enumerate(documents)}
    questions = []
    for entry, context in zip(data, contexts, strict=True):
        gold = tuple(dict.fromkeys(number[document] for document in context))
        questions.append(Question(entry["question"], (entry["answer"],), gold))
    return documents, questions


def _read_file(path: Path) -> bytes:
    if not path.is_file():
        raise UserError(f"There is no corpus file at {path}; check the path in --metadata.")
    return path.read_bytes()


def _download(dataset: str) -> tuple[bytes, str]:
    url = qa_source(dataset)
    cached = cache_folder("ruler") / f"{dataset}-{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
    if cached.is_file():
        return cached.read_bytes(), url
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            raw = bytes(response.read())
    except OSError as error:
        raise MissingCorpus([Missing(_KEYS[dataset], "FILE", url, type(error).__name__)]) from error
    with whole_file(cached, "downloaded questions") as unfinished:
        unfinished.write_bytes(raw)
    return raw, url


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentsDraft(ListDraft):
    """A sample with numbered documents in random order; a unit is one document.

    Attributes:
        documents: all documents of the corpus.
        order: indices of documents in the order in which they are added to the prompt, those with the answer first,
            int64.
        document_tokens: token count of each document of `order` without its number, int64.
        number_tokens: `number_tokens[n]` is the token count of the first n numbers, int64.
        gold: number of documents with the answer; they are the first ones in `order`.
        template: format string of a document and its number.
        shuffle_seed: seed of the shuffle of NVIDIA's scripts, which shuffle the documents of two samples in the same
            way if both have the same number of them. None draws another order for each sample.
    """

    documents: Sequence[str]
    order: NDArray[np.int64]
    document_tokens: NDArray[np.int64]
    number_tokens: NDArray[np.int64]
    gold: int
    template: str
    shuffle_seed: int | None = None

    def _page(self, units: int) -> NDArray[np.int64]:
        """Returns the order of the documents in the prompt as indices into `order`, int64 [units]."""
        if self.shuffle_seed is None:
            return np.argsort(seeded_ranks(np.arange(units), *self.name, "page"), kind="stable")
        places = list(range(units))
        random.Random(self.shuffle_seed).shuffle(places)
        return np.array(places, dtype=np.int64)

    def body(self, units: int) -> str:
        """Returns the documents, each with a blank line after it."""
        page = self.order[self._page(units)].tolist()
        numbered = [self.template.format(i=i, document=self.documents[document]) for i, document in enumerate(page, 1)]
        return "".join([document + "\n\n" for document in numbered])

    def depths(self, units: int) -> tuple[list[int], list[float]]:
        """Returns the depths of the documents with the answer, in tokens and in percent."""
        page = self._page(units)
        before = running_totals(self.document_tokens[page]) + self.number_tokens[: units + 1]
        places = np.flatnonzero(page < self.gold)
        total = max(1, int(before[-1]))
        return before[places].tolist(), [round(100 * int(before[place]) / total, 6) for place in places]


class QaGenerator(Generator):
    """Makes the samples of one question-answering task; sample `index` asks question `index` of the corpus."""

    options: QaOptions

    @property
    def _corpus(self) -> QaCorpus:
        return task_questions(self.options)  # cached by `load_qa`

    def available(self) -> int:
        """Returns the number of questions."""
        return len(self._corpus.questions)

    def steps(self, length: int) -> Steps:
        """Returns steps of ten documents."""
        return Steps(10)

    @functools.cached_property
    def _tokens(self) -> tuple[NDArray[np.int64], int]:
        """Token count of each document without its heading, and the token count of a heading ("Document 1:")."""
        numbered = [qa_document().format(i=1, document=document) + "\n\n" for document in self._corpus.documents]
        with_number = self.counter.count_pool(numbered, PARAGRAPHS)
        number = int(self.counter.count_segments([qa_document().format(i=1, document="")], PARAGRAPHS)[0])
        return with_number - number, number

    @functools.cached_property
    def _number_tokens(self) -> NDArray[np.int64]:
        headings = [qa_document().format(i=i, document="") for i in range(1, MOST_DOCUMENTS + 1)]
        return running_totals(self.counter.count_pool(headings, PARAGRAPHS))

    def draft(self, index: int, context_length: int) -> DocumentsDraft:
        """Makes sample `index`.

        Documents with the answer are added first, then other documents of the same article, then random ones.
        """
        question = self._corpus.questions[index]
        count = len(self._corpus.documents)
        more = seeded_order(len(question.more), *self._name, index, "more").tolist()
        first = [*question.gold, *(question.more[i] for i in more)]
        taken = np.zeros(count, dtype=bool)
        taken[first] = True
        rest = seeded_order(count, *self._name, index, "documents")
        order = np.concatenate((np.array(first, dtype=np.int64), rest[~taken[rest]]))
        most = min(len(self._number_tokens) - 1, context_length)
        order = np.tile(order, -(-most // count))[:most]
        document_tokens = self._tokens[0][order]
        wording = task_wording("qa")
        return DocumentsDraft(
            references=question.answers,
            answer_prefix=wording.answer_prefix,
            opening=[wording.opening],
            closing=wording.closing.removeprefix("\n\n").format(query=question.text),
            least_units=len(question.gold),
            most_units=most,
            documents=self._corpus.documents,
            order=order,
            totals=running_totals(document_tokens) + self._number_tokens[: most + 1],
            document_tokens=document_tokens,
            number_tokens=self._number_tokens,
            gold=len(question.gold),
            template=qa_document(),
            name=(*self._name, index),
            shuffle_seed=self.options.seed if self.options.scripts else None,
        )
