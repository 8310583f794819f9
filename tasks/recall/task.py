"""The lm-eval side of recall probes: answers inside sequences, scored by the request type `target_logprobs`.

Sequences are tokens, or text in which the tokenizer's offsets tell where the answers' tokens are.
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
"""By answer: NLL in nats, and 1 where it is exact, else 0; NaN in both where the model's logits are no numbers."""


class Condition(NamedTuple):
    """One condition, with a metric of its own; `pairs` are keys of a sequence, None where the task has no such thing.

    The value asked for was given `n_back` assignments ago.
    """

    context_length: int
    pairs: int | None = None
    n_back: int = 1

    def key(self, metric: str) -> str:
        """Returns the metric's key: `exact_match@0000768`, or `exact_match_32_pairs_2_back@0000768`."""
        pairs = "" if self.pairs is None else f"_{self.pairs}_pairs"
        back = "" if self.n_back == 1 else f"_{self.n_back}_back"
        return metric_key(f"{metric}{pairs}{back}", self.context_length)


class Asked(NamedTuple):
    """A sequence, and how many tokens each answer has, int64 [answers], in the order of the targets."""

    sequence: TargetSequence
    answer_tokens: NDArray[np.int64]

    def first(self, answers: int) -> "Asked":
        """Returns the same sequence with its first answers alone."""
        counts = self.answer_tokens[:answers]
        inputs, positions, targets = self.sequence
        tokens = int(counts.sum())
        return Asked(TargetSequence(inputs, positions[:tokens], targets[:tokens]), counts)


class RecallTask(BaseTask):
    """A probe whose answers are known tokens at known positions.

    A document is one sample and carries every condition, so `--limit N` means N samples of each. Metrics of a
    condition: `exact_match`, the share of answers whose every token is the model's most probable one, `answer_nll`, the
    mean of the answers' negative log-likelihoods in nats, and `chance`, the exact match of a guess.
    """

    fixed: ClassVar = {"output_type": "loglikelihood_rolling"}
    options_class: ClassVar[type[SampleOptions]]
    options: SampleOptions
    all_conditions: list[Condition]

    def download(self, dataset_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Reads the options and lists the samples."""
        name = str(self.config.task)
        self.options = self.options_class.of_task(name, self.config.metadata)
        self.prepare(name)
        self.keep_record(self.record(), None)
        self.keep_documents({"index": index} for index in range(self.options.num_samples))

    def prepare(self, name: str) -> None:
        """Sets `all_conditions`, and makes the first sample in each, to refuse impossible settings early."""
        lengths = self.options.lengths_of(name, self.config.metadata.get("pretrained")).scored
        self.all_conditions = [condition for length in lengths for condition in self.conditions(length)]
        for condition in self.all_conditions:
            self.asked(0, condition)

    def conditions(self, length: int) -> list[Condition]:
        """Returns the conditions at a length."""
        return [Condition(length)]

    @abstractmethod
    def asked(self, index: int, condition: Condition) -> list[Asked]:
        """Makes the sequences of sample `index` in one condition."""

    @abstractmethod
    def chance(self, condition: Condition) -> float:
        """Returns the exact match of a guess."""

    def tokenizer_sha256(self) -> str | None:
        """Returns the hash of the tokenizer, None where none is used."""
        return None

    def record(self) -> TaskRecord:
        """Returns the facts of this run."""
        return TaskRecord(
            family="recall",
            protocol=str(self.config.task).removeprefix("sb_"),
            lengths=sorted({condition.context_length for condition in self.all_conditions}),
            tokenizer_sha256=self.tokenizer_sha256(),
            seed=self.options.seed,
        )

    def build_all_requests(self, *, apply_chat_template: bool = False, **kwargs: Any) -> None:
        """Builds the sequences of this process's samples."""
        if self.config.num_fewshot or apply_chat_template:
            remedy = "run it without --num_fewshot and --apply_chat_template"
            raise UserError(f"{self.config.task} has neither examples nor chats; {remedy}.")
        selected = self.chosen_samples(kwargs)
        rows: dict[int, dict[str, Any]] = {}
        sequences: list[TargetSequence] = []
        answer_tokens: list[list[int]] = []
        for _, doc in selected:
            index = int(doc["index"])
            by_condition = [self.asked(index, condition) for condition in self.all_conditions]
            tokens = [[asked.answer_tokens.tolist() for asked in several] for several in by_condition]
            rows[index] = {"index": index, "answer_tokens": tokens}
            sequences += [asked.sequence for several in by_condition for asked in several]
            answer_tokens += itertools.chain.from_iterable(tokens)
        documents = self.keep_samples(selected, rows, self.options.num_samples)
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
        """Scores the sequences of one condition."""
        nll, exact = (np.concatenate(values) for values in zip(*answers, strict=True))
        return {"exact_match": float(exact.mean()), "answer_nll": float(nll.mean()), "chance": self.chance(condition)}

    def metrics(self) -> dict[str, bool]:
        """Returns the metrics of a condition, and whether more is better."""
        return {"exact_match": True, "answer_nll": False, "chance": True}

    def means(self) -> dict[str, bool]:
        """Returns the metrics of all conditions."""
        ways = self.metrics().items()
        return {condition.key(metric): more for condition in self.all_conditions for metric, more in ways}


class WithRetrievalGain(RecallTask):
    """Asks every question twice: behind the values it is about, and behind other values in their place.

    Beside the metrics of all recall tasks, `retrieval_gain` is by how much the answers' negative log-likelihood rises
    when their values do not stand in the text, in nats.
    """

    def score(self, condition: Condition, answers: Sequence[Scored]) -> dict[str, float]:
        """Scores one condition from its two sequences."""
        shown, replaced = answers
        return {**super().score(condition, [shown]), "retrieval_gain": float((replaced[0] - shown[0]).mean())}

    def metrics(self) -> dict[str, bool]:
        """Returns the metrics of a condition, and whether more is better."""
        return {**super().metrics(), "retrieval_gain": True}


class TokenizedRecallTask(RecallTask):
    """A probe that depends on the model's tokenizer."""

    counter: TokenCounter

    def prepare(self, name: str) -> None:
        """Reads the tokenizer, and then as all probes do."""
        self.counter = load_counter(self.config.metadata, name)
        self.use_tokenizer(name)
        super().prepare(name)

    @abstractmethod
    def use_tokenizer(self, name: str) -> None:
        """Prepares what depends on the tokenizer alone."""

    def tokenizer_sha256(self) -> str:
        """Returns the hash of the tokenizer."""
        return self.counter.sha256


class Passage(NamedTuple):
    """A text, and the first and last + 1 character of each answer, ascending."""

    text: str
    spans: list[tuple[int, int]]


class TextRecallTask(TokenizedRecallTask):
    """A probe whose sequences are the first L tokens of an endless text."""

    def use_tokenizer(self, name: str) -> None:
        """Refuses a tokenizer without character offsets."""
        if not self.counter.tokenizer.is_fast:
            raise UserError(f"{name} needs a tokenizer that tells character offsets; give a fast one.")

    @abstractmethod
    def passages(self, index: int, condition: Condition, events: int) -> list[Passage]:
        """Writes texts of `events` events with the same answers; those with fewer events are their beginnings."""

    def asked(self, index: int, condition: Condition) -> list[Asked]:
        """Tokenises enough text, cuts it to the length, and finds the answers.

        Raises:
            UserError: no answer lies within the length.
        """
        length = condition.context_length
        events = max(1, length * 2 // _CHARACTERS_PER_EVENT)
        while True:
            passages = self.passages(index, condition, events)
            asked = [asked for passage in passages if (asked := self._tokenised(passage, length)) is not None]
            if len(asked) == len(passages):
                break
            events *= 2
        answers = min(len(sequence.answer_tokens) for sequence in asked)
        if not answers:
            raise UserError(
                f"{self.config.task} asks for nothing within {length} tokens with {condition.pairs or 1} pairs; use a "
                "longer context length or fewer pairs."
            )
        return [sequence.first(answers) for sequence in asked]

    def _tokenised(self, passage: Passage, length: int) -> Asked | None:
        """Returns the first `length` tokens with the answers in them, None where the text has fewer tokens."""
        tokens, starts, stops = self.counter.encode_with_offsets(passage.text)
        if len(tokens) <= length:
            return None
        places: list[int] = []
        counts: list[int] = []
        # among a million tokens an answer is looked for only where it can be; special tokens stand at no character
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
        return Asked(sequence, np.array(counts, dtype=np.int64))


def split_answers(result: TargetLogprobs, answer_tokens: NDArray[np.int64], *, null: bool = False) -> Scored:
    """Returns the scores of a sequence's answers, float64 [answers] each.

    Raises:
        UserError: a log-probability is no number, and `null` does not let NaN stand for it.
    """
    starts = np.cumsum(answer_tokens) - answer_tokens
    nll = -np.add.reduceat(np.asarray(result.logprobs, dtype=np.float64), starts)
    if not null and not math.isfinite(float(nll.sum())):
        raise UserError("Expected finite log-probabilities of the answers, found one that is not; check the model.")
    exact = np.logical_and.reduceat(np.asarray(result.greedy), starts)
    return nll, np.where(np.isnan(nll), np.nan, exact)
