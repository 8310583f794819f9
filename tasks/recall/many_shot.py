"""Many-shot classification: labelled texts fill the context, and the model predicts the label of one more text.

The labelled texts are called shots. Labels are integers that every sample assigns to the classes anew, so the model can
learn them only from the shots. All have the same number of digits, so no label is a prefix of another. They are scored
by log-likelihood: the model's answer is the label to which it gives the highest probability. The context consists of
rounds, each with one shot of every label.
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
    """The labelled texts of a prompt, which is lengthened in units of one labelled text (shot).

    `pool` holds all texts, and `numbers` the label that this sample shows for each text, int64 [texts].
    """

    numbers: NDArray[np.int64]

    def text(self, first: int, last: int) -> str:
        """Returns the shots, one on each line."""
        order = self.order[first:last]
        shots = zip(order.tolist(), self.numbers[order].tolist(), strict=True)
        return "".join([f"{self.pool[i]} {CUE} {number}\n" for i, number in shots])


class ManyShotGenerator(Generator):
    """Makes the samples of many-shot classification."""

    options: ManyShotOptions

    def __init__(self, options: ManyShotOptions, **setting: Any) -> None:
        super().__init__(options, **setting)
        self._labelled = labelled = task_labelled(options)
        self._question_order = seeded_order(len(labelled.questions), *self._name, "questions")
        self._shots_by_label = [np.flatnonzero(labelled.shot_labels == label) for label in range(labelled.labels)]
        least = 10 ** math.ceil(math.log10(labelled.labels / 9)) if labelled.labels > 9 else 1
        self.numbers = np.arange(least, least + labelled.labels)
        self.labels = [str(number) for number in self.numbers]

    def available(self) -> int:
        """Returns the number of questions."""
        return len(self._labelled.questions)

    @functools.cached_property
    def _tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Token counts of every text with the words "Label:" after it, and of every label with its line break."""
        texts = self.counter.count_pool([f"{text} {CUE}" for text in self._labelled.shots], ("1\n", " 1"))
        return texts, self.counter.count_segments([f" {number}\n" for number in self.numbers], (CUE, "A"))

    def draft(self, index: int, context_length: int) -> HaystackDraft:
        """Makes sample `index`; its question, its labels and the order of its shots are the same at every length."""
        name = (*self._name, index)
        labelled = self._labelled
        assigned = seeded_order(labelled.labels, *name, "labels")
        order = self._order(1 + context_length // (LEAST_SHOT_TOKENS * labelled.labels), *name)
        text_tokens, number_tokens = self._tokens
        shot_numbers = assigned[labelled.shot_labels]
        totals = running_totals(text_tokens[order] + number_tokens[shot_numbers[order]])
        question = int(self._question_order[index])
        return HaystackDraft(
            references=[str(self.numbers[assigned[labelled.question_labels[question]]])],
            answer_prefix=CUE,
            opening=[INSTRUCTION],
            closing=labelled.questions[question],
            least_units=labelled.labels,
            most_units=len(order),
            haystack=Shots(
                pool=labelled.shots, order=order, cumulative_tokens=totals, numbers=self.numbers[shot_numbers]
            ),
            inserts=[],
            counter=self.counter,
        )

    def _order(self, rounds: int, *name: object) -> NDArray[np.int64]:
        """Returns indices of texts in the order in which a prompt shows them, int64 [rounds * labels].

        If a label has fewer texts than there are rounds, its texts are repeated.
        """
        texts = [
            shots[seeded_order(len(shots), *name, "texts", label)] for label, shots in enumerate(self._shots_by_label)
        ]
        columns = [label_texts[np.arange(rounds) % len(label_texts)] for label_texts in texts]
        ranks = seeded_ranks(np.arange(rounds * len(columns)), *name, "rounds").reshape(rounds, -1)
        return np.take_along_axis(np.stack(columns, axis=1), ranks.argsort(axis=1), axis=1).ravel()


Path = tuple[int, ...]


class LabelTree:
    """A prefix tree of the token sequences of all labels; no label's tokens are a prefix of another label's."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.next_of: dict[Path, list[int]] = {}
        for path in paths:
            for depth, token in enumerate(path):
                following = self.next_of.setdefault(path[:depth], [])
                if token not in following:
                    following.append(token)

    def sequences(self, prompt: NDArray[np.int64]) -> list[TargetSequence]:
        """Returns one sequence for each inner node: the prompt and the node's tokens.

        Its targets are all tokens that may follow, which the model predicts from the same position.
        """
        return [
            TargetSequence(
                np.concatenate([prompt, np.array(node, dtype=np.int64)]),
                np.full(len(following), len(prompt) + len(node) - 1),
                np.array(following, dtype=np.int64),
            )
            for node, following in self.next_of.items()
        ]

    def logprobs(self, results: Sequence[TargetLogprobs]) -> NDArray[np.float64]:
        """Returns the log-probability of each label, float64 [labels]; `results` are those of `sequences`, in order."""
        by_path = {
            (*node, token): float(value)
            for (node, following), result in zip(self.next_of.items(), results, strict=True)
            for token, value in zip(following, result.logprobs, strict=True)
        }
        return np.array([sum(by_path[path[: i + 1]] for i in range(len(path))) for path in self.paths])


class LabelTask(RulerTask):
    """A question whose answer is one of a few labels.

    Metrics at each length: `exact_match`, whether the right label is the most probable one; `answer_nll`, the NLL of
    the right label in nats, normalised over all labels; `chance`, the exact match of a random guess. Some tasks have a
    second prompt at every length, without the information that the answer needs. They also have the metric
    `retrieval_gain`: the NLL of the right label after the second prompt minus its NLL after the first.

    Attributes:
        cue: the text directly before a label, such as "Label:".
    """

    fixed: ClassVar = {"output_type": "loglikelihood_rolling"}
    family = "recall"
    metrics: ClassVar = {"exact_match": True, "answer_nll": False, "chance": True}
    cue: ClassVar = CUE

    @property
    def labels(self) -> Sequence[str]:
        """All labels, without the space before them."""
        return self.generator.labels  # type: ignore[attr-defined,no-any-return]

    def make_requests(self, documents: Numbered, sizes: SizesByLength, frame: Frame) -> list[Instance]:
        """Makes one request for each length, prompt and inner node of the label tree.

        With most tokenizers the tree has only one inner node, its root, because a label is one token.
        """
        end = f"a{frame.middle}{self.cue}{frame.tail}"
        with_labels = [f"{end} {label}" for label in self.labels]
        alone, *behind = self.counter.encode([end, *with_labels], special_tokens=False)
        shared = shared_start([alone, *behind])
        trunk = behind[0][: shared_start(behind)]
        self.tree = LabelTree([tuple(tokens[len(trunk) :]) for tokens in behind])
        sequences: list[TargetSequence] = []
        counts = []
        for _, doc in documents:
            before = len(sequences)
            for prompt in self.prompts(doc["index"], sizes, frame):
                (tokens,) = self.counter.encode([prompt], special_tokens=True)
                tokens = tokens[: len(tokens) - len(alone) + shared] + trunk[shared:]
                sequences += self.tree.sequences(np.array(tokens, dtype=np.int64))
            counts.append(len(sequences) - before)
        return self.target_requests(documents, sequences, counts=counts)

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
        """Returns the metrics of one sample at every length."""
        right = self.labels.index(doc["references"][0])
        nodes = len(self.tree.next_of)
        scored = []
        for first in range(0, len(results), nodes):
            prompt_results = results[first : first + nodes]
            for result in prompt_results:  # `split_answers` is called only because it checks that values are finite
                split_answers(result, np.array([len(result.logprobs)]), null=self.records_null)
            logprobs = self.tree.logprobs(prompt_results)
            nll = exact = math.nan
            if not np.isnan(logprobs).any():
                nll = float(np.logaddexp.reduce(logprobs) - logprobs[right])
                exact = float(logprobs.argmax() == right)
            scored.append((nll, exact))
        prompts = len(scored) // len(doc["lengths"])
        scores: dict[str, float] = {}
        for number, length in enumerate(doc["lengths"]):
            (nll, exact), *control = scored[number * prompts : (number + 1) * prompts]
            gains = [control_nll - nll for control_nll, _ in control]
            values = (exact, nll, 1.0 / len(self.labels), *gains)
            scores |= {metric_key(metric, length): value for metric, value in zip(self.metrics, values, strict=True)}
        return scores


class ManyShotTask(LabelTask):
    """Many-shot classification: the label of a text, given labelled examples."""

    options_class = ManyShotOptions
    generator_class = ManyShotGenerator

    @classmethod
    def corpus_facts(cls, options: Any) -> tuple[str | None, str | None, str | None]:
        """Loads the labelled texts, and returns their name, hash and source."""
        labelled = task_labelled(options)
        return options.examples, labelled.sha256, labelled.source
