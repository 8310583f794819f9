"""Teacher-forced needles: one forward pass scores the answer, where there is exactly one.

The prompts are those of the generated task of the same name without `_forced`, sample by sample, and filled by the
same rule, `scripts: nvidia` included. Each is scored twice: as it is, and with the needle's value replaced by another
one. What the needle is worth is the difference.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.filters import build_filter_ensemble

from sbeval.errors import UserError
from sbeval.results.records import TaskRecord, metric_key
from sbeval.scoring.requests import TargetSequence
from sbeval.tasks.draws import draw_distinct, log_count, seeded_random
from sbeval.tasks.recall.task import split_answers
from sbeval.tasks.ruler.drafts import Frame, Generator, prompt_text
from sbeval.tasks.ruler.families import NiahTask
from sbeval.tasks.ruler.fit import Fit
from sbeval.tasks.ruler.niah import NiahGenerator
from sbeval.tasks.tokens import TokenCounter

METRICS = {"answer_nll": False, "retrieval_gain": True, "exact_match": True, "chance_nll": False}
_TAIL_CHARACTERS = 400


class ForcedNiahTask(NiahTask):
    """A needle task with one answer, scored under the model instead of generated.

    Metrics at each length: `answer_nll`, the answer's negative log-likelihood in nats; `retrieval_gain`, by how much it
    rises when the needle holds another value; `exact_match`, whether every token of the answer is the model's most
    probable one; `chance_nll`, the NLL of a guess among all values. All are stricter than RULER's substring score.
    """

    fixed: ClassVar = {"output_type": "loglikelihood_rolling"}

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._filters = [build_filter_ensemble("none", [("take_first", None)])]

    def make_generator(self, name: str) -> Generator:
        """Returns the generator of the task that generates."""
        generator = super().make_generator(name.removesuffix("_forced"))
        assert isinstance(generator, NiahGenerator)
        if generator.queries * generator.values_per_key != 1:
            raise UserError(f"{name} scores one answer; leave num_needle_q and num_needle_v at 1.")
        self.value_type, self.haystack_strings = generator.value_type, generator.haystack_strings
        self.value_in_needle = generator.value_in_needle
        return generator

    def record(self) -> TaskRecord:
        """Returns the facts of this run."""
        return TaskRecord.from_json({**super().record().to_json(), "family": "recall"})

    def make_requests(
        self, documents: Sequence[tuple[int, dict[str, Any]]], fits: Mapping[int, Mapping[int, Fit]], frame: Frame
    ) -> list[Instance]:
        """Makes two requests for each length: with the needle's value, and with another one in its place."""
        sequences: list[TargetSequence] = []
        for _, doc in documents:
            (value,) = doc["references"]
            rng = seeded_random(self.config.task, self.options.seed, doc["index"], "another value")
            (other,) = draw_distinct(self.value_type, 1, rng, {value} | self.haystack_strings)
            for length, fit in fits.items():
                prompt = prompt_text(self.generator.draft(doc["index"], length), fit[doc["index"]].units, frame)
                needle = self.value_in_needle(value)
                if prompt.count(needle) != 1:
                    raise UserError(f"Expected the value {value} once in the prompt, found {prompt.count(needle)}.")
                replaced = prompt.replace(needle, self.value_in_needle(other))
                sequences += [answer_sequence(self.counter, text, f" {value}") for text in (prompt, replaced)]
        return self.target_requests(documents, sequences)

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
        """Scores one sample at every length."""
        scores: dict[str, float] = {}
        for length, shown, replaced in zip(doc["lengths"], results[0::2], results[1::2], strict=True):
            (nll,), (exact,) = split_answers(shown, np.array([len(shown.logprobs)]), null=self.records_null)
            (without,), _ = split_answers(replaced, np.array([len(replaced.logprobs)]), null=self.records_null)
            values = (float(nll), float(without - nll), float(exact), log_count(self.value_type))
            scores |= {metric_key(metric, length): value for metric, value in zip(METRICS, values, strict=True)}
        return scores

    def means(self) -> dict[str, bool]:
        """Returns which way is better."""
        lengths = self.lengths
        return {metric_key(metric, length): more for length in lengths for metric, more in METRICS.items()}


def answer_sequence(counter: TokenCounter, prompt: str, answer: str) -> TargetSequence:
    """Tokenises prompt and answer together; the answer's tokens are those that the prompt's end alone does not have."""
    (tokens,) = counter.encode([prompt + answer], special_tokens=True)
    tail = prompt[-_TAIL_CHARACTERS:]
    alone, together = counter.encode([tail, tail + answer], special_tokens=False)
    shared = next(
        (i for i, pair in enumerate(zip(alone, together, strict=False)) if pair[0] != pair[1]),
        min(len(alone), len(together)),
    )
    answer_tokens = len(together) - shared
    assert 0 < answer_tokens < len(tokens)
    ids = np.array(tokens, dtype=np.int64)
    positions = np.arange(len(ids) - answer_tokens, len(ids)) - 1
    return TargetSequence(ids[:-1], positions, ids[positions + 1])
