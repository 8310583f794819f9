"""The protocols: what each scores, and at which context."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sbeval.corpora.windows import (
    TargetBlock,
    Window,
    disjoint_windows,
    document_target_blocks,
    position_bins,
    rolling_windows,
    target_window,
)
from sbeval.errors import UserError
from sbeval.intervals import MINIMUM_CLUSTERS
from sbeval.records import ClusterSums
from sbeval.tasks.perplexity.metrics import Shown
from sbeval.tasks.perplexity.settings import DEFAULT_LENGTHS, MOST_TARGETS, Lengths, settle_lengths
from sbeval.tasks.perplexity.task import PerplexityTask


class Rolling(PerplexityTask):
    """Each document alone, cut as lm-eval's rolling log-likelihood cuts it; equal to lm-eval's task at max_length=L."""

    protocol = "rolling"
    special_tokens = True
    context = "document"

    def separator(self, tokenizer: Any) -> tuple[int, ...]:
        """Nothing is joined; EOS lies between documents only so that the other protocols' tokens can be shared."""
        return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)

    def bos_policy(self, tokenizer: Any) -> str:
        """lm-eval's own: BOS, else EOS, before every document, whatever the tokenizer adds."""
        return "hf"

    def settle(self) -> Lengths:
        """Takes any length; a default one that cuts no document differently than the one before is left out."""
        longest = int((self.corpus.stops - self.corpus.starts[:-1]).max())
        enough = next((length for length in DEFAULT_LENGTHS if length >= longest), DEFAULT_LENGTHS[-1])
        return settle_lengths(
            self.config.task, self.settings, corpus_limit=2**62, default_limit=enough, corpus_reason=""
        )

    def blocks(self) -> list[dict[str, Any]]:
        """One document is one block."""
        bounds = zip(self.corpus.starts[:-1].tolist(), self.corpus.stops.tolist(), strict=True)
        return [
            {"document": index, "start": start, "stop": stop}
            for index, (start, stop) in enumerate(bounds)
            if stop > start
        ]

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Cuts the document as lm-eval does."""
        return rolling_windows(block["start"], block["stop"], context_length)

    def lead_in(self, window: Window) -> int:
        """Returns BOS (else EOS) before a document, the token before elsewhere."""
        document = self.corpus.document_at(window.start)
        return self._start_token if window.start == int(self.corpus.starts[document]) else super().lead_in(window)

    def rows(
        self, doc: Mapping[str, Any], context_length: int, nll: Mapping[Window, np.ndarray[Any, Any]]
    ) -> list[ClusterSums]:
        """Returns the document's one row; its words and bytes are the whole page's."""
        windows = self.windows(doc, context_length)
        index = doc["document"]
        return [
            ClusterSums(
                self.corpus.names[index],
                float(sum(nll[window].sum() for window in windows)),
                sum(window.scored for window in windows),
                float(self.corpus.original_words[index]),
                float(self.corpus.original_bytes[index]),
            )
        ]


class Stream(PerplexityTask):
    """Documents joined with the separator, in disjoint windows; every length scores the same targets."""

    protocol = "stream"

    def settle(self) -> Lengths:
        """Takes lengths that divide the longest one, up to the length of the whole stream."""
        lengths = settle_lengths(
            self.config.task,
            self.settings,
            corpus_limit=self.corpus.total_tokens,
            corpus_reason="ask for shorter context_lengths or give a longer text.",
        )
        longest = lengths.scored[-1]
        odd = [length for length in lengths.scored if longest % length]
        if odd:
            raise UserError(
                f"{self.config.task}: expected context_lengths that divide the longest, {longest}, so that each scores "
                f"the same targets, found {odd}: ask for divisors of {longest}."
            )
        return lengths

    def blocks(self) -> list[dict[str, Any]]:
        """One block is one window of the longest length; what is left at the end of the stream is cut off."""
        longest = self.lengths.scored[-1]
        starts = range(0, self.corpus.total_tokens - longest + 1, longest)
        return [{"block": index, "start": start, "stop": start + longest} for index, start in enumerate(starts)]

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Cuts the block into disjoint windows."""
        return disjoint_windows(block["start"], block["stop"], context_length)


class FixedTarget(PerplexityTask):
    """The same target blocks at every length, so that a difference is the context's alone."""

    protocol = "fixed_target"
    identical_targets = True

    @property
    def context(self) -> str:
        """Inside the document, unless the stream is asked for."""
        return self.settings.context or "document"

    def targets_per_window(self) -> int:
        """Returns T: as asked for, else at most 256 and at most half the shortest length."""
        shortest = (self.settings.context_lengths or DEFAULT_LENGTHS)[0]
        targets = self.settings.targets_per_window or max(1, min(MOST_TARGETS, shortest // 2))
        if targets > shortest:
            raise UserError(
                f"{self.config.task}: expected targets_per_window of at most the shortest context length, {shortest}, "
                f"found {targets}: ask for fewer targets or longer context_lengths."
            )
        return targets

    def settle(self) -> Lengths:
        """Takes lengths that some document can fill; by default those that enough documents for an interval can."""
        targets = self.targets_per_window()
        if self.context == "stream":
            return settle_lengths(
                self.config.task,
                self.settings,
                corpus_limit=self.corpus.total_tokens,
                corpus_reason="ask for shorter context_lengths or give a longer text.",
            )
        room = np.sort(self.corpus.stops - self.corpus.starts[:-1])[::-1] - targets
        enough = int(room[MINIMUM_CLUSTERS - 1]) if len(room) >= MINIMUM_CLUSTERS else 0
        return settle_lengths(
            self.config.task,
            self.settings,
            corpus_limit=max(int(room[0]), 0),
            default_limit=enough if enough >= DEFAULT_LENGTHS[0] else None,
            corpus_reason=f"the longest document has {int(room[0]) + targets} tokens, {targets} of them targets; ask "
            'for shorter context_lengths, give longer documents, or set "context": "stream".',
        )

    def blocks(self) -> list[dict[str, Any]]:
        """One block is one run of targets; documents take turns."""
        longest, targets = self.lengths.scored[-1], self.targets_per_window()
        if self.context == "stream":
            stops = range(longest, self.corpus.total_tokens + 1, longest)
            return [{"block": index, "start": stop - targets, "stop": stop} for index, stop in enumerate(stops)]
        blocks = document_target_blocks(
            self.corpus.starts[:-1],
            self.corpus.stops,
            longest=longest,
            targets=targets,
            blocks_per_document=self.settings.blocks_per_document,
            seed=self.settings.seed,
        )
        return [{"block": index, "start": block.start, "stop": block.stop} for index, block in enumerate(blocks)]

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Returns the one window that ends with the block's targets."""
        return [target_window(TargetBlock(0, block["start"], block["stop"]), context_length)]


class Position(Stream):
    """One pass over the stream at the longest length; NLL by position in log-spaced bins."""

    protocol = "position"

    def settle(self) -> Lengths:
        """Takes the longest length alone."""
        lengths = settle_lengths(
            self.config.task,
            self.settings,
            corpus_limit=self.corpus.total_tokens,
            corpus_reason="ask for shorter context_lengths or give a longer text.",
        )
        return Lengths(scored=lengths.scored[-1:], dropped=lengths.dropped)

    def process_results(self, doc: Mapping[str, Any], results: Any) -> dict[str, Any]:
        """Adds the block's NLL by position to its rows by source document."""
        sample = super().process_results(doc, results)
        nll = -np.asarray(results[0].logprobs, np.float64)
        bins = position_bins(self.lengths.scored[0])
        return sample | {
            "position_nll": [[float(nll[first - 1 : last].sum()), last - first + 1] for first, last in bins]
        }

    def aggregation(self) -> dict[str, Any]:
        """Adds the mean NLL of every bin."""

        def by_position(samples: list[list[list[float]]]) -> Shown:
            sums = np.asarray(samples, np.float64).sum(axis=0)
            bins = position_bins(self.lengths.scored[0])
            return Shown(
                [first, last, float(nats / tokens), int(tokens)]
                for (first, last), (nats, tokens) in zip(bins, sums, strict=True)
            )

        return super().aggregation() | {"position_nll": by_position}
