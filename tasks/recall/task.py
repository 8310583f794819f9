"""The base classes of recall probes, whose answers lie inside a sequence and are scored by `target_logprobs` requests.

A sequence is built from token ids or from text. In a text, the tokenizer's character offsets show which tokens belong
to an answer.
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.results.records import TaskRecord, metric_key
from sbeval.scoring.requests import TargetLogprobs, TargetSequence
from sbeval.tasks.base import BaseTask
from sbeval.tasks.metadata import SampleOptions
from sbeval.tasks.tokens import TokenCounter, load_counter

_CHARACTERS_PER_EVENT = 20

Scored = tuple[NDArray[np.float64], NDArray[np.float64]]
"""For each answer: NLL in nats, and 1 if every token is the most probable one, else 0; NaN for non-finite logits."""


class Condition(NamedTuple):
    """A combination of settings with which a probe makes sequences; each combination has its own metrics.

    Attributes:
        context_length: in tokens.
        pairs: number of keys in a sequence, None if the task has no keys.
        n_back: which earlier value of a key is the answer: 1 for its latest value, 2 for the value before that.
    """

    context_length: int
    pairs: int | None = None
    n_back: int = 1

    def key(self, metric: str) -> str:
        """Returns a metric's key, such as `exact_match@0000768` or `exact_match_32_pairs_2_back@0000768`."""
        pairs = "" if self.pairs is None else f"_{self.pairs}_pairs"
        back = "" if self.n_back == 1 else f"_{self.n_back}_back"
        return metric_key(f"{metric}{pairs}{back}", self.context_length)


class ProbeSequence(NamedTuple):
    """A sequence, and the number of tokens of each of its answers, int64 [answers], in the order of the targets."""

    sequence: TargetSequence
    answer_tokens: NDArray[np.int64]

    def first(self, answers: int) -> "ProbeSequence":
        """Returns the same sequence in which only the first `answers` answers are targets."""
        counts = self.answer_tokens[:answers]
        inputs, positions, targets = self.sequence
        tokens = int(counts.sum())
        return ProbeSequence(TargetSequence(inputs, positions[:tokens], targets[:tokens]), counts)


class RecallTask(BaseTask):
    """A probe whose answers are known tokens at known positions.

    A document is one sample and carries every condition, so `--limit N` means N samples of each condition. Every
    condition has three metrics: `exact_match` is the share of answers whose every token is the model's most probable
    one; `answer_nll` is the mean NLL of the answers in nats; `chance` is the exact match of a random guess.
    """

    fixed: ClassVar = {"output_type": "loglikelihood_rolling"}
    options_class: ClassVar[type[SampleOptions]]
    options: SampleOptions
    all_conditions: list[Condition]

    def download(self, dataset_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Reads the options and creates the documents."""
        name = str(self.config.task)
        self.options = self.options_class.of_task(name, self.config.metadata)
        self.prepare(name)
        self.keep_record(self.record(), None)
        self.keep_documents({"index": index} for index in range(self.options.num_samples))

    def prepare(self, name: str) -> None:
        """Sets `all_conditions`, and makes the first sample of each condition to refuse impossible settings early."""
        lengths = self.options.lengths_of(name, self.config.metadata.get("pretrained")).scored
        self.all_conditions = [condition for length in lengths for condition in self.conditions(length)]
        for condition in self.all_conditions:
            self.make_sequences(0, condition)

    def conditions(self, length: int) -> list[Condition]:
        """Returns the conditions at one context length."""
        return [Condition(length)]

    @abstractmethod
    def make_sequences(self, index: int, condition: Condition) -> list[ProbeSequence]:
        """Makes the sequences of sample `index` in one condition."""

    @abstractmethod
    def chance(self, condition: Condition) -> float:
        """Returns the exact match of a random guess."""

    def tokenizer_sha256(self) -> str | None:
        """Returns the hash of the tokenizer, None if the task uses no tokenizer."""
        return None

    def record(self) -> TaskRecord:
        """Returns the facts about this run for the results file."""
        return TaskRecord(
            family="recall",
            protocol=str(self.config.task).removeprefix("sb_"),
            lengths=sorted({condition.context_length for condition in self.all_conditions}),
            tokenizer_sha256=self.tokenizer_sha256(),
            seed=self.options.seed,
        )

    def build_all_requests(self, *, apply_chat_template: bool = False, **kwargs: Any) -> None:
        """Builds the requests of this rank's samples.

        Raises:
            UserError: few-shot examples or a chat template are requested, which these tasks do not have.
        """
        if self.config.num_fewshot or apply_chat_template:
            remedy = "run it without --num_fewshot and --apply_chat_template"
            raise UserError(f"{self.config.task} supports neither few-shot examples nor chat templates; {remedy}.")
        selected = self.chosen_samples(kwargs)
        rows: dict[int, dict[str, Any]] = {}
        sequences: list[TargetSequence] = []
        answer_tokens: list[list[int]] = []
        for _, doc in selected:
            index = int(doc["index"])
            by_condition = [self.make_sequences(index, condition) for condition in self.all_conditions]
            tokens = [[probe.answer_tokens.tolist() for probe in probes] for probes in by_condition]
            rows[index] = {"index": index, "answer_tokens": tokens}
            sequences += [probe.sequence for probes in by_condition for probe in probes]
            answer_tokens += itertools.chain.from_iterable(tokens)
        documents = self.keep_samples(selected, rows, range(self.options.num_samples))
        self._instances = self.target_requests(documents, sequences, answer_tokens)

    def process_results(self, doc: Mapping[str, Any], results: Sequence[TargetLogprobs]) -> dict[str, float]:
        """Scores one sample in every condition."""
        scores: dict[str, float] = {}
        remaining = iter(results)
        for condition, tokens in zip(self.all_conditions, doc["answer_tokens"], strict=True):
            answers = [split_answers(next(remaining), np.asarray(counts), null=self.records_null) for counts in tokens]
            scores |= {condition.key(metric): value for metric, value in self.score(condition, answers).items()}
        return scores

    def score(self, condition: Condition, answers: Sequence[Scored]) -> dict[str, float]:
        """Returns the metrics of one condition; `answers` holds the scores of each of its sequences."""
        nll, exact = (np.concatenate(values) for values in zip(*answers, strict=True))
        return {"exact_match": float(exact.mean()), "answer_nll": float(nll.mean()), "chance": self.chance(condition)}

    def metrics(self) -> dict[str, bool]:
        """Returns the metrics of a condition: whether higher is better, by name."""
        return {"exact_match": True, "answer_nll": False, "chance": True}

    def means(self) -> dict[str, bool]:
        """Returns the metric keys of all conditions, mapped to whether higher is better."""
        return {
            condition.key(metric): higher_is_better
            for condition in self.all_conditions
            for metric, higher_is_better in self.metrics().items()
        }


class WithRetrievalGain(RecallTask):
    """A probe that scores every answer twice: in its own text, and in a text whose earlier values are replaced.

    It adds the metric `retrieval_gain`: by how many nats the NLL of the answers is higher after the second text, which
    does not contain their values.
    """

    def score(self, condition: Condition, answers: Sequence[Scored]) -> dict[str, float]:
        """Returns the metrics of one condition; `answers` holds the scores in the original and in the other text."""
        original, replaced = answers
        gain = float((replaced[0] - original[0]).mean())
        return {**super().score(condition, [original]), "retrieval_gain": gain}

    def metrics(self) -> dict[str, bool]:
        """Returns the metrics of a condition: whether higher is better, by name."""
        return {**super().metrics(), "retrieval_gain": True}


class TokenizedRecallTask(RecallTask):
    """A probe that depends on the model's tokenizer."""

    counter: TokenCounter

    def prepare(self, name: str) -> None:
        """Loads the tokenizer, then prepares the conditions as all probes do."""
        self.counter = load_counter(self.config.metadata, name)
        self.use_tokenizer(name)
        super().prepare(name)

    @abstractmethod
    def use_tokenizer(self, name: str) -> None:
        """Checks the tokenizer, and sets attributes that depend only on it; `name` is the task's name."""

    def tokenizer_sha256(self) -> str:
        """Returns the hash of the tokenizer."""
        return self.counter.sha256


class Passage(NamedTuple):
    """A text, and the range of characters (first, last + 1) of each answer, ascending."""

    text: str
    spans: list[tuple[int, int]]


class TextRecallTask(TokenizedRecallTask):
    """A probe whose sequences are the first L tokens of an endless text.

    L is the context length. The text is written with as many events as are needed for L tokens.
    """

    def use_tokenizer(self, name: str) -> None:
        """Refuses a tokenizer without character offsets.

        Raises:
            UserError: the tokenizer is not a fast one.
        """
        if not self.counter.tokenizer.is_fast:
            raise UserError(f"{name} needs a tokenizer that gives character offsets; use a fast tokenizer.")

    @abstractmethod
    def passages(self, index: int, condition: Condition, events: int) -> list[Passage]:
        """Writes one or more texts with the same answers; each consists of `events` events, such as instructions.

        A text with fewer events is the beginning of a text with more. The first text is the original. In further texts
        other values stand in place of those that an answer repeats.
        """

    def make_sequences(self, index: int, condition: Condition) -> list[ProbeSequence]:
        """Writes and tokenises enough text, truncates it to the context length, and finds the answers.

        Raises:
            UserError: there is no answer within the context length.
        """
        length = condition.context_length
        events = max(1, length * 2 // _CHARACTERS_PER_EVENT)
        while True:
            passages = self.passages(index, condition, events)
            probes = [self._tokenised(passage, length) for passage in passages]
            long_enough = [probe for probe in probes if probe is not None]
            if len(long_enough) == len(passages):
                break
            events *= 2
        answers = min(len(probe.answer_tokens) for probe in long_enough)
        if not answers:
            raise UserError(
                f"{self.config.task} has no question within {length} tokens with {condition.pairs or 1} pairs; use a "
                "longer context length or fewer pairs."
            )
        return [probe.first(answers) for probe in long_enough]

    def _tokenised(self, passage: Passage, length: int) -> ProbeSequence | None:
        """Returns the first `length` tokens of a text and the answers that lie in them; None if the text is shorter."""
        tokens, starts, stops = self.counter.encode_with_offsets(passage.text)
        if len(tokens) <= length:
            return None
        places: list[int] = []
        counts: list[int] = []
        # A text may have a million tokens: binary search finds the few that can overlap an answer. Special tokens cover
        # no character.
        spans = np.array(passage.spans, dtype=np.int64).reshape(-1, 2)
        begins = np.where(stops > 0, starts, len(passage.text))
        lows = np.searchsorted(np.maximum.accumulate(stops), spans[:, 0], side="right")
        highs = np.searchsorted(np.minimum.accumulate(begins[::-1])[::-1], spans[:, 1])
        for (first, last), low, high in zip(passage.spans, lows, highs, strict=True):
            answer = low + np.flatnonzero((stops[low:high] > first) & (starts[low:high] < last))
            if answer[-1] > length:
                break
            places += (answer - 1).tolist()
            counts.append(len(answer))
        positions = np.array(places, dtype=np.int64)
        sequence = TargetSequence(tokens[:length], positions, tokens[positions + 1])
        return ProbeSequence(sequence, np.array(counts, dtype=np.int64))


def split_answers(result: TargetLogprobs, answer_tokens: NDArray[np.int64], *, null: bool = False) -> Scored:
    """Returns, for each answer in a sequence, its NLL in nats and whether it is exactly right, both float64 [answers].

    An answer is exactly right (1, otherwise 0) if every token is the model's most probable one.

    Args:
        result: log-probabilities of the targets.
        answer_tokens: number of tokens of each answer, int64 [answers].
        null: whether a log-probability may be NaN; both scores of that answer are then NaN.

    Raises:
        UserError: a log-probability is not finite, and `null` is false.
    """
    starts = np.cumsum(answer_tokens) - answer_tokens
    nll = -np.add.reduceat(np.asarray(result.logprobs, dtype=np.float64), starts)
    if not null and not math.isfinite(float(nll.sum())):
        raise UserError("The model gave a log-probability that is not finite for an answer; try dtype=float32.")
    exact = np.logical_and.reduceat(np.asarray(result.greedy), starts)
    return nll, np.where(np.isnan(nll), np.nan, exact)
