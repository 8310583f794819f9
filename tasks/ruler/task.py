"""The lm-eval side of RULER: documents that carry every length, requests, scores, and the record of the run."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import datasets
from lm_eval.api.filter import Filter, FilterEnsemble
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask
from sbeval.tasks.ruler.drafts import Draft
from sbeval.tasks.ruler.fit import Fitted, Frame, fit, minimum_length
from sbeval.tasks.ruler.options import DEFAULT_LENGTHS, RUN_KEYS, RunOptions, run_options, task_metadata
from sbeval.tasks.ruler.scoring import parse_answer, string_match_all
from sbeval.tasks.ruler.tokens import TokenCounter, load_counter
from sbeval.tasks.ruler.wording import lm_eval_version

from sbeval.errors import UserError
from sbeval.records import TaskRecord, metric_key

_PROMPT_MARK, _PREFIX_MARK = "\ue000prompt\ue000", "\ue000prefix\ue000"


class Generator(Protocol):
    """Makes the samples of one task."""

    def draft(self, index: int) -> Draft:
        """Makes sample `index`, which depends on task, seed and index alone."""
        ...


class ParsedAnswer(Filter):  # type: ignore[misc]
    """Cleans generated answers as RULER does, so that both forms are in the logged samples."""

    def apply(self, resps: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns the cleaned first answer of every request."""
        return [parse_answer(answers[0]) for answers in resps]


class RulerTask(ConfigurableTask):  # type: ignore[misc]
    """One RULER task; what it asks is in its YAML under `metadata.ruler`.

    A document is one sample and carries every context length, one request for each, so `--limit N` means N samples at
    every length. Prompts are built when lm-eval asks for requests, since chat template and system text are part of
    the token budget.
    """

    VERSION = 1
    OPTION_KEYS: frozenset[str] = frozenset()
    PROTOCOL = "ruler"

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        settings = {key: value for key, value in dict(config or {}).items() if key != "class"}
        settings.setdefault("metadata", {})
        settings["output_type"] = "generate_until"
        settings["metric_list"] = []
        super().__init__(config=settings)
        self._filters = [FilterEnsemble(name="none", filters=[ParsedAnswer])]

    def download(self, dataset_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Reads options and tokenizer and lists the samples; there is nothing to download."""
        name = str(self.config.task)
        self.settings = task_metadata(self.config.metadata, name, RUN_KEYS | self.OPTION_KEYS)
        self.options: RunOptions = run_options(self.settings, name, DEFAULT_LENGTHS)
        self.counter: TokenCounter = load_counter(self.settings, name)
        self.generator: Generator = self.make_generator(self.settings)
        self._check_minimum(name)
        self.config.metadata["sbeval"] = self.record().to_json()
        self.dataset = {"test": datasets.Dataset.from_list([{"index": i} for i in range(self.options.num_samples)])}

    def make_generator(self, metadata: Mapping[str, Any]) -> Generator:
        """Returns the generator of this task's samples."""
        raise NotImplementedError

    def record(self) -> TaskRecord:
        """Returns the facts of this run."""
        return TaskRecord(
            family="ruler",
            protocol=str(self.config.task).removeprefix("sb_").removeprefix("ruler_"),
            lengths=list(self.options.context_lengths),
            dropped_lengths=list(self.options.dropped_lengths),
            tokenizer_sha256=self.counter.sha256,
            seed=self.options.seed,
            lm_eval_version=lm_eval_version(),
        )

    def _check_minimum(self, name: str) -> None:
        """Refuses lengths below the task's minimum before the model is run."""
        least = minimum_length(
            {0: self.generator.draft(0)},
            frame=Frame(),
            generated_tokens=self.generated_tokens,
            counter=self.counter,
        )
        if (shortest := self.options.context_lengths[0]) < least:
            raise UserError(
                f"{name} needs at least {least} tokens of context with this tokenizer, and was asked for {shortest}; "
                "leave that length out of context_lengths."
            )

    @property
    def generated_tokens(self) -> int:
        """Tokens of the context length kept free for the answer."""
        return int(self.config.generation_kwargs["max_gen_toks"])

    def fewshot_docs(self) -> None:
        """There are none: demonstrations are part of the prompts."""
        return None

    def doc_to_text(self, doc: Mapping[str, Any], doc_to_text: Any = None) -> str:
        """Returns the mark that stands for the prompt while lm-eval renders what goes around it."""
        return _PROMPT_MARK

    def doc_to_target(self, doc: Mapping[str, Any], doc_to_target: Any = None) -> list[str]:
        """Returns the references."""
        return list(doc.get("references") or [])

    def build_all_requests(
        self,
        *,
        limit: int | None = None,
        samples: list[int] | None = None,
        rank: int = 0,
        world_size: int = 1,
        cache_requests: bool = False,
        rewrite_requests_cache: bool = False,
        system_instruction: str | None = None,
        apply_chat_template: bool = False,
        fewshot_as_multiturn: bool = False,
        chat_template: Callable[..., str] | None = None,
        tokenizer_name: str = "",
    ) -> None:
        """Builds the prompts of this process's samples at every length."""
        if self.config.num_fewshot:
            raise UserError(f"{self.config.task} has its own demonstrations; run it without --num_fewshot.")
        selected = list(self.doc_iterator(rank=rank, limit=limit, samples=samples, world_size=world_size))
        frame = self._frame(system_instruction, chat_template if apply_chat_template else None)
        indices = [int(doc["index"]) for _, doc in selected]
        drafts = {i: self.generator.draft(i) for i in indices}
        fitted = {length: self._fit(drafts, length, frame) for length in self.options.context_lengths}
        rows = {i: self._row(i, drafts[i], [fitted[length][i] for length in fitted]) for i in indices}
        blank = dict.fromkeys(next(iter(rows.values()), {}))
        self.dataset = {
            "test": datasets.Dataset.from_list(
                [rows.get(i, {**blank, "index": i}) for i in range(self.options.num_samples)]
            )
        }
        self.task_docs = self.eval_docs
        self._instances = [
            Instance(
                request_type="generate_until",
                doc=rows[index],
                arguments=(fitted[length][index].prompt, copy.deepcopy(self.config.generation_kwargs)),
                idx=position,
                metadata=(self.config.task, doc_id, 1),
            )
            for (doc_id, _), index in zip(selected, indices, strict=True)
            for position, length in enumerate(fitted)
        ]
        if not self._instances:
            raise UserError(f"{self.config.task} has no sample to run; raise --limit or num_samples.")

    def _fit(self, drafts: Mapping[int, Draft], length: int, frame: Frame) -> dict[int, Fitted]:
        return fit(
            drafts,
            context_length=length,
            generated_tokens=self.generated_tokens,
            frame=frame,
            counter=self.counter,
            task=str(self.config.task),
        )

    def _frame(self, system_instruction: str | None, chat_template: Callable[..., str] | None) -> Frame:
        """Lets lm-eval render system text and chat template around marks, and cuts the result at them."""
        text = str(
            self.fewshot_context(
                {"index": 0},
                0,
                system_instruction=system_instruction,
                apply_chat_template=chat_template is not None,
                chat_template=chat_template,
                gen_prefix=_PREFIX_MARK,
            )
        )
        if text.count(_PROMPT_MARK) != 1 or text.count(_PREFIX_MARK) != 1:
            raise UserError(
                "Expected the chat template to show the user's message and the start of the answer once each, found "
                f"{text.count(_PROMPT_MARK)} and {text.count(_PREFIX_MARK)}; run without --apply_chat_template."
            )
        head, rest = text.split(_PROMPT_MARK)
        middle, tail = rest.split(_PREFIX_MARK)
        return Frame(head=head, middle=middle, tail=tail)

    def _row(self, index: int, draft: Draft, fitted: Sequence[Fitted]) -> dict[str, Any]:
        return {
            "index": index,
            "lengths": list(self.options.context_lengths),
            "references": list(draft.references),
            "answer_prefix": draft.answer_prefix,
            "prompt_tokens": [one.prompt_tokens for one in fitted],
            "haystack_units": [one.units for one in fitted],
            "depths_tokens": [one.depths_tokens for one in fitted],
            "depths_percent": [one.depths_percent for one in fitted],
        }

    def score(self, answer: str, references: Sequence[str]) -> float:
        """Scores one parsed answer, 0 to 1."""
        return string_match_all(answer, references)

    def process_results(self, doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
        """Scores one sample at every length."""
        return {
            metric_key("score", length): self.score(answer, doc["references"])
            for length, answer in zip(doc["lengths"], results, strict=True)
        }

    def aggregation(self) -> dict[str, Callable[[Sequence[float]], float]]:
        """Returns the mean for every length, for which lm-eval knows the standard error."""
        return {metric_key("score", length): mean for length in self.options.context_lengths}

    def higher_is_better(self) -> dict[str, bool]:
        """Returns that more is better at every length."""
        return {metric_key("score", length): True for length in self.options.context_lengths}


class NiahTask(RulerTask):
    """A needle-in-a-haystack task."""

    OPTION_KEYS = frozenset()

    def make_generator(self, metadata: Mapping[str, Any]) -> Generator:
        """Returns the generator of needles and haystack."""
        from sbeval.tasks.ruler.niah import NiahGenerator, NiahOptions

        return NiahGenerator(
            NiahOptions.read(metadata, metadata["ruler"]),
            task=str(self.config.task),
            seed=self.options.seed,
            depths_percent=self.options.depths_percent,
            counter=self.counter,
        )
