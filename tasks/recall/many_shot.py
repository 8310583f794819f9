"""Many-shot classification: labelled texts fill the length, and the label of one more text is asked for.

Labels are integers that every sample deals out anew, so that a label can be learnt from the shots alone. They have the
same number of digits, so that none is the beginning of another, and are scored by log-likelihood: the label that the
model finds most probable of all is its answer. Shots come in rounds in which every label comes once.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from lm_eval.api.instance import Instance
from numpy.typing import NDArray

from sbeval.corpora.tokenizers import shared_start
from sbeval.results.records import metric_key
from sbeval.scoring.requests import TargetLogprobs, TargetSequence
from sbeval.tasks.base import Numbered
from sbeval.tasks.draws import seeded_order, seeded_ranks
from sbeval.tasks.recall.labelled import task_labelled
from sbeval.tasks.recall.options import ManyShotOptions
from sbeval.tasks.recall.task import split_answers
from sbeval.tasks.ruler.drafts import Frame, Generator, HaystackDraft
from sbeval.tasks.ruler.haystacks import LineHaystack, running_totals
from sbeval.tasks.ruler.task import RulerTask, SizesByLength

INSTRUCTION = "Each text has a number for its label.\n"
CUE = "Label:"
LEAST_SHOT_TOKENS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shots(LineHaystack):
    """Labelled texts: a unit is one shot, `pool` holds texts, and `numbers` their labels as shown, int64 [texts]."""

    numbers: NDArray[np.int64]

    def text(self, first: int, last: int) -> str:
        """Returns the shots, each on a line."""
        order = self.order[first:last]
        shown = zip(order.tolist(), self.numbers[order].tolist(), strict=True)
        return "".join([f"{self.pool[i]} {CUE} {number}\n" for i, number in shown])


class ManyShotGenerator(Generator):
    """Makes the samples of many-shot classification."""

    options: ManyShotOptions

    def __init__(self, options: ManyShotOptions, **setting: Any) -> None:
        super().__init__(options, **setting)
        self._labelled = labelled = task_labelled(options)
        self._asked = seeded_order(len(labelled.questions), *self._name, "questions")
        self._of_label = [np.flatnonzero(labelled.shot_labels == label) for label in range(labelled.labels)]
        least = 10 ** math.ceil(math.log10(labelled.labels / 9)) if labelled.labels > 9 else 1
        self.numbers = np.arange(least, least + labelled.labels)
        self.labels = [str(number) for number in self.numbers]

    def available(self) -> int:
        """Returns the number of questions."""
        return len(self._labelled.questions)

    @functools.cached_property
    def _tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of every text with its cue, and of every number with its line break."""
        texts = self.counter.count_pool([f"{text} {CUE}" for text in self._labelled.shots], ("1\n", " 1"))
        return texts, self.counter.count_pieces([f" {number}\n" for number in self.numbers], (CUE, "A"))

    def draft(self, index: int, context_length: int) -> HaystackDraft:
        """Makes sample `index`; its question, labels and order of shots are the same at every length."""
        name = (*self._name, index)
        labelled = self._labelled
        dealt = seeded_order(labelled.labels, *name, "labels")
        order = self._order(1 + context_length // (LEAST_SHOT_TOKENS * labelled.labels), *name)
        text_tokens, number_tokens = self._tokens
        places = dealt[labelled.shot_labels]
        totals = running_totals(text_tokens[order] + number_tokens[places[order]])
        question = int(self._asked[index])
        return HaystackDraft(
            references=[str(self.numbers[dealt[labelled.question_labels[question]]])],
            answer_prefix=CUE,
            opening=[INSTRUCTION],
            closing=labelled.questions[question],
            least_units=labelled.labels,
            most_units=len(order),
            haystack=Shots(pool=labelled.shots, order=order, cumulative_tokens=totals, numbers=self.numbers[places]),
            inserts=[],
            counter=self.counter,
        )

    def _order(self, rounds: int, *name: object) -> NDArray[np.int64]:
        """Returns which text comes when; a label whose texts run out begins with them again."""
        texts = [of[seeded_order(len(of), *name, "texts", label)] for label, of in enumerate(self._of_label)]
        columns = [of_label[np.arange(rounds) % len(of_label)] for of_label in texts]
        ranks = seeded_ranks(np.arange(rounds * len(columns)), *name, "rounds").reshape(rounds, -1)
        return np.take_along_axis(np.stack(columns, axis=1), ranks.argsort(axis=1), axis=1).ravel()


Path = tuple[int, ...]


class LabelTree:
    """The tokens of all labels behind a prompt, none the beginning of another, and where they part."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.next_of: dict[Path, list[int]] = {}
        for path in paths:
            for depth, token in enumerate(path):
                following = self.next_of.setdefault(path[:depth], [])
                if token not in following:
                    following.append(token)

    def sequences(self, prompt: NDArray[np.int64]) -> list[TargetSequence]:
        """Returns one sequence for each place where labels go on, in which every next token is a target."""
        return [
            TargetSequence(
                np.concatenate([prompt, np.array(node, dtype=np.int64)]),
                np.full(len(following), len(prompt) + len(node) - 1),
                np.array(following, dtype=np.int64),
            )
            for node, following in self.next_of.items()
        ]

    def logprobs(self, results: Sequence[TargetLogprobs]) -> NDArray[np.float64]:
        """Returns the log-probability of each label, float64 [labels], from the results of `sequences`."""
        by_path = {
            (*node, token): float(value)
            for (node, following), result in zip(self.next_of.items(), results, strict=True)
            for token, value in zip(following, result.logprobs, strict=True)
        }
        return np.array([sum(by_path[path[: i + 1]] for i in range(len(path))) for path in self.paths])


class LabelTask(RulerTask):
    """A question whose answer is one of a few labels.

    Metrics at each length: `exact_match`, whether the right label is the most probable of all; `answer_nll`, its
    negative log-likelihood among them in nats; `chance`, the share of one label; and, where every length has a second
    prompt, `retrieval_gain`, by how much the negative log-likelihood rises there.

    Attributes:
        cue: what a label stands behind.
    """

    fixed: ClassVar = {"output_type": "loglikelihood_rolling"}
    family = "recall"
    metrics: ClassVar = {"exact_match": True, "answer_nll": False, "chance": True}
    cue: ClassVar = CUE

    @property
    def labels(self) -> Sequence[str]:
        """All labels, as they stand behind a space."""
        return self.generator.labels  # type: ignore[attr-defined,no-any-return]

    def make_requests(self, documents: Numbered, sizes: SizesByLength, frame: Frame) -> list[Instance]:
        """Makes a request for each place where labels part, at each length; with most tokenizers that is one."""
        end = f"a{frame.middle}{self.cue}{frame.tail}"
        ended = [end, *(f"{end} {label}" for label in self.labels)]
        alone, *behind = self.counter.encode(ended, special_tokens=False)
        shared = shared_start([alone, *behind])
        trunk = behind[0][: shared_start(behind)]
        self.tree = LabelTree([tuple(tokens[len(trunk) :]) for tokens in behind])
        sequences = []
        for _, doc in documents:
            for prompt in self.prompts(doc["index"], sizes, frame):
                (tokens,) = self.counter.encode([prompt], special_tokens=True)
                tokens = tokens[: len(tokens) - len(alone) + shared] + trunk[shared:]
                sequences += self.tree.sequences(np.array(tokens, dtype=np.int64))
        return self.target_requests(documents, sequences)

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
        """Scores one sample at every length."""
        right = self.labels.index(doc["references"][0])
        places = len(self.tree.next_of)
        scored = []
        for first in range(0, len(results), places):
            of_prompt = results[first : first + places]
            for result in of_prompt:
                split_answers(result, np.array([len(result.logprobs)]), null=self.records_null)
            logprobs = self.tree.logprobs(of_prompt)
            nll = exact = math.nan
            if not np.isnan(logprobs).any():
                nll = float(np.logaddexp.reduce(logprobs) - logprobs[right])
                exact = float(logprobs.argmax() == right)
            scored.append((nll, exact))
        each = len(scored) // len(doc["lengths"])
        scores: dict[str, float] = {}
        for number, length in enumerate(doc["lengths"]):
            (nll, exact), *control = scored[number * each : (number + 1) * each]
            gains = [without - nll for without, _ in control]
            values = (exact, nll, 1.0 / len(self.labels), *gains)
            scores |= {metric_key(metric, length): value for metric, value in zip(self.metrics, values, strict=True)}
        return scores


class ManyShotTask(LabelTask):
    """Many-shot classification."""

    options_class = ManyShotOptions
    generator_class = ManyShotGenerator

    @classmethod
    def corpus_facts(cls, options: Any) -> tuple[str | None, str | None, str | None]:
        """Loads the labelled texts and returns their name, hash and source."""
        labelled = task_labelled(options)
        return options.examples, labelled.sha256, labelled.source
