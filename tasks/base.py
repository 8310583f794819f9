"""The base class of all tasks: they create their documents and requests themselves, without lm-eval's prompting."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import datasets
from lm_eval.api import task as task_module
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask

from sbeval.errors import UserError
from sbeval.results.records import TaskRecord
from sbeval.scoring.requests import TARGET_LOGPROBS, TargetSequence, keep_sequences
from sbeval.tasks.metadata import TaskOptions
from sbeval.tasks.sources import settled_metadata

Numbered = Sequence[tuple[int, dict[str, Any]]]
"""Documents with the numbers (`doc_id`) that lm-eval gives them."""


class BaseTask(ConfigurableTask):  # type: ignore[misc]
    """A task whose YAML names its class and its options, and which builds documents and requests without lm-eval.

    lm-eval's constructor calls `download`, in which a subclass reads its options and calls `keep_documents` and
    `keep_record`. lm-eval accepts only its own four output types in a configuration, so `fixed` names one of them; each
    request carries its real type.

    Attributes:
        options_class: the options that a user may set with `--metadata`.
        task_record: facts about this run, set by `keep_record`; `dump_config` writes them as JSON.
        reads_null: whether the task accepts NaN for a request whose logits were not finite. The metrics of that length
            are then NaN; the metrics of other lengths are not affected.
        fixed: configuration that overrides the YAML.
    """

    VERSION = 1
    options_class: ClassVar[type[TaskOptions]]
    task_record: TaskRecord
    reads_null: ClassVar = True
    fixed: ClassVar[Mapping[str, Any]] = {"output_type": "loglikelihood_rolling", "num_fewshot": 0}

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        settings = {key: value for key, value in dict(config or {}).items() if key != "class"}
        name, options = str(settings.get("task")), self.options_class.model_fields.keys() - self.options_class.fixed
        metadata = settled_metadata(name, settings.get("metadata") or {}, sorted(options))
        settings |= {"metadata": metadata, "metric_list": [], "test_split": "test", **self.fixed}
        super().__init__(config=settings)

    @classmethod
    def read_options(cls, task: str, definition: Mapping[str, Any], metadata: Mapping[str, Any]) -> TaskOptions:
        """Reads the options of a task from the metadata in its YAML, which the user's `metadata` override.

        Raises:
            UserError: an option has an impossible value.
        """
        known = cls.options_class.model_fields
        return cls.options_class.of_task(
            task, {key: definition[key] for key in definition if key in known} | dict(metadata)
        )

    @classmethod
    def corpus_facts(cls, options: Any) -> tuple[str | None, str | None, str | None]:
        """Loads the text from which the task makes its samples into the cache; returns its name, hash and source.

        All three are None if the task generates its text, or if it needs the tokenizer to load its text.

        Raises:
            UserError: the text cannot be loaded.
        """
        return None, None, None

    def build_all_requests(self, **arguments: Any) -> None:
        """Builds the requests as lm-eval does, without its progress bar: contexts are empty, so it ends at once."""
        shown = task_module.tqdm
        task_module.tqdm = functools.partial(shown, disable=True)
        try:
            super().build_all_requests(**arguments)
        finally:
            task_module.tqdm = shown

    def keep_documents(self, documents: Iterable[Mapping[str, Any]]) -> None:
        """Sets the task's documents, which lm-eval counts, selects with `--limit`, and logs."""
        self.dataset = {"test": datasets.Dataset.from_list([dict(document) for document in documents])}

    def keep_record(self, record: TaskRecord, tokenizer: Any) -> None:
        """Stores the facts about this run for the results file.

        A tokenizer object in the metadata is replaced by its name, since the metadata are written as JSON.
        """
        metadata = self.config.metadata
        if tokenizer is not None and not isinstance(metadata.get("tokenizer", ""), str):
            metadata["tokenizer"] = str(tokenizer.name_or_path)
        self.task_record = record

    def dump_config(self) -> dict[str, Any]:
        """Returns the configuration that lm-eval writes into the results file, with the record in its metadata."""
        config: dict[str, Any] = dict(super().dump_config())
        if not hasattr(self, "task_record"):  # a task that has planned no documents yet
            return config
        return {**config, "metadata": {**config["metadata"], "sbeval": self.task_record.to_json()}}

    def chosen_samples(self, arguments: Mapping[str, Any]) -> Numbered:
        """Returns the number and document of each sample that lm-eval selects for this rank, at least one.

        `arguments` are the keyword arguments with which lm-eval called `build_all_requests`.

        Raises:
            UserError: this rank has no sample.
        """
        selection = {name: arguments[name] for name in ("rank", "limit", "world_size", "samples") if name in arguments}
        chosen = list(self.doc_iterator(**selection))
        if not chosen:
            raise UserError(f"{self.config.task} has no sample to run; raise --limit or num_samples.")
        return chosen

    def keep_samples(self, chosen: Numbered, samples: Mapping[int, dict[str, Any]], indices: Iterable[int]) -> Numbered:
        """Replaces the task's documents by finished samples; documents of other ranks keep only empty fields.

        Args:
            chosen: number and document of each sample of this rank.
            samples: the finished samples of this rank, by index.
            indices: indices of the samples of all documents, in order.

        Returns:
            The number and the finished sample of each chosen document.
        """
        blank = dict.fromkeys(next(iter(samples.values())))
        self.keep_documents(samples.get(index, {**blank, "index": index}) for index in indices)
        return [(number, samples[int(document["index"])]) for number, document in chosen]

    def target_requests(
        self,
        documents: Numbered,
        sequences: Sequence[TargetSequence],
        answer_tokens: Sequence[Sequence[int]] = (),
        counts: Sequence[int] | None = None,
    ) -> list[Instance]:
        """Returns one request for each sequence of tokens with targets.

        Args:
            documents: number and document of each sample.
            sequences: those of the first document, then those of the second, and so on.
            answer_tokens: for each sequence, the token counts of its answers. A model that reports only sums of
                log-probabilities needs them to score the answers of a sequence separately.
            counts: number of sequences of each document; None if all have equally many.
        """
        requests = iter(keep_sequences(sequences))
        per_document = [len(sequences) // len(documents)] * len(documents) if counts is None else counts
        instances = [
            Instance(TARGET_LOGPROBS, document, request, place, metadata=(self.config.task, number, 1))
            for (number, document), count in zip(documents, per_document, strict=True)
            for place, request in enumerate(itertools.islice(requests, count))
        ]
        for instance, tokens in zip(instances, answer_tokens or [()] * len(instances), strict=True):
            instance.cuts = functools.partial(itertools.accumulate, tokens)
        return instances

    @property
    def records_null(self) -> bool:
        """Whether the model's arguments hold `non_finite=null`: non-finite logits then give NaN instead of an error."""
        return bool(self.config.metadata.get("non_finite") == "null")

    def means(self) -> dict[str, bool]:
        """Returns the keys of the metrics that are means over samples, each mapped to whether higher is better."""
        return {}

    def aggregation(self) -> dict[str, Callable[[Sequence[Any]], Any]]:
        """Returns lm-eval's `mean` for every metric; lm-eval computes standard errors only for its own functions."""
        return dict.fromkeys(self.means(), mean)

    def higher_is_better(self) -> dict[str, bool]:
        """Returns a mapping from each metric key to whether higher is better."""
        return self.means()

    def fewshot_docs(self) -> None:
        """Returns None: these tasks have no few-shot examples."""

    def fewshot_context(self, *args: Any, **kwargs: Any) -> str:
        """Returns an empty string: requests carry tokens, to which no chat template or system prompt applies."""
        return ""

    def doc_to_text(self, doc: Any, doc_to_text: Any = None) -> str:
        """Returns an empty string: the text is in the requests, not in the documents."""
        return ""

    def doc_to_target(self, doc: Any, doc_to_target: Any = None) -> str | list[str]:
        """Returns an empty string: the requests name the scored tokens."""
        return ""
