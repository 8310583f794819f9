"""The part all perplexity protocols share: one lm-eval document is one block, carried at every context length."""

import importlib.metadata
import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from numpy.typing import NDArray

from sbeval.corpora import Layout, TokenizedCorpus, adds_bos, prefix_token_id, separator_ids, token_key, tokenize_corpus
from sbeval.corpora.windows import Window, own_document_targets
from sbeval.errors import UserError
from sbeval.intervals import MINIMUM_CLUSTERS
from sbeval.records import ClusterSums, TaskRecord, metric_key
from sbeval.tasks.perplexity.inputs import load_corpus, load_tokenizer
from sbeval.tasks.perplexity.metrics import PerplexityMetrics, SampleMetrics
from sbeval.tasks.perplexity.settings import DEFAULT_LENGTHS, Lengths, Settings, settle_lengths
from sbeval.token_logprobs import REQUEST_TYPE, TokenLogprobsRequest

log = logging.getLogger(__name__)


class PerplexityTask(ConfigurableTask):  # type: ignore[misc]
    """A perplexity protocol over one corpus, named by the YAML's `dataset_name`.

    Subclasses plan blocks, cut each into windows for every context length, and may add metrics.

    Attributes:
        protocol: name in results.
        special_tokens: whether documents are encoded with the special tokens their tokenizer adds.
        identical_targets: whether every length scores the same targets with only the context differing.
        default_context: where a window's left context comes from unless the user says otherwise.
    """

    protocol: str
    special_tokens = False
    identical_targets = False
    default_context = "stream"

    settings: Settings
    corpus: TokenizedCorpus
    lengths: Lengths
    bos: str
    metrics: PerplexityMetrics

    def __init__(self, config: Mapping[str, Any]) -> None:
        fixed = {"output_type": "loglikelihood_rolling", "metric_list": [], "test_split": "test", "num_fewshot": 0}
        super().__init__(config={key: value for key, value in config.items() if key != "class"} | fixed)

    @abstractmethod
    def settle(self) -> Lengths:
        """Chooses the context lengths; `settings` and `corpus` are set."""

    @abstractmethod
    def blocks(self) -> list[dict[str, Any]]:
        """Returns the documents lm-eval counts; `lengths` is set."""

    @abstractmethod
    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Cuts a block at one context length."""

    @property
    def context(self) -> str:
        """Where a window's left context may come from: "document" or "stream"."""
        return self.settings.context or self.default_context

    @property
    def needs_long_documents(self) -> bool:
        """Whether default lengths stop where too few documents are that long."""
        return self.context != "stream"

    def strides(self) -> dict[int, int] | None:
        """Returns the stride at every length where windows overlap."""
        return None

    def settle_full_windows(self, *, targets: int) -> Lengths:
        """Takes lengths that leave room for `targets` more tokens, in the stream or inside a document.

        Inside documents the default lengths are those that enough documents for an interval can fill, or any document
        where there are not as many.
        """
        if self.context == "stream":
            return settle_lengths(
                self.config.task,
                self.settings,
                corpus_limit=max(self.corpus.total_tokens - targets, 0),
                corpus_reason="ask for shorter context_lengths or give a longer text.",
            )
        room = np.sort(self.corpus.document_tokens)[::-1] - targets
        enough = int(room[MINIMUM_CLUSTERS - 1]) if len(room) >= MINIMUM_CLUSTERS else 0
        return settle_lengths(
            self.config.task,
            self.settings,
            corpus_limit=max(int(room[0]), 0),
            default_limit=enough if enough >= DEFAULT_LENGTHS[0] else None,
            corpus_reason=f"the longest document has {int(room[0]) + targets} tokens, {targets} of them targets; ask "
            'for shorter context_lengths, give longer documents, or set "context": "stream".',
        )

    def targets_per_window(self) -> int | None:
        """Scored targets of every window where the protocol fixes them."""
        return None

    def download(self, dataset_kwargs: Any = None, **kwargs: Any) -> None:
        """Prepares the tokens and plans the blocks; called by the constructor."""
        name, metadata = self.config.task, self.config.metadata
        self.settings = Settings.from_metadata(name, metadata)
        tokenizer = load_tokenizer(name, metadata)
        try:
            source = load_corpus(self.config.dataset_name, self.settings)
            separator = self.separator(tokenizer)
            self.corpus = tokenize_corpus(source, tokenizer, Layout(separator, self.special_tokens))
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        self.bos = self.bos_policy(tokenizer)
        self.start_token = separator[-1] if separator and self.bos != "hf" else prefix_token_id(tokenizer)
        self._bos_token = tokenizer.bos_token_id
        self.lengths = self.settle()
        if self.lengths.dropped:
            few = f", or fewer than {MINIMUM_CLUSTERS} documents are as long" if self.needs_long_documents else ""
            log.warning(
                "%s: left out default context lengths %s: text or model is shorter%s; context_lengths asks for them",
                name,
                list(self.lengths.dropped),
                few,
            )
        self.metrics = PerplexityMetrics(self.lengths.scored, self.settings.seed, self.identical_targets)
        blocks = self.blocks()
        if not blocks:
            raise UserError(f"{name}: expected text in corpus {source.name!r}, found none: give a longer text.")
        self.dataset = {"test": datasets.Dataset.from_list(blocks)}
        self.record = TaskRecord(
            family="perplexity",
            corpus=source.name,
            corpus_sha256=self.corpus.corpus_sha256,
            corpus_detail=source.detail,
            protocol=self.protocol,
            context=self.context,
            separator=None if self.bos == "hf" else tokenizer.decode(list(separator)),
            bos=self.bos,
            lengths=list(self.lengths.scored),
            dropped_lengths=list(self.lengths.dropped),
            targets_per_window=self.targets_per_window(),
            strides={str(length): stride for length, stride in (self.strides() or {}).items()} or None,
            tokenizer_sha256=self.corpus.tokenizer_sha256,
            seed=self.settings.seed,
            lm_eval_version=importlib.metadata.version("lm_eval"),
        )
        if not isinstance(metadata.get("tokenizer", ""), str):
            metadata["tokenizer"] = str(tokenizer.name_or_path)
        metadata["sbeval"] = self.record.to_json()

    def separator(self, tokenizer: Any) -> tuple[int, ...]:
        """Returns the tokens between documents."""
        return separator_ids(tokenizer, self.settings.separator)

    def bos_policy(self, tokenizer: Any) -> str:
        """Settles what leads a window in: the token before it ("text") or BOS ("window")."""
        policy = self.settings.bos or ("window" if adds_bos(tokenizer) else "text")
        if policy == "window" and tokenizer.bos_token_id is None:
            raise UserError(
                f'{self.config.task}: expected a tokenizer with a BOS token for bos "window", found none: use "text".'
            )
        return policy

    def build_all_requests(self, *, limit: int | None = None, samples: list[int] | None = None, **kwargs: Any) -> None:
        """Builds the requests of this process, and records what the whole run scores."""
        chosen = [block for _, block in self.doc_iterator(rank=0, limit=limit, samples=samples, world_size=1)]
        processes = int(kwargs.get("world_size", 1))
        if len(chosen) < processes:
            raise UserError(
                f"{self.config.task}: expected at least one block for each of {processes} processes, found "
                f"{len(chosen)} at context length {self.lengths.scored[-1]}: use fewer processes, a larger --limit, "
                "or shorter context_lengths."
            )
        self.config.metadata["sbeval"]["own_document_share"] = self._own_document_share(chosen)
        # lm-eval's request cache knows nothing of corpus, tokenizer or lengths
        kwargs["cache_requests"] = False
        super().build_all_requests(limit=limit, samples=samples, **kwargs)

    def construct_requests(self, doc: Mapping[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """Returns one request for each distinct window of the block."""
        return [
            Instance(
                request_type=REQUEST_TYPE,
                doc=doc,
                arguments=self.request(window),
                idx=index,
                metadata=kwargs["metadata"],
            )
            for index, window in enumerate(self._distinct_windows(doc))
        ]

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> SampleMetrics:
        """Returns the block's rows by source document under `nll@L`; the other keys are computed from them."""
        nll = {
            window: self._checked(window, result)
            for window, result in zip(self._distinct_windows(doc), results, strict=True)
        }
        return self.metrics.sample(self.logged(doc, nll))

    def logged(self, doc: Mapping[str, Any], nll: Mapping[Window, NDArray[np.float64]]) -> dict[str, Any]:
        """Returns what a block's sample holds, given the NLL of each window's scored targets."""
        return {metric_key("nll", length): self.rows(doc, length, nll) for length in self.lengths.scored}

    def rows(
        self, doc: Mapping[str, Any], context_length: int, nll: Mapping[Window, NDArray[np.float64]]
    ) -> list[ClusterSums]:
        """Adds a block's targets at one length up by source document."""
        sums: dict[int, list[float]] = {}
        for window in self.windows(doc, context_length):
            for part in self.corpus.document_sums(window.stop - window.scored, nll[window]):
                row = sums.setdefault(part.document, [0.0, 0.0, 0.0, 0.0])
                for column, value in enumerate(part[1:]):
                    row[column] += value
        return [
            ClusterSums(self.corpus.names[document], nats, int(tokens), words, size)
            for document, (nats, tokens, words, size) in sums.items()
        ]

    def aggregation(self) -> dict[str, Any]:
        """Returns lm-eval's aggregation functions by metric key."""
        return dict(self.metrics.aggregation())

    def higher_is_better(self) -> dict[str, bool]:
        """Says of the metrics that have a better direction which it is."""
        return {
            key: key.startswith("context_gain")
            for key in self.metrics.aggregation()
            if "_ci95" not in key and not key.startswith(("tokens@", "clusters@"))
        }

    def doc_to_text(self, doc: Any, doc_to_text: Any = None) -> str:
        """Returns nothing: texts travel as token keys."""
        return ""

    def doc_to_target(self, doc: Any, doc_to_target: Any = None) -> str:
        """Returns nothing: texts travel as token keys."""
        return ""

    def fewshot_docs(self) -> None:
        """There are no examples."""

    def fewshot_context(self, *args: Any, **kwargs: Any) -> str:
        """Returns nothing: a chat template or system prompt does not apply to running text."""
        return ""

    def request(self, window: Window) -> TokenLogprobsRequest:
        """Returns the request that scores a window."""
        return TokenLogprobsRequest(
            key=token_key(self.corpus, window.start, window.stop),
            context_length=window.stop - window.start,
            lead_in=self.lead_in(window),
            scored=window.scored,
        )

    def lead_in(self, window: Window) -> int:
        """Returns the token fed before a window's first target."""
        if self.bos == "window":
            return int(self._bos_token)
        if window.start == 0:
            return self.start_token
        return int(self.corpus.tokens(window.start - 1, window.start)[0])

    def _distinct_windows(self, block: Mapping[str, Any]) -> Iterator[Window]:
        windows = (window for length in self.lengths.scored for window in self.windows(block, length))
        return iter(dict.fromkeys(windows))

    def _checked(self, window: Window, result: Any) -> NDArray[np.float64]:
        logprobs = np.asarray(result.logprobs, np.float64)
        if logprobs.shape != (window.scored,):
            raise ValueError(f"expected {window.scored} log-probabilities from the model, found shape {logprobs.shape}")
        if not np.isfinite(logprobs).all():
            first = window.stop - window.scored + int(np.argmin(np.isfinite(logprobs)))
            raise UserError(
                f"{self.config.task}: expected finite log-probabilities, found {logprobs[first - window.stop]} for "
                f"token {first - window.start + 1} of a window of {window.stop - window.start}: try dtype=float32."
            )
        return -logprobs

    def _own_document_share(self, blocks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        shares = {}
        for length in self.lengths.scored:
            windows = [window for block in blocks for window in self.windows(block, length)]
            own = sum(
                own_document_targets(window, self.corpus.starts, lead_in=self.bos != "window") for window in windows
            )
            shares[str(length)] = own / sum(window.scored for window in windows)
        return shares
