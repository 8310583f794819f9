"""Graded question answering, on documents and questions in the layout of SQuAD 2.

- basic: the question says how its document begins, and the other documents are from other articles
- easy: the other documents are from other articles
- medium: the other documents of the article are in the prompt too
- hard: as medium, with two questions at once
"""

import bisect
import dataclasses
import itertools
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sbeval.tasks.ruler.qa as ruler_qa
from sbeval.errors import UserError
from sbeval.tasks.draws import seeded_order, seeded_ranks
from sbeval.tasks.graded.forms import Question, ending, two_by_two
from sbeval.tasks.graded.options import GradedQaOptions
from sbeval.tasks.ruler.haystacks import running_totals
from sbeval.tasks.ruler.wording import qa_document

OPENING = "Read these documents.\n\n"
_HINT_WORDS = 6
_MOST_ALIASES = 4
_WRONG = 3
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderedDocumentsDraft(ruler_qa.DocumentsDraft):
    """A sample with documents whose order in the prompt does not depend on the other documents there.

    Attributes:
        distinct: number of documents in `order` before it repeats them.
    """

    distinct: int

    def _page(self, units: int) -> NDArray[np.int64]:
        """Returns the order of the documents in the prompt as indices into `order`, int64 [units]."""
        repeats = np.arange(units) // self.distinct
        numbers = self.order[:units] + len(self.documents) * repeats
        return np.argsort(seeded_ranks(numbers, *self.name, "page"), kind="stable")


class GradedQaGenerator(ruler_qa.QaGenerator):
    """Makes the samples of graded question answering; sample `index` asks question `index` of the corpus.

    Raises:
        UserError: more than two questions are to be asked at once.
    """

    options: GradedQaOptions

    def __init__(self, options: GradedQaOptions, *, task: str, **setting: Any) -> None:
        super().__init__(options, task=task, **setting)
        if options.questions > 2:
            raise UserError(f"questions is {options.questions}, and a prompt asks one or two: lower it.")

    def steps(self, length: int) -> None:  # type: ignore[override]
        """Returns None: NVIDIA's scripts do not have this task."""

    def asked(self, index: int) -> list[ruler_qa.Question]:
        """Returns the questions of a sample at this level."""
        return [self._corpus.questions[index], self._others(index)[0]][: self.options.questions]

    def _others(self, index: int) -> list[ruler_qa.Question]:
        """Returns four questions on other documents with other answers, the same at every level.

        Raises:
            UserError: the corpus has too few.
        """
        questions = self._corpus.questions
        taken = {alias.casefold() for alias in questions[index].answers}
        others = []
        for i in seeded_order(len(questions), *self._name, index, "other questions").tolist():
            other = questions[i]
            if other.gold != questions[index].gold and not taken & {alias.casefold() for alias in other.answers}:
                others.append(other)
                taken |= {alias.casefold() for alias in other.answers}
            if len(others) > _WRONG:
                return others
        raise UserError(
            f"{self._corpus.source} has too few questions with different answers on different documents: name a "
            "larger file."
        )

    def question(self, index: int) -> Question:
        """Returns the question of a sample, or its two questions as one."""
        asked = self.asked(index)
        texts = [question.text for question in asked]
        if self.options.hint:
            texts[0] = self._beginning(asked[0]) + texts[0]
        text = texts[0]
        if len(asked) > 1:
            text = f"{texts[0]} And: {texts[1]} Give both answers in this order, with a semicolon between them."
        wrong = [other.answers[0] for other in self._others(index)[1:]]
        if len(asked) > 1:
            first, second = (question.answers[0] for question in asked)
            wrong = two_by_two([(first, wrong[0]), (second, wrong[1])], "; ".join)
        aliases = [question.answers[:_MOST_ALIASES] for question in asked]
        return Question(
            text=text,
            answers=["; ".join(answers) for answers in itertools.product(*aliases)],
            evidence=" ".join(map(self._evidence, asked)),
            first_step="copies the sentence with the answer"
            if len(asked) == 1
            else "copies the sentences with the answers",
            wrong=wrong,
        )

    def _beginning(self, question: ruler_qa.Question) -> str:
        """Returns a hint with the first words of a question's document, none of which belong to the answer."""
        words = self._corpus.documents[question.gold[0]].split()[:_HINT_WORDS]
        while words and any(alias.casefold() in " ".join(words).casefold() for alias in question.answers):
            words.pop()
        return f'In the document that begins with "{" ".join(words)}": ' if words else ""

    def _evidence(self, question: ruler_qa.Question) -> str:
        """Returns the sentence of a question's document that holds its answer."""
        return sentence_with(question.answers[0], self._corpus.documents[question.gold[0]])

    def draft(self, index: int, context_length: int) -> OrderedDocumentsDraft:
        """Makes sample `index`; documents that two levels or lengths share have the same order in both."""
        asked = self.asked(index)
        gold = list(dict.fromkeys(document for question in asked for document in question.gold))
        article = [document for question in asked for document in question.more if document not in gold]
        more = [article[i] for i in seeded_order(len(article), *self._name, index, "more").tolist()]
        count = len(self._corpus.documents)
        first = list(dict.fromkeys([*gold, *(more if self.options.same_article else [])]))
        taken = np.zeros(count, dtype=bool)
        taken[[*first, *more]] = True
        rest = seeded_order(count, *self._name, index, "documents")
        order = np.concatenate((np.array(first, dtype=np.int64), rest[~taken[rest]]))
        most = min(len(self._number_tokens) - 1, context_length)
        distinct = len(order)
        order = np.tile(order, -(-most // distinct))[:most]
        document_tokens = self._tokens[0][order]
        end = ending(self.question(index), self.options.form, *self._name, index)
        return OrderedDocumentsDraft(
            references=end.references,
            answer_prefix=end.answer_prefix,
            opening=[OPENING],
            closing=end.closing,
            least_units=len(gold),
            most_units=most,
            documents=self._corpus.documents,
            order=order,
            totals=running_totals(document_tokens) + self._number_tokens[: most + 1],
            document_tokens=document_tokens,
            number_tokens=self._number_tokens,
            gold=len(gold),
            template=qa_document(),
            name=(*self._name, index),
            distinct=distinct,
        )


def sentence_with(answer: str, document: str) -> str:
    """Returns the first sentence of a document that holds an answer, the whole document if the answer is not in it.

    An answer may hold the end of a sentence or what looks like one ("St. Mary's Hall"). If every occurrence does, the
    result is the shortest run of neighbouring sentences that holds the answer.
    """
    ends = list(_SENTENCE_END.finditer(document))
    starts, stops = [0, *(end.end() for end in ends)], [*(end.start() for end in ends), len(document)]
    runs = [
        (bisect.bisect_right(starts, place.start()) - 1, bisect.bisect_left(stops, place.end()))
        for place in re.finditer(re.escape(answer), document)
    ]
    if not runs:
        return document
    first, last = min(runs, key=lambda run: run[1] - run[0])
    return document[starts[first] : stops[last]]
