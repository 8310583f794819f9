"""The base class of RULER's tasks: builds documents with every context length, requests, scores and the record."""

import copy
import dataclasses
import hashlib
import itertools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from lm_eval.api.filter import Filter, FilterEnsemble
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from sbeval.errors import UserError
from sbeval.results.records import TaskRecord, metric_key
from sbeval.scoring.requests import Answer
from sbeval.tasks.base import BaseTask, Numbered
from sbeval.tasks.ruler.drafts import PROMPT_MARK, Frame, Generator, rendered_frame
from sbeval.tasks.ruler.options import RulerOptions
from sbeval.tasks.ruler.sizes import PromptSize, SampleSizes, needs_at_least
from sbeval.tasks.ruler.texts import SENTENCE_RULE, load_essays
from sbeval.tasks.ruler.wording import lm_eval_version
from sbeval.tasks.tokens import TokenCounter, load_counter

log = logging.getLogger(__name__)

_AROUND = ("system_instruction", "apply_chat_template", "chat_template")
_CONTROL = re.compile(r"[\x00-\x1f]")
THINKING_CUT = "thinking_cut"
"""Metric: whether the model's thinking reached its token budget and was ended, so that the model had to answer."""
SizesByLength = Mapping[int, Mapping[int, PromptSize]]
"""Maps a context length to a mapping from sample index to the size of that sample at the context length."""


class ParsedAnswer(Filter):  # type: ignore[misc]
    """Cleans generated answers as RULER does; as it is a filter of lm-eval, samples log raw and cleaned answers."""

    def apply(self, resps: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns, for every request, its first answer in cleaned form."""
        return [Answer(parse_answer(answer), **getattr(answer, "facts", {})) for answer, *_ in resps]


class RulerTask(BaseTask):
    """A RULER task; its YAML holds its options under `metadata.ruler`.

    A document is one sample with one request for every context length, so `--limit N` means N samples at every length.
    With the option `too_long` "leave_out", a sample has no request at a length that its prompt does not fit.
    Prompts are built only when lm-eval asks for requests, since the chat template and the system text are part of the
    token budget.

    Attributes:
        options_class: the options that a user may set.
        generator_class: makes the samples.
        family: the family of tasks, such as "ruler", that records name.
        metrics: names of the metrics of each length, mapped to whether higher is better.
    """

    fixed: ClassVar = {"output_type": "generate_until"}
    options_class: ClassVar[type[RulerOptions]]
    generator_class: ClassVar[type[Generator]]
    family: ClassVar[str] = "ruler"
    metrics: ClassVar[Mapping[str, bool]] = {"score": True}
    options: RulerOptions

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        if self.OUTPUT_TYPE == "generate_until":
            self._filters = [FilterEnsemble(name="none", filters=[ParsedAnswer])]

    @classmethod
    def read_options(cls, task: str, definition: Mapping[str, Any], metadata: Mapping[str, Any]) -> RulerOptions:
        """Reads the options of a task from `metadata.ruler` in its YAML, which the user's `metadata` override.

        Raises:
            UserError: the YAML holds a key that is no option of this class, or an option has an impossible value.
        """
        settings = definition["ruler"]
        if not settings.keys() <= cls.options_class.model_fields.keys():
            expected = f"Expected metadata.ruler of {task} to hold only options of its class"
            raise UserError(f"{expected}, found {', '.join(settings)}: start from the YAML of a packaged task.")
        return cls.options_class.of_task(task, metadata, settings)

    @classmethod
    def corpus_facts(cls, options: Any) -> tuple[str | None, str | None, str | None]:
        """Loads the essays of a haystack and returns their name, hash and source; all None for other haystacks."""
        if getattr(options, "type_haystack", None) != "essay":
            return None, None, None
        essays = load_essays(options.essays)
        return "essays", essays.sha256, f"{essays.source}, {SENTENCE_RULE}"

    def download(self, dataset_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Reads the options, loads the tokenizer, and creates the documents; lm-eval's constructor calls it."""
        name = str(self.config.task)
        metadata = self.config.metadata
        self.options = self.read_options(name, metadata, metadata)
        generates = self.OUTPUT_TYPE == "generate_until"
        self.thinking_tokens = self.options.thinking_tokens if generates else None
        if not (generates or self.options.answer_prefix):
            raise UserError(f"{name} scores an answer after its prefix: set answer_prefix=false only for other tasks.")
        settled = self.options.lengths_of(
            name,
            metadata.get("pretrained"),
            thinking_tokens=self.thinking_tokens,
            leave_out=self.options.too_long == "leave_out",
        )
        self.requested_lengths, self.dropped_lengths, _ = settled
        self.counter: TokenCounter = load_counter(metadata, name)
        if self.dropped_lengths:
            log.warning(
                "%s leaves out the context lengths %s, which are longer than the model's longest input",
                name,
                list(self.dropped_lengths),
            )
        self._prepare(self._framed(lambda prefix: f"{PROMPT_MARK} {prefix}" if prefix else PROMPT_MARK))
        self.keep_documents({"index": index} for index in self.sample_indices)
        if self.options.scripts != self.scripts:
            log.warning("%s: NVIDIA's scripts do not have this task, so scripts changes nothing", name)

    @property
    def scripts(self) -> str | None:
        """The scripts whose rule fills the prompts; None for the budget's own rule, and for tasks that they lack."""
        if self.options.scripts is None or self.generator.steps(self.requested_lengths[0]) is None:
            return None
        return self.options.scripts

    def make_generator(self, name: str) -> Generator:
        """Returns the generator of this task's samples; called after `options` and `counter` are set."""
        setting: dict[str, Any] = {"counter": self.counter, "generated_tokens": self.generated_tokens}
        return self.generator_class(self.options, task=name, **setting)

    def record(self) -> TaskRecord:
        """Returns the facts about this run for the results file."""
        corpus, corpus_sha256, corpus_detail = self.corpus_facts(self.options)
        return TaskRecord(
            family=self.family,
            protocol=str(self.config.task).removeprefix("sb_").removeprefix("ruler_"),
            lengths=list(self.lengths),
            dropped_lengths=sorted({*self.requested_lengths, *self.dropped_lengths} - set(self.lengths)),
            tokenizer_sha256=self.counter.sha256,
            seed=self.options.seed,
            lm_eval_version=lm_eval_version(),
            corpus=corpus,
            corpus_sha256=corpus_sha256,
            corpus_detail=corpus_detail,
            scripts=self.scripts,
            answer_prefix=self.options.answer_prefix,
            too_long=None if self.options.too_long == "refuse" else self.options.too_long,
        )

    @property
    def generated_tokens(self) -> int:
        """Tokens of the context length that are reserved for the answer."""
        return int(self.config.generation_kwargs["max_gen_toks"])

    def doc_to_text(self, doc: Mapping[str, Any], doc_to_text: Any = None) -> str:
        """Returns a mark instead of the prompt; lm-eval renders the system text and the chat template around it."""
        return PROMPT_MARK

    def doc_to_target(self, doc: Mapping[str, Any], doc_to_target: Any = None) -> list[str]:
        """Returns the right answers of a sample."""
        return list(doc.get("references") or [])

    def build_all_requests(self, **kwargs: Any) -> None:
        """Builds the requests of this rank's samples at every context length.

        Raises:
            UserError: few-shot examples are requested, or a sample does not fit a context length.
        """
        if self.config.num_fewshot:
            raise UserError(f"{self.config.task} has its own worked examples; run it without --num_fewshot.")
        around = {name: kwargs[name] for name in _AROUND if name in kwargs}
        # lm-eval renders the system text and the chat template around a mark, which stands for every prompt
        frame = self._framed(
            lambda prefix: str(ConfigurableTask.fewshot_context(self, {"index": 0}, 0, gen_prefix=prefix, **around))
        )
        if (frame, self.generated_tokens) != self._prepared_for:
            self._prepare(frame)
        # single samples are chosen by their numbers among all samples, those that do not fit included
        all_indices = range(self.num_samples) if kwargs.get("samples") else self.sample_indices
        self.keep_documents({"index": index} for index in all_indices)
        selected = self.chosen_samples(kwargs)
        indices = [int(doc["index"]) for _, doc in selected]
        self._count_what_does_not_fit(kwargs, frame)
        sizes = {length: self.sizes.at_length(indices, length, frame) for length in self.lengths}
        rows = {index: self._row(index, sizes) for index in indices}
        documents = self.keep_samples(selected, rows, all_indices)
        self._instances = self.make_requests(documents, sizes, frame)

    def _count_what_does_not_fit(self, arguments: Mapping[str, Any], frame: Frame) -> None:
        """Records, for the chosen samples of all ranks, how many are left out or cut at each length.

        Raises:
            UserError: a rank has no sample of some length, or a sample that was chosen alone fits no length.
        """
        ranks = int(arguments.get("world_size", 1))
        chosen = [int(doc["index"]) for _, doc in self.chosen_samples({**arguments, "rank": 0, "world_size": 1})]
        by_rank = [chosen[rank::ranks] for rank in range(ranks)]
        scored = {
            length: [[index for index in indices if self.fits[length][index]] for indices in by_rank]
            for length in self.lengths
        }
        self.task_record = dataclasses.replace(self.task_record, **self.sample_facts(scored))
        if self.options.too_long == "truncate":
            sizes = {length: self.sizes.at_length(chosen, length, frame) for length in self.lengths}
            cut = {str(length): sum(size.cut_tokens > 0 for size in by.values()) for length, by in sizes.items()}
            self.task_record = dataclasses.replace(self.task_record, cut_samples=cut)
        if self.options.too_long != "leave_out":
            return
        name = self.config.task
        fitting = {length: sorted(itertools.chain(*by_rank)) for length, by_rank in scored.items()}
        left_everywhere = set(chosen).difference(*fitting.values())
        if left_everywhere:
            raise UserError(
                f"Sample {min(left_everywhere)} of {name} fits none of the lengths {_listed(self.lengths)}: choose "
                "other --samples or longer context_lengths."
            )
        for length, rank in itertools.product(self.lengths, range(ranks)):
            if fitting[length] and not scored[length][rank]:
                raise UserError(
                    f"{name}: none of the samples of rank {rank} fits {length} tokens: use fewer processes, a larger "
                    "--limit, or leave that length out."
                )
        # samples that fit no length are no documents; those among the chosen ones count
        considered = chosen if arguments.get("samples") else range(max(chosen) + 1)
        kept = {str(length): indices for length, indices in fitting.items() if indices}
        left_out = {length: len(considered) - len(indices) for length, indices in kept.items()}
        self.task_record = dataclasses.replace(
            self.task_record,
            lengths=[int(length) for length in kept],
            fitting_samples={length: len(indices) for length, indices in kept.items()},
            left_out_samples=left_out,
            samples_sha256={length: _sha256(indices) for length, indices in kept.items() if left_out[length]},
        )

    def sample_facts(self, scored: Mapping[int, Sequence[Sequence[int]]]) -> dict[str, Any]:
        """Returns fields of the task's record that depend on the chosen samples.

        `scored` maps a length to the indices of the samples that are scored there, in one list for each rank.
        """
        return {}

    def make_requests(self, documents: Numbered, sizes: SizesByLength, frame: Frame) -> list[Instance]:
        """Makes the requests of the documents: one for each context length, in ascending order."""
        requests = []
        for number, doc in documents:
            settings = self.config.generation_kwargs
            behind = ""
            if self.thinking_tokens is not None:
                behind = doc["answer_prefix"]
                settings = {**settings, "answer_prefix": behind, "thinking_tokens": self.thinking_tokens}
            for place, prompt in enumerate(self.prompts(doc["index"], sizes, frame)):
                arguments = (prompt.removesuffix(behind), copy.deepcopy(settings))
                name = (self.config.task, number, 1)
                requests.append(Instance("generate_until", doc, arguments, place, metadata=name))
        return requests

    def _framed(self, render: Callable[[str | None], str]) -> Frame:
        return rendered_frame(render, prefixed=self.options.answer_prefix, behind=self.thinking_tokens is not None)

    def prompts(self, index: int, sizes: SizesByLength, frame: Frame) -> list[str]:
        """Returns the complete prompt of a sample at every context length that it fits."""
        return [
            self.sizes.prompt(index, length, at_length[index], frame)
            for length, at_length in sizes.items()
            if index in at_length
        ]

    def _prepare(self, frame: Frame) -> None:
        """Sets the generator, the sample sizes and the context lengths that all samples fit; stores the task's record.

        Raises:
            UserError: no requested length is long enough for all samples.
        """
        name = str(self.config.task)
        requested = self.requested_lengths
        self._prepared_for = (frame, self.generated_tokens)
        self.generator: Generator = self.make_generator(name)
        self.num_samples = min(self.options.num_samples, self.generator.available() or self.options.num_samples)
        self.sizes = SampleSizes(
            name=name,
            generator=self.generator,
            facts={
                "choices": {key: getattr(self.options, key) for key in self.config.metadata["ruler"]},
                "depths": getattr(self.options, "depths", None),
                "seed": self.options.seed,
                "scripts": self.options.scripts,
                "corpus": self.corpus_facts(self.options)[1:],
                "tokenizer": self.counter.sha256,
                **({"absent": absent} if (absent := getattr(self.options, "absent", 0)) else {}),
            },
            too_long=self.options.too_long,
        )
        needed = {length: self.sizes.needed_tokens(self.num_samples, length, frame) for length in requested}
        self.fits = {
            length: np.full(self.num_samples, True) if tokens is None else tokens <= length
            for length, tokens in needed.items()
        }
        leaves_out = self.options.too_long == "leave_out"
        self.lengths = tuple(length for length, fits in self.fits.items() if (fits.any() if leaves_out else fits.all()))
        least = {
            length: int(tokens.min() if leaves_out else tokens.max())
            for length, tokens in needed.items()
            if tokens is not None and length not in self.lengths
        }
        if not self.lengths:
            raise UserError(needs_at_least(name, least[requested[-1]], requested))
        for length, tokens in least.items():
            log.warning(
                "%s leaves out the context length of %d tokens: with this tokenizer it needs at least %d",
                name,
                length,
                tokens,
            )
        fits_somewhere = np.any([self.fits[length] for length in self.lengths], axis=0)
        self.sample_indices: list[int] = np.flatnonzero(fits_somewhere).tolist()
        self.keep_record(self.record(), self.counter.tokenizer)

    def _row(self, index: int, sizes_by_length: SizesByLength) -> dict[str, Any]:
        draft = self.generator.draft(index, self.lengths[0])
        fitting = {length: at_length[index] for length, at_length in sizes_by_length.items() if index in at_length}
        sizes = fitting.values()
        return {
            "index": index,
            "lengths": list(fitting),
            "references": list(draft.references),
            "answer_prefix": draft.answer_prefix if self.options.answer_prefix else "",
            "prompt_tokens": [size.prompt_tokens for size in sizes],
            "haystack_units": [size.units for size in sizes],
            "depths_tokens": [size.depths_tokens for size in sizes],
            "depths_percent": [size.depths_percent for size in sizes],
            **({"cut_tokens": [size.cut_tokens for size in sizes]} if self.options.too_long == "truncate" else {}),
        }

    def score(self, answer: str, references: Sequence[str]) -> float:
        """Returns the score of one cleaned answer, 0 to 1."""
        return string_match_all(answer, references)

    def answer_scores(self, answer: str, doc: Mapping[str, Any]) -> dict[str, float]:
        """Returns the metrics of one cleaned answer of a sample."""
        return {"score": self.score(answer, doc["references"])}

    def run_metrics(self) -> Mapping[str, bool]:
        """Returns the metrics of each length in this run, mapped to whether higher is better."""
        return self.metrics

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
        """Returns the metrics of one sample at every context length."""
        from sbeval.scoring.non_finite import NoText  # imported late: it imports torch, which options do not need

        scores: dict[str, float] = {}
        for length, answer in zip(doc["lengths"], results, strict=True):
            is_missing = isinstance(answer, NoText)
            for metric, score in self.answer_scores("" if is_missing else answer, doc).items():
                scores[metric_key(metric, length)] = math.nan if is_missing else score
            if self.thinking_tokens is not None:
                cut = math.nan if is_missing else float(answer.facts.get(THINKING_CUT, False))
                scores[metric_key(THINKING_CUT, length)] = cut
        return scores

    def means(self) -> dict[str, bool]:
        """Returns the metric keys of all context lengths, mapped to whether higher is better."""
        metrics = dict(self.run_metrics())
        if self.thinking_tokens is not None:
            metrics[THINKING_CUT] = False
        return {
            metric_key(metric, length): higher_is_better
            for length in self.lengths
            for metric, higher_is_better in metrics.items()
        }


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths))


def _sha256(indices: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, indices)).encode()).hexdigest()


def parse_answer(answer: str) -> str:
    """Cleans a generated answer as RULER does: strips it, and replaces control characters by line breaks."""
    return _CONTROL.sub("\n", answer.strip()).strip()


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """Returns the share of references that the answer contains, 0 to 1; case does not count."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def string_match_part(answer: str, references: Sequence[str]) -> float:
    """Returns 1 if the answer contains any reference, else 0; the references are aliases of one answer."""
    return float(any(reference.lower() in answer.lower() for reference in references))


_POWERS = range(7, 21)
_STEPS = {step * n for step in (500, 512) for n in range(1, 257)} | {64 * n for n in range(2, 257)}
LENGTHS = sorted(_STEPS | {2**n for n in _POWERS} | {3 * 2 ** (n - 1) for n in _POWERS})


def averages(metric: str) -> list[dict[str, object]]:
    """Returns a group's `aggregate_metric_list`: the unweighted mean of a metric at every common context length.

    lm-eval averages only metrics that a group lists, and ignores listed metrics that no task has.
    """
    plain = {"aggregation": "mean", "weight_by_size": False}
    return [{"metric": metric_key(metric, length), **plain} for length in LENGTHS]


AVERAGES = averages("score")
FORCED_AVERAGES = averages("exact_match")
