"""Many-shot classification: labelled texts fill the length, and the label of one more text is asked for.

Labels are integers that every sample deals out anew, so that a label can be learnt from the shots alone. They have the
same number of digits, so that none is the beginning of another, and are scored by log-likelihood: the label that the
model finds most probable of all is its answer. Shots come in rounds in which every label comes once.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.filters import build_filter_ensemble
from numpy.typing import NDArray

from sbeval.results.records import TaskRecord, metric_key
from sbeval.scoring.requests import TargetLogprobs, TargetSequence
from sbeval.tasks.draws import seeded_order, seeded_ranks
from sbeval.tasks.recall.labelled import LabelledTexts, task_labelled
from sbeval.tasks.recall.options import ManyShotOptions
from sbeval.tasks.recall.task import split_answers
from sbeval.tasks.ruler.drafts import Frame, Generator, HaystackDraft, prompt_text
from sbeval.tasks.ruler.fit import Fit
from sbeval.tasks.ruler.haystacks import LineHaystack
from sbeval.tasks.ruler.task import RulerTask
from sbeval.tasks.tokens import TokenCounter

INSTRUCTION = "Each text has a number for its label.\n"
CUE = "Label:"
LEAST_SHOT_TOKENS = 4
METRICS = {"exact_match": True, "answer_nll": False, "chance": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shots(LineHaystack):
    """Labelled texts, in which a unit is one shot and `pool` holds the texts.

    Attributes:
        numbers: each text's label as it is shown, int64 [texts].
    """

    numbers: NDArray[np.int64]

    def text(self, first: int, last: int) -> str:
        """Returns the shots, each on a line."""
        order = self.order[first:last]
        shown = zip(order.tolist(), self.numbers[order].tolist(), strict=True)
        return "".join([f"{self.pool[i]} {CUE} {number}\n" for i, number in shown])


class ManyShotGenerator:
    """Makes the samples of many-shot classification.

    Args:
        options: what is asked.
        labelled: the texts.
        task: its name, part of every seed.
        counter: the model's tokenizer.
    """

    def __init__(self, options: ManyShotOptions, labelled: LabelledTexts, *, task: str, counter: TokenCounter) -> None:
        self._name = (task, options.seed)
        self._labelled = labelled
        self._counter = counter
        self._asked = seeded_order(len(labelled.questions), *self._name, "questions")
        self._of_label = [np.flatnonzero(labelled.shot_labels == label) for label in range(labelled.labels)]
        least = 10 ** math.ceil(math.log10(labelled.labels / 9)) if labelled.labels > 9 else 1
        self.numbers = np.arange(least, least + labelled.labels)

    @functools.cached_property
    def _tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of every text with its cue, and of every number with its line break."""
        texts = self._counter.count_pool([f"{text} {CUE}" for text in self._labelled.shots], ("1\n", " 1"))
        return texts, self._counter.count_pieces([f" {number}\n" for number in self.numbers], (CUE, "A"))

    def draft(self, index: int, context_length: int) -> HaystackDraft:
        """Makes sample `index`; its question, labels and order of shots are the same at every length."""
        name, labelled = (*self._name, index), self._labelled
        dealt = seeded_order(labelled.labels, *name, "labels")
        order = self._order(1 + context_length // (LEAST_SHOT_TOKENS * labelled.labels), *name)
        text_tokens, number_tokens = self._tokens
        places = dealt[labelled.shot_labels]
        tokens = np.cumsum(text_tokens[order] + number_tokens[places[order]])
        question = int(self._asked[index])
        return HaystackDraft(
            references=[str(self.numbers[dealt[labelled.question_labels[question]]])],
            answer_prefix=CUE,
            opening=[INSTRUCTION],
            closing=labelled.questions[question],
            least_units=labelled.labels,
            most_units=len(order),
            haystack=Shots(
                pool=labelled.shots,
                order=order,
                cumulative_tokens=np.concatenate(([0], tokens)),
                numbers=self.numbers[places],
            ),
            inserts=[],
            counter=self._counter,
        )

    def _order(self, rounds: int, *name: object) -> NDArray[np.int64]:
        """Returns which text comes when; a label whose texts run out begins with them again."""
        columns = [
            own[seeded_order(len(own), *name, "texts", label)][np.arange(rounds) % len(own)]
            for label, own in enumerate(self._of_label)
        ]
        ranks = seeded_ranks(np.arange(rounds * len(columns)), *name, "rounds").reshape(rounds, -1)
        return np.take_along_axis(np.stack(columns, axis=1), ranks.argsort(axis=1), axis=1).ravel()


Path = tuple[int, ...]


class LabelTree:
    """The tokens of all labels behind a prompt, and where they part.

    Args:
        paths: tokens of each label; none is the beginning of another.
    """

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
        found = {
            (*node, token): float(value)
            for (node, following), result in zip(self.next_of.items(), results, strict=True)
            for token, value in zip(following, result.logprobs, strict=True)
        }
        return np.array([sum(found[path[: i + 1]] for i in range(len(path))) for path in self.paths])


def common(lists: Sequence[Sequence[int]]) -> int:
    """Returns how many first items lists share."""
    alike = (len(set(items)) == 1 for items in zip(*lists, strict=False))
    return sum(itertools.takewhile(bool, alike))


class ManyShotTask(RulerTask):
    """Many-shot classification.

    Metrics at each length: `exact_match`, whether the right label is the most probable of all; `answer_nll`, its
    negative log-likelihood among them in nats; `chance`, the share of one label.
    """

    fixed: ClassVar = {"output_type": "loglikelihood_rolling"}
    options: ManyShotOptions

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._filters = [build_filter_ensemble("none", [("take_first", None)])]

    @property
    def labelled(self) -> LabelledTexts:
        """The texts; they are read once."""
        labelled = task_labelled(self.options)
        assert labelled is not None
        return labelled

    def make_generator(self, name: str) -> Generator:
        """Returns the generator of shots and question."""
        self.maker = ManyShotGenerator(self.options, self.labelled, task=name, counter=self.counter)
        return self.maker

    def available_samples(self) -> int:
        """Returns the number of questions."""
        return len(self.labelled.questions)

    def record(self) -> TaskRecord:
        """Returns the facts of this run."""
        return TaskRecord.from_json({**super().record().to_json(), "family": "recall"})

    def make_requests(
        self, documents: Sequence[tuple[int, dict[str, Any]]], fits: Mapping[int, Mapping[int, Fit]], frame: Frame
    ) -> list[Instance]:
        """Makes a request for each place where labels part, at each length; with most tokenizers that is one."""
        end = f"a{frame.middle}{CUE}{frame.tail}"
        alone, *behind = self.counter.encode(
            [end, *(f"{end} {number}" for number in self.maker.numbers)], special_tokens=False
        )
        shared, trunk = common([alone, *behind]), behind[0][: common(behind)]
        self.tree = LabelTree([tuple(tokens[len(trunk) :]) for tokens in behind])
        sequences = []
        for _, doc in documents:
            for length, fit in fits.items():
                prompt = prompt_text(self.maker.draft(doc["index"], length), fit[doc["index"]].units, frame)
                (tokens,) = self.counter.encode([prompt], special_tokens=True)
                tokens = tokens[: len(tokens) - len(alone) + shared] + trunk[shared:]
                sequences += self.tree.sequences(np.array(tokens, dtype=np.int64))
        return self.target_requests(documents, sequences)

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
        """Scores one sample at every length."""
        right = int(doc["references"][0]) - int(self.maker.numbers[0])
        places = len(self.tree.next_of)
        scores: dict[str, float] = {}
        for number, length in enumerate(doc["lengths"]):
            own = results[number * places : (number + 1) * places]
            for result in own:
                split_answers(result, np.array([len(result.logprobs)]), null=self.records_null)
            logprobs = self.tree.logprobs(own)
            nll = exact = math.nan
            if not np.isnan(logprobs).any():
                nll = float(np.logaddexp.reduce(logprobs) - logprobs[right])
                exact = float(logprobs.argmax() == right)
            values = (exact, nll, 1.0 / len(logprobs))
            scores |= {metric_key(metric, length): value for metric, value in zip(METRICS, values, strict=True)}
        return scores

    def means(self) -> dict[str, bool]:
        """Returns which way is better."""
        return {metric_key(metric, length): more for length in self.lengths for metric, more in METRICS.items()}
