"""Question answering over documents: the SQuAD and HotpotQA tasks."""

import dataclasses
import functools
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sbeval.tasks.draws import seeded_order, seeded_ranks
from sbeval.tasks.ruler.drafts import Draft
from sbeval.tasks.ruler.options import QaOptions
from sbeval.tasks.ruler.texts import QaCorpus
from sbeval.tasks.ruler.wording import qa_document, qa_wording
from sbeval.tasks.tokens import TokenCounter

MOST_DOCUMENTS = 10_000
PARAGRAPHS = ("a.\n\n", "A")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentsDraft(Draft):
    """Numbered documents in random order; a unit is one document.

    Attributes:
        documents: all documents.
        order: which document comes in when, those with the answer first, int64.
        cumulative_tokens: tokens of the first n documents and numbers, int64, from n = 0.
        document_tokens: tokens of each document of `order`, without its number.
        number_tokens: tokens of the first n numbers, int64, from n = 0.
        gold: how many of the first documents hold the answer.
        template: how a document is shown.
        name: seeds the order on the page.
        shuffle_seed: seeds the one order that NVIDIA's scripts have for all pages of equally many documents; None draws
            one for each sample.
    """

    documents: Sequence[str]
    order: NDArray[np.int64]
    document_tokens: NDArray[np.int64]
    number_tokens: NDArray[np.int64]
    gold: int
    template: str
    name: tuple[object, ...]
    shuffle_seed: int | None = None

    def body_tokens(self, units: int) -> int:
        """Returns the tokens of documents and numbers."""
        return int(self.document_tokens[:units].sum() + self.number_tokens[units])

    def units_within(self, tokens: int) -> int:
        """Returns how many documents fit."""
        totals = np.concatenate(([0], np.cumsum(self.document_tokens))) + self.number_tokens[: len(self.order) + 1]
        return max(0, int(np.searchsorted(totals, tokens, side="right")) - 1)

    def _page(self, units: int) -> NDArray[np.int64]:
        """Returns places in `order` as they stand on the page, int64 [units]."""
        if self.shuffle_seed is None:
            return np.argsort(seeded_ranks(np.arange(units), *self.name, "page"), kind="stable")
        places = list(range(units))
        random.Random(self.shuffle_seed).shuffle(places)
        return np.array(places, dtype=np.int64)

    def body(self, units: int) -> str:
        """Returns the documents, each with a blank line after it."""
        page = self.order[self._page(units)].tolist()
        shown = [self.template.format(i=i, document=self.documents[document]) for i, document in enumerate(page, 1)]
        return "".join([document + "\n\n" for document in shown])

    def depths(self, units: int) -> tuple[list[int], list[float]]:
        """Returns token and percent depths of the documents with the answer."""
        page = self._page(units)
        before = np.concatenate(([0], np.cumsum(self.document_tokens[page]))) + self.number_tokens[: units + 1]
        places = np.flatnonzero(page < self.gold)
        total = max(1, int(before[-1]))
        return before[places].tolist(), [round(100 * int(before[place]) / total, 6) for place in places]


class QaGenerator:
    """Makes the samples of one question-answering task; sample `index` is the corpus' question `index`.

    Args:
        options: what is asked.
        corpus: questions and documents.
        task: its name, part of every seed.
        counter: the model's tokenizer.
    """

    def __init__(self, options: QaOptions, corpus: QaCorpus, *, task: str, counter: TokenCounter) -> None:
        self._corpus = corpus
        self._name = (task, options.seed)
        self._shuffle_seed = options.seed if options.scripts == "nvidia" else None
        self._counter = counter
        self._wording = qa_wording()
        self._template = qa_document()

    @functools.cached_property
    def _tokens(self) -> tuple[NDArray[np.int64], int]:
        """Token counts of all documents, and of what stands before a document without its number."""
        shown = [self._template.format(i=1, document=document) + "\n\n" for document in self._corpus.documents]
        with_number = self._counter.count_pool(shown, PARAGRAPHS)
        number = int(self._counter.count_pieces([self._template.format(i=1, document="")], PARAGRAPHS)[0])
        return with_number - number, number

    @functools.cached_property
    def _number_tokens(self) -> NDArray[np.int64]:
        shown = [self._template.format(i=i, document="") for i in range(1, MOST_DOCUMENTS + 1)]
        return np.concatenate(([0], np.cumsum(self._counter.count_pool(shown, PARAGRAPHS))))

    def draft(self, index: int, context_length: int) -> DocumentsDraft:
        """Makes sample `index`: its own documents, then those of the same article, then the others at random."""
        question = self._corpus.questions[index]
        count = len(self._corpus.documents)
        first = [*question.gold, *_shuffled(question.more, *self._name, index, "more")]
        taken = np.zeros(count, dtype=bool)
        taken[first] = True
        rest = seeded_order(count, *self._name, index, "documents")
        order = np.concatenate((np.array(first, dtype=np.int64), rest[~taken[rest]]))
        most = min(len(self._number_tokens) - 1, context_length)
        order = np.tile(order, -(-most // count))[:most]
        opening, closing = self._wording.template.split("{context}")
        return DocumentsDraft(
            references=question.answers,
            answer_prefix=self._wording.answer_prefix,
            opening=[opening],
            closing=closing.removeprefix("\n\n").format(query=question.text),
            least_units=len(question.gold),
            most_units=most,
            documents=self._corpus.documents,
            order=order,
            document_tokens=self._tokens[0][order],
            number_tokens=self._number_tokens,
            gold=len(question.gold),
            template=self._template,
            name=(*self._name, index),
            shuffle_seed=self._shuffle_seed,
        )


def _shuffled(items: Sequence[int], *name: object) -> list[int]:
    return [items[i] for i in seeded_order(len(items), *name).tolist()]
