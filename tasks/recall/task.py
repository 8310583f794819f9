"""The lm-eval side of recall probes: answers inside sequences, scored by the request type `target_logprobs`."""

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


class Condition(NamedTuple):
    """One condition, with a metric of its own.

    Attributes:
        context_length: tokens of a sequence.
        pairs: keys of a sequence, None where the task has no such thing.
        n_back: how many assignments ago the value asked for was given.
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
    """A sequence and its answers.

    Attributes:
        sequence: inputs and targets.
        answer_tokens: int64 [answers], tokens of each answer, in the order of the targets.
    """

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

    Attributes:
        options_class: what `--metadata` can set.
        options: what the user chose.
    """

    fixed: ClassVar = {"output_type": "loglikelihood_rolling"}
    options_class: type[SampleOptions]
    options: SampleOptions
    all_conditions: list[Condition]

    def download(self, dataset_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Reads the options and lists the samples."""
        name = str(self.config.task)
        self.options = self.options_class.of_task(name, self.config.metadata)
        self.prepare(name)
        self.keep_record(self.record(), None)
        self.keep_documents({"index": index} for index in range(self.options.num_samples))

    @abstractmethod
    def prepare(self, name: str) -> None:
        """Sets `all_conditions`; `options` is set."""

    @abstractmethod
    def asked(self, index: int, condition: Condition) -> list[Asked]:
        """Makes the sequences of sample `index` in one condition."""

    @abstractmethod
    def chance(self, condition: Condition) -> float:
        """Returns the exact match of a guess."""

    def tokenizer_sha256(self) -> str | None:
        """Returns the hash of the tokenizer, None where none is used."""
        return None

    def lengths(self) -> list[int]:
        """Returns the context lengths, ascending."""
        return sorted({condition.context_length for condition in self.all_conditions})

    def record(self) -> TaskRecord:
        """Returns the facts of this run."""
        return TaskRecord(
            family="recall",
            protocol=str(self.config.task).removeprefix("sb_"),
            lengths=self.lengths(),
            tokenizer_sha256=self.tokenizer_sha256(),
            seed=self.options.seed,
        )

    def build_all_requests(
        self,
        *,
        limit: int | None = None,
        samples: list[int] | None = None,
        rank: int = 0,
        world_size: int = 1,
        apply_chat_template: bool = False,
        **kwargs: Any,
    ) -> None:
        """Builds the sequences of this process's samples."""
        if self.config.num_fewshot or apply_chat_template:
            raise UserError(
                f"{self.config.task} has neither examples nor chats; run it without --num_fewshot and "
                "--apply_chat_template."
            )
        selected = self.chosen_samples(rank=rank, limit=limit, samples=samples, world_size=world_size)
        rows: dict[int, dict[str, Any]] = {}
        sequences: list[TargetSequence] = []
        for _, doc in selected:
            by_condition = [self.asked(int(doc["index"]), condition) for condition in self.all_conditions]
            rows[int(doc["index"])] = {
                "index": int(doc["index"]),
                "answer_tokens": [[one.answer_tokens.tolist() for one in condition] for condition in by_condition],
            }
            sequences += [one.sequence for condition in by_condition for one in condition]
        self.keep_samples(rows, self.options.num_samples)
        documents = [(number, rows[int(document["index"])]) for number, document in selected]
        self._instances = self.target_requests(documents, sequences)

    def process_results(self, doc: Mapping[str, Any], results: Sequence[TargetLogprobs]) -> dict[str, float]:
        """Scores one sample in every condition."""
        scores: dict[str, float] = {}
        remaining = iter(results)
        for condition, tokens in zip(self.all_conditions, doc["answer_tokens"], strict=True):
            answers = [split_answers(next(remaining), np.asarray(own), null=self.records_null) for own in tokens]
            scores |= {condition.key(metric): value for metric, value in self.score(condition, answers).items()}
        return scores

    def score(
        self, condition: Condition, answers: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]
    ) -> dict[str, float]:
        """Scores the sequences of one condition; each has the NLL and exactness of its answers."""
        nll = np.concatenate([own_nll for own_nll, _ in answers])
        exact = np.concatenate([own_exact for _, own_exact in answers])
        return {"exact_match": float(exact.mean()), "answer_nll": float(nll.mean()), "chance": self.chance(condition)}

    def metrics(self) -> dict[str, bool]:
        """Returns the metrics of a condition, and whether more is better."""
        return {"exact_match": True, "answer_nll": False, "chance": True}

    def means(self) -> dict[str, bool]:
        """Returns the metrics of all conditions."""
        return {
            condition.key(metric): more for condition in self.all_conditions for metric, more in self.metrics().items()
        }


def split_answers(
    result: TargetLogprobs, answer_tokens: NDArray[np.int64], *, null: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns, by answer, the NLL in nats, float64 [answers], and 1 where every token is the most probable one, else 0.

    With `null`, NaN in both stands for an answer with log-probabilities that are no numbers; otherwise that is a
    `UserError`.
    """
    starts = np.cumsum(answer_tokens) - answer_tokens
    nll = -np.add.reduceat(np.asarray(result.logprobs, dtype=np.float64), starts)
    if not null and not math.isfinite(float(nll.sum())):
        raise UserError("Expected finite log-probabilities of the answers, found one that is not; check the model.")
    exact = np.logical_and.reduceat(np.asarray(result.greedy), starts)
    return nll, np.where(np.isnan(nll), np.nan, exact)
