"""Protocols over blocks of the longest context length: `stream`, `sliding` and `position`.

lm-eval counts each block as one document. By default blocks are cut from all documents joined. With the option
`context` set to "document" they are cut inside documents that are at least as long as the longest context length;
reports show these results as a separate series.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora.windows import Window, disjoint_windows, position_bins, sliding_windows
from sbeval.errors import UserError
from sbeval.results.intervals import RatioEstimate, ratio_interval
from sbeval.tasks.lengths import SettledLengths
from sbeval.tasks.perplexity.metrics import CompactList, WindowNll, cluster_sums
from sbeval.tasks.perplexity.task import PerplexityTask


class Stream(PerplexityTask):
    """Disjoint windows of L tokens, all of which are scored; every length scores the same targets."""

    protocol = "stream"

    def settle(self) -> SettledLengths:
        """Chooses lengths that divide the longest one; the text must be at least as long as the longest one.

        Raises:
            UserError: a length does not divide the longest one.
        """
        lengths = super().settle()
        longest = lengths.scored[-1]
        if odd := [length for length in lengths.scored if longest % length]:
            raise UserError(
                f"{self.config.task}: expected context_lengths that divide the longest, {longest}, so that each scores "
                f"the same targets, found {odd}: use divisors of {longest}."
            )
        return lengths

    def blocks(self) -> list[dict[str, Any]]:
        """Returns one block for each window of the longest length.

        Blocks are cut from the joined text or from each document; a rest that is shorter than a block is not scored.
        Blocks of different documents alternate, so that `--limit` selects as many documents as possible.
        """
        longest = self.lengths.scored[-1]
        if self.context == "stream":
            regions = [(0, self.corpus.total_tokens)]
        else:
            regions = list(zip(self.corpus.starts[:-1].tolist(), self.corpus.stops.tolist(), strict=True))
        turns = sorted((turn, first) for first, stop in regions for turn in range((stop - first) // longest))
        starts = enumerate((first, first + turn * longest) for turn, first in turns)
        return [{"block": i, "region": first, "start": start, "stop": start + longest} for i, (first, start) in starts]

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Cuts a block into disjoint windows."""
        return disjoint_windows(block["start"], block["stop"], context_length)


class Sliding(Stream):
    """Overlapping windows of L inputs that advance by a stride; each window scores only its new targets."""

    protocol = "sliding"

    def strides(self) -> dict[int, int]:
        """Returns the stride in tokens by context length: the option `stride`, or half the length."""
        return {length: self.options.stride or max(1, length // 2) for length in self.lengths.scored}

    def settle(self) -> SettledLengths:
        """Chooses lengths as `stream` does, and checks that the strides divide the longest one and skip no token.

        Raises:
            UserError: a stride does not divide the longest length, or skips tokens.
        """
        self.lengths = lengths = super().settle()
        for length, stride in self.strides().items():
            if stride > length or lengths.scored[-1] % stride:
                raise UserError(
                    f"{self.config.task}: expected a stride of at most the context length {length} that divides the "
                    f"longest, {lengths.scored[-1]}, found {stride}: set another stride."
                )
        return lengths

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Returns the sliding windows over a block's targets; a window may begin in the block before."""
        stride = self.strides()[context_length]
        return sliding_windows(block["start"], block["stop"], context_length, stride=stride, region=block["region"])


# the sums over one bin in one source document: name of the document (the cluster), NLL in nats, number of tokens
BinRow = tuple[str, float, int]


class Position(Stream):
    """Scores the blocks of `stream` at the longest length only, and reports NLL by position in log-spaced bins."""

    protocol = "position"
    _estimates: Sequence[RatioEstimate] = ()

    def settle(self) -> SettledLengths:
        """Chooses only the longest length."""
        lengths = self.settle_full_windows(targets=0)
        return lengths._replace(scored=lengths.scored[-1:])

    def cuts(self, block: Mapping[str, Any], window: Window) -> list[int]:
        """Returns the indices of targets at which a document or a position bin begins."""
        return [*super().cuts(block, window), *(first - 1 for first, _ in position_bins(window.scored))]

    def logged(self, doc: Mapping[str, Any], nll: WindowNll) -> dict[str, Any]:
        """Returns the values that a sample logs; `position_nll` holds the sums of every bin by source document."""
        (window,) = self.windows(doc, self.lengths.scored[0])
        return super().logged(doc, nll) | {"position_nll": self._bin_rows(window, nll[window])}

    def aggregation(self) -> dict[str, Any]:
        """Returns lm-eval's aggregation functions, among them those of the NLL by position.

        For every position bin they compute the mean NLL, its confidence interval and its number of clusters.
        """

        def means(samples: list[list[list[BinRow]]]) -> CompactList:
            sums = [cluster_sums(rows, 2) for rows in zip(*samples, strict=True)]
            self._estimates = [ratio_interval(nats, tokens, seed=self.options.seed) for nats, tokens in sums]
            bins = position_bins(self.lengths.scored[0])
            values = zip(bins, self._estimates, [int(tokens.sum()) for _, tokens in sums], strict=True)
            return CompactList([*ends, ratio.estimate, count] for ends, ratio, count in values)

        def intervals(samples: list[Any]) -> CompactList:
            return CompactList(None if ratio.low is None else [ratio.low, ratio.high] for ratio in self._estimates)

        def clusters(samples: list[Any]) -> CompactList:
            return CompactList(ratio.clusters for ratio in self._estimates)

        # lm-eval calls these functions in order: `means` must come first, since the others use its estimates
        further = {"position_nll": means, "position_nll_ci95": intervals, "position_clusters": clusters}
        return super().aggregation() | further

    def _bin_rows(self, window: Window, nll: NDArray[np.float64]) -> list[list[BinRow]]:
        rows = []
        for first, last in position_bins(len(nll)):
            sums = self.corpus.document_sums(window.start + first - 1, nll[first - 1 : last])
            rows.append([(self.corpus.names[row.document], row.nll_nats, row.tokens) for row in sums])
        return rows
