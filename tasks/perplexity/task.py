"""The base class of all perplexity protocols: one lm-eval document is one block, cut into windows at every length."""

import dataclasses
import functools
import importlib.metadata
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from lm_eval.api.instance import Instance
from numpy.typing import NDArray

from sbeval.corpora import Corpus, Layout, TokenizedCorpus, separator_ids, token_key, tokenize_corpus
from sbeval.corpora.tokenizers import added_tokens
from sbeval.corpora.windows import Window, own_document_share, targets_by_document, targets_sha256
from sbeval.errors import UserError
from sbeval.results.intervals import MINIMUM_CLUSTERS, uneven
from sbeval.results.records import IDENTICAL_TARGETS, ClusterSums, TaskRecord, metric_key
from sbeval.scoring.requests import TOKEN_LOGPROBS, TokenLogprobsRequest
from sbeval.tasks.base import BaseTask
from sbeval.tasks.lengths import (
    Limit,
    Limits,
    SettledLengths,
    interval_limits,
    model_limits,
    settle_lengths,
    text_limit,
)
from sbeval.tasks.perplexity.inputs import LeadIn, load_corpus, model_positions, trained_on
from sbeval.tasks.perplexity.metrics import PerplexityMetrics, SampleMetrics, WindowNll, checked_nll, document_rows
from sbeval.tasks.perplexity.options import PerplexityOptions
from sbeval.tasks.tokens import model_tokenizer

log = logging.getLogger(__name__)


class PerplexityTask(BaseTask):
    """A perplexity protocol over the corpus that the YAML's `dataset_name` names.

    Subclasses plan blocks, cut each block into windows for every context length, and may add metrics. lm-eval's
    constructor calls `download`, which tokenises the corpus and plans the blocks. Its evaluation then calls
    `build_all_requests` and, for each block, `process_results`.

    Attributes:
        protocol: the name of the protocol in records.
        special_tokens: whether documents are encoded with the special tokens that their tokenizer adds.
        beside: names of further contexts after which the same targets are scored, such as "without" (no context).
        default_context: the value of `context` if the user sets none.
    """

    protocol: str
    special_tokens = False
    beside: ClassVar[tuple[str, ...]] = ()
    default_context = "stream"

    options_class = PerplexityOptions
    options: PerplexityOptions
    corpus: TokenizedCorpus
    lead_in: LeadIn
    lengths: SettledLengths
    metrics: PerplexityMetrics

    @abstractmethod
    def blocks(self) -> list[dict[str, Any]]:
        """Returns the blocks, which lm-eval treats as documents; called after `lengths` is set."""

    @abstractmethod
    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Cuts a block into the windows of one context length."""

    def source(self, tokenizer: Any) -> Corpus:
        """Returns the corpus that the task scores; called after `options` is set."""
        return load_corpus(self.config.dataset_name, self.options, tokenizer)

    def settle(self) -> SettledLengths:
        """Chooses the context lengths; called after `options` and `corpus` are set."""
        return self.settle_full_windows(targets=0)

    def settle_full_windows(self, *, targets: int) -> SettledLengths:
        """Chooses lengths for which the joined text, or a document, is long enough to hold `targets` further tokens."""
        hard = [text_limit(self.corpus, self.context, targets=targets), *self.model_limits()]
        return self.settle_within(hard, None if self.context == "stream" else self.corpus.document_tokens - targets)

    def settle_within(self, hard: Limits, room: NDArray[np.int64] | None) -> SettledLengths:
        """Chooses lengths within hard limits.

        Default lengths must also be short enough for enough documents to compute a confidence interval. `room` holds
        the longest context that each document can fill, in tokens, int64 [documents]; None skips that check.
        """
        defaults, name = self.options.default_lengths, self.config.task
        by_default = [] if room is None else interval_limits(room, shortest=defaults[0])
        return settle_lengths(name, self.options.context_lengths, defaults, hard=hard, by_default=by_default)

    @property
    def context(self) -> str:
        """Source of the tokens before a target: "document" (only its document) or "stream" (the joined text)."""
        return self.options.context or self.default_context

    def model_limits(self) -> list[Limit]:
        """Returns the limits that the evaluated model sets."""
        return model_limits(self.options.max_length, model_positions(self.config.metadata))

    def targets_per_window(self) -> int | None:
        """Returns the number of scored targets in every window, None if the protocol does not fix it."""
        return None

    def room_tokens(self) -> int | None:
        """Returns how many tokens at least precede every chosen target; None if the protocol has no such minimum."""
        return None

    def check_targets(self, chosen: Sequence[Mapping[str, Any]], targets_sha256: str) -> None:
        """Compares the targets with those of a finished run that this run continues; only `fixed_target` can continue.

        Args:
            chosen: the blocks of the whole run.
            targets_sha256: the hash of the targets of all blocks.

        Raises:
            UserError: the option `continues` names a results file, but this protocol cannot continue a run.
        """
        if self.options.continues not in (None, "none"):
            raise UserError(
                f"{self.config.task} cannot continue {str(self.options.continues)!r}, because only fixed_target scores "
                "the same targets at further lengths: remove continues and run all lengths at once."
            )

    def strides(self) -> dict[int, int] | None:
        """Returns the stride in tokens by context length, None if windows do not overlap."""
        return None

    def separator(self, tokenizer: Any) -> tuple[int, ...]:
        """Returns the tokens that separate joined documents."""
        return separator_ids(tokenizer, self.options.separator)

    def settle_lead_in(self, tokenizer: Any, separator: tuple[int, ...]) -> LeadIn:
        """Returns the rule (lead-in) that says which token is fed before a window's first target."""
        return LeadIn.settle(self.config.task, tokenizer, requested=self.options.bos, separator=separator)

    def download(self, dataset_kwargs: Any = None, **kwargs: Any) -> None:
        """Tokenises the corpus and plans the blocks; lm-eval's constructor calls it."""
        name, metadata = self.config.task, self.config.metadata
        self.options = PerplexityOptions.of_task(name, metadata)
        tokenizer = model_tokenizer(metadata, name)
        try:
            source = self.source(tokenizer)
            separator = self.separator(tokenizer)
            special_tokens = self.special_tokens and metadata.get("add_bos_token") in (None, True)
            self.corpus = tokenize_corpus(source, tokenizer, Layout(separator, special_tokens))
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        self.tokenizer = tokenizer
        self.lead_in = self.settle_lead_in(tokenizer, separator)
        self.lengths = self.settle()
        if self.lengths.dropped:
            dropped = list(self.lengths.dropped)
            log.warning("%s: left out default context lengths %s, because %s", name, dropped, self.lengths.reason)
        same_targets = self.protocol in IDENTICAL_TARGETS
        self.metrics = PerplexityMetrics(self.lengths.scored, self.options.seed, same_targets, self.beside)
        if not (blocks := self.blocks()):
            raise UserError(f"{name}: the corpus {source.name!r} holds no text to score: give a longer text.")
        self.keep_documents(blocks)
        separator_text = None if self.lead_in.policy == "hf" else tokenizer.decode(list(separator))
        record = TaskRecord(
            family="perplexity",
            corpus=source.name,
            corpus_sha256=self.corpus.corpus_sha256,
            corpus_detail=source.recorded_detail(),
            protocol=self.protocol,
            context=self.context,
            separator=separator_text,
            bos=self.lead_in.policy,
            lengths=list(self.lengths.scored),
            dropped_lengths=list(self.lengths.dropped),
            targets_per_window=self.targets_per_window(),
            room_tokens=self.room_tokens(),
            strides={str(length): stride for length, stride in (self.strides() or {}).items()} or None,
            tokenizer_sha256=self.corpus.tokenizer_sha256,
            seed=self.options.seed,
            lm_eval_version=importlib.metadata.version("lm_eval"),
            added_tokens=added_tokens(tokenizer).to_json(tokenizer) if self.corpus.layout.special_tokens else None,
        )
        self.keep_record(record, tokenizer)

    def build_all_requests(self, *, limit: int | None = None, samples: list[int] | None = None, **kwargs: Any) -> None:
        """Builds the requests of this rank, and records a hash of the targets that all ranks together score.

        Raises:
            UserError: there are fewer blocks than ranks, or the targets are not those of the continued run.
        """
        chosen = [block for _, block in self.doc_iterator(rank=0, limit=limit, samples=samples, world_size=1)]
        processes = int(kwargs.get("world_size", 1))
        if len(chosen) < processes:
            expected = f"{self.config.task}: expected at least one block for each of {processes} processes"
            remedy = "use fewer processes, a larger --limit, or shorter context_lengths"
            raise UserError(f"{expected}, found {len(chosen)} at context length {self.lengths.scored[-1]}: {remedy}.")
        starts = self.corpus.starts
        windows = {n: [window for block in chosen for window in self.windows(block, n)] for n in self.lengths.scored}
        leads = self.lead_in.policy != "window"
        targets_hash = targets_sha256(windows[self.lengths.scored[-1]])
        self.check_targets(chosen, targets_hash)
        targets = [targets_by_document(of_length, starts) for of_length in windows.values()]
        scored = np.flatnonzero(np.any(targets, axis=0))
        seen = trained_on(self.config.metadata, self.corpus, scored.tolist())
        self.task_record = dataclasses.replace(
            self.task_record,
            own_document_share={
                str(n): own_document_share(of_length, starts, lead_in=leads) for n, of_length in windows.items()
            },
            targets_sha256=targets_hash,
            uneven_documents=any(map(uneven, targets)),
            seen_documents=seen,
        )
        if seen:
            message = "%s: the model was trained on at least %d of the scored documents, such as %s"
            log.warning(message, self.config.task, len(seen), seen[0])
        self._warn_of_few_documents(min(int((of_length > 0).sum()) for of_length in targets))
        # lm-eval's request cache ignores corpus, tokenizer and lengths, so it could return the requests of another run
        kwargs["cache_requests"] = False
        super().build_all_requests(limit=limit, samples=samples, **kwargs)

    def _warn_of_few_documents(self, documents: int) -> None:
        if documents < MINIMUM_CLUSTERS:
            log.warning(
                "%s: only %d document%s scored, and a confidence interval needs %d, so the results will have none; for "
                'more documents use a larger --limit, more text, or --metadata \'{"split": "paragraph"}\'',
                self.config.task,
                documents,
                " is" if documents == 1 else "s are",
                MINIMUM_CLUSTERS,
            )

    def construct_requests(self, doc: Mapping[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """Returns one request for each distinct window of the block."""
        windows = self.distinct_windows(doc)
        instances = [
            Instance(TOKEN_LOGPROBS, doc, self.request(window), index, metadata=kwargs["metadata"])
            for index, window in enumerate(windows)
        ]
        for window, instance in zip(windows, instances, strict=True):
            instance.cuts = functools.partial(self.cuts, doc, window)
            instance.protocol = self.protocol
        return instances

    def cuts(self, block: Mapping[str, Any], window: Window) -> list[int]:
        """Returns the indices of the scored targets at which a new sum of log-probabilities has to begin.

        In this class these are the targets that begin a document. A model that reports only sums of log-probabilities
        reports one for each range of targets between two of these indices.
        """
        first = window.stop - window.scored
        starts = self.corpus.starts
        inside = starts[np.searchsorted(starts, first, side="right") : np.searchsorted(starts, window.stop)]
        return [int(start) - first for start in inside]

    def request(self, window: Window) -> TokenLogprobsRequest:
        """Returns the request that scores a window."""
        return TokenLogprobsRequest(
            key=token_key(self.corpus, window.start, window.stop),
            context_length=window.stop - window.start,
            lead_in=self.lead_in.before(window, self.corpus),
            scored=window.scored,
        )

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> SampleMetrics:
        """Returns the block's NLL sums by source document, under `nll@L`; all metrics are computed from these sums."""
        nll = {
            window: checked_nll(self.config.task, window, result, null=self.records_null)
            for window, result in zip(self.distinct_windows(doc), results, strict=True)
        }
        return SampleMetrics(self.logged(doc, nll), self.aggregation())

    def logged(self, doc: Mapping[str, Any], nll: WindowNll) -> dict[str, Any]:
        """Returns the values that a block's sample logs; `nll` maps windows to the NLL in nats of their targets."""
        return {metric_key("nll", length): self.rows(doc, length, nll) for length in self.lengths.scored}

    def rows(self, doc: Mapping[str, Any], context_length: int, nll: WindowNll) -> list[ClusterSums]:
        """Returns the sums of NLL, tokens, words and bytes over a block's targets at one length, by source document."""
        return document_rows(self.corpus, self.windows(doc, context_length), nll)

    def aggregation(self) -> dict[str, Any]:
        """Returns lm-eval's aggregation function of every metric, by metric key."""
        return dict(self.metrics.aggregation())

    def higher_is_better(self) -> dict[str, bool]:
        """Returns a mapping from metric keys to whether higher is better, without metrics that have no direction."""
        return self.metrics.higher_is_better()

    def distinct_windows(self, block: Mapping[str, Any]) -> list[Window]:
        """Returns the windows of a block at all lengths, without repetitions."""
        return list(dict.fromkeys(window for length in self.lengths.scored for window in self.windows(block, length)))
