"""The base of all tasks of this project, which make their documents and requests themselves."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import datasets
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask

from sbeval.errors import UserError
from sbeval.results.records import TaskRecord
from sbeval.scoring.requests import TARGET_LOGPROBS, TargetSequence, keep_sequences
from sbeval.tasks.metadata import TaskOptions

Numbered = Sequence[tuple[int, dict[str, Any]]]


class BaseTask(ConfigurableTask):  # type: ignore[misc]
    """A task whose YAML names its class and its options, and whose documents lm-eval neither loads nor prompts.

    lm-eval's constructor calls `download`, in which a subclass reads its options and calls `keep_documents` and
    `keep_record`. lm-eval accepts no output type but its own four, so one is named; the requests carry their own.

    Attributes:
        options_class: what a user may change with `--metadata`.
        task_record: facts of this run, set by `keep_record`; written as JSON by `dump_config`.
        reads_null: a metric without an answer is NaN here, and those of other lengths stay what they are.
        fixed: configuration that no YAML changes.
    """

    VERSION = 1
    options_class: ClassVar[type[TaskOptions]]
    task_record: TaskRecord
    reads_null: ClassVar = True
    fixed: ClassVar[Mapping[str, Any]] = {"output_type": "loglikelihood_rolling", "num_fewshot": 0}

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        given = {key: value for key, value in dict(config or {}).items() if key != "class"}
        super().__init__(config={"metadata": {}, **given, "metric_list": [], "test_split": "test", **self.fixed})

    @classmethod
    def read_options(cls, task: str, definition: Mapping[str, Any], metadata: Mapping[str, Any]) -> TaskOptions:
        """Returns the options of a task from the metadata in its YAML and, on top, the user's.

        Raises:
            UserError: an option cannot be.
        """
        known = cls.options_class.model_fields
        return cls.options_class.of_task(
            task, {key: definition[key] for key in definition if key in known} | dict(metadata)
        )

    @classmethod
    def corpus_facts(cls, options: Any) -> tuple[str | None, str | None, str | None]:
        """Loads the text that samples are made of, which is then cached, and returns its name, hash and source.

        All are None where text is generated, or where the task loads it with the tokenizer.

        Raises:
            UserError: it cannot be loaded.
        """
        return None, None, None

    def keep_documents(self, documents: Iterable[Mapping[str, Any]]) -> None:
        """Sets what lm-eval counts, limits and logs."""
        self.dataset = {"test": datasets.Dataset.from_list([dict(document) for document in documents])}

    def keep_record(self, record: TaskRecord, tokenizer: Any) -> None:
        """Keeps the facts of this run for the results file, and a tokenizer's name in place of the object."""
        metadata = self.config.metadata
        if tokenizer is not None and not isinstance(metadata.get("tokenizer", ""), str):
            metadata["tokenizer"] = str(tokenizer.name_or_path)
        self.task_record = record

    def dump_config(self) -> dict[str, Any]:
        """Returns the configuration that lm-eval writes into the results file, with the record in its metadata."""
        config: dict[str, Any] = dict(super().dump_config())
        return {**config, "metadata": {**config["metadata"], "sbeval": self.task_record.to_json()}}

    def chosen_samples(self, given: Mapping[str, Any]) -> Numbered:
        """Returns number and document of the samples that this process runs, at least one, as lm-eval selects them.

        `given` are the arguments of `build_all_requests`.

        Raises:
            UserError: there are none.
        """
        selection = {name: given[name] for name in ("rank", "limit", "world_size", "samples") if name in given}
        if not (chosen := list(self.doc_iterator(**selection))):
            raise UserError(f"{self.config.task} has no sample to run; raise --limit or num_samples.")
        return chosen

    def keep_samples(self, chosen: Numbered, samples: Mapping[int, dict[str, Any]], count: int) -> Numbered:
        """Sets all `count` documents once samples are made, by index; those of other processes stay empty.

        Returns:
            Number and sample of the chosen documents.
        """
        blank = dict.fromkeys(next(iter(samples.values())))
        self.keep_documents(samples.get(index, {**blank, "index": index}) for index in range(count))
        return [(number, samples[int(document["index"])]) for number, document in chosen]

    def target_requests(
        self, documents: Numbered, sequences: Sequence[TargetSequence], answer_tokens: Sequence[Sequence[int]] = ()
    ) -> list[Instance]:
        """Returns a request for each sequence, document by document; answers are told apart by their tokens."""
        requests = keep_sequences(sequences)
        each = len(requests) // len(documents)
        instances = [
            Instance(TARGET_LOGPROBS, document, request, place, metadata=(self.config.task, number, 1))
            for index, (number, document) in enumerate(documents)
            for place, request in enumerate(requests[index * each : (index + 1) * each])
        ]
        for instance, tokens in zip(instances, answer_tokens or [()] * len(instances), strict=True):
            instance.cuts = functools.partial(itertools.accumulate, tokens)
        return instances

    @property
    def records_null(self) -> bool:
        """Whether the user asked for NaN where the model's logits are no numbers, in the model's arguments."""
        return bool(self.config.metadata.get("non_finite") == "null")

    def means(self) -> dict[str, bool]:
        """Returns the keys of the metrics that are means over samples, and whether more is better."""
        return {}

    def aggregation(self) -> dict[str, Callable[[Sequence[Any]], Any]]:
        """Returns the mean of every metric, for which lm-eval knows the standard error."""
        return dict.fromkeys(self.means(), mean)

    def higher_is_better(self) -> dict[str, bool]:
        """Returns which way is better."""
        return self.means()

    def fewshot_docs(self) -> None:
        """There are no examples."""

    def fewshot_context(self, *args: Any, **kwargs: Any) -> str:
        """Returns nothing: no chat template or system prompt applies to text that travels as tokens."""
        return ""

    def doc_to_text(self, doc: Any, doc_to_text: Any = None) -> str:
        """Returns nothing: texts travel in requests, not in documents."""
        return ""

    def doc_to_target(self, doc: Any, doc_to_target: Any = None) -> str | list[str]:
        """Returns nothing: requests name what is scored."""
        return ""
