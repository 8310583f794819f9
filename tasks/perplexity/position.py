"""`position`: NLL at every position of one pass at the longest length, in log-spaced bins."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora.windows import Window, position_bins
from sbeval.results.intervals import RatioEstimate, ratio_interval
from sbeval.tasks.perplexity.lengths import SettledLengths
from sbeval.tasks.perplexity.metrics import Shown
from sbeval.tasks.perplexity.stream import Stream

# cluster, NLL in nats, tokens
BinRow = tuple[str, float, int]


class Position(Stream):
    """Blocks of `stream`, scored at the longest length alone and reported by position."""

    protocol = "position"
    _found: Sequence[RatioEstimate] = ()

    def settle(self) -> SettledLengths:
        """Takes the longest length alone."""
        lengths = self.settle_full_windows(targets=0)
        return SettledLengths(scored=lengths.scored[-1:], dropped=lengths.dropped, reason=lengths.reason)

    def logged(self, doc: Mapping[str, Any], nll: Mapping[Window, NDArray[np.float64]]) -> dict[str, Any]:
        """Adds the rows of every bin by source document under `position_nll`."""
        (window,) = self.windows(doc, self.lengths.scored[0])
        return super().logged(doc, nll) | {"position_nll": self._bin_rows(window, nll[window])}

    def aggregation(self) -> dict[str, Any]:
        """Adds the mean NLL of every bin, its interval and its number of clusters."""

        def means(samples: list[list[list[BinRow]]]) -> Shown:
            sums = [_cluster_sums(rows) for rows in zip(*samples, strict=True)]
            self._found = [ratio_interval(nats, tokens, seed=self.options.seed) for nats, tokens in sums]
            bins = position_bins(self.lengths.scored[0])
            return Shown(
                [first, last, ratio.estimate, int(tokens.sum())]
                for (first, last), ratio, (_, tokens) in zip(bins, self._found, sums, strict=True)
            )

        def intervals(samples: list[Any]) -> Shown:
            return Shown(None if ratio.low is None else [ratio.low, ratio.high] for ratio in self._found)

        def clusters(samples: list[Any]) -> Shown:
            return Shown(ratio.clusters for ratio in self._found)

        # lm-eval calls these in the order of their keys, the means first
        further = {"position_nll": means, "position_nll_ci95": intervals, "position_clusters": clusters}
        return super().aggregation() | further

    def _bin_rows(self, window: Window, nll: NDArray[np.float64]) -> list[list[BinRow]]:
        rows = []
        for first, last in position_bins(len(nll)):
            parts = self.corpus.document_sums(window.start + first - 1, nll[first - 1 : last])
            rows.append([(self.corpus.names[part.document], part.nll_nats, part.tokens) for part in parts])
        return rows


def _cluster_sums(
    samples: Iterable[Sequence[BinRow]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns NLL in nats and tokens of one bin by source document, [C] each, in the order of their names."""
    sums: dict[str, list[float]] = {}
    for rows in samples:
        for name, nats, tokens in rows:
            row = sums.setdefault(name, [0.0, 0.0])
            row[0] += nats
            row[1] += tokens
    columns = np.array([sums[name] for name in sorted(sums)], np.float64).reshape(len(sums), 2)
    return columns[:, 0], columns[:, 1]
