"""Protocols over blocks of the longest length: `stream`, `sliding` and `position`.

By default blocks are cut from all documents joined; with `context` "document" they are cut inside documents at least as
long as the longest length, which is a series of its own.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora.windows import Window, disjoint_windows, position_bins, sliding_windows
from sbeval.errors import UserError
from sbeval.tasks.perplexity.metrics import Shown
from sbeval.tasks.perplexity.settings import Lengths
from sbeval.tasks.perplexity.task import PerplexityTask


class Stream(PerplexityTask):
    """Disjoint windows; every length scores the same targets."""

    protocol = "stream"

    def settle(self) -> Lengths:
        """Takes lengths that divide the longest one, up to what the text can fill."""
        lengths = self.settle_full_windows(targets=0)
        longest = lengths.scored[-1]
        odd = [length for length in lengths.scored if longest % length]
        if odd:
            raise UserError(
                f"{self.config.task}: expected context_lengths that divide the longest, {longest}, so that each scores "
                f"the same targets, found {odd}: ask for divisors of {longest}."
            )
        return lengths

    def blocks(self) -> list[dict[str, Any]]:
        """One block is one window of the longest length; what is left at the end of a region is cut off.

        Regions take turns, so that a run over the first few blocks has as many clusters as it can.
        """
        longest = self.lengths.scored[-1]
        if self.context == "stream":
            regions = [(0, self.corpus.total_tokens)]
        else:
            regions = list(zip(self.corpus.starts[:-1].tolist(), self.corpus.stops.tolist(), strict=True))
        turns = [
            (turn, first, first + turn * longest)
            for first, stop in regions
            for turn in range((stop - first) // longest)
        ]
        return [
            {"block": index, "region": first, "start": start, "stop": start + longest}
            for index, (_, first, start) in enumerate(sorted(turns))
        ]

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Cuts the block into disjoint windows."""
        return disjoint_windows(block["start"], block["stop"], context_length)


class Sliding(Stream):
    """Windows of L inputs that move on by a stride and score what is new; every token is scored once."""

    protocol = "sliding"

    def strides(self) -> dict[int, int]:
        """Returns the stride at every length: the one asked for, else half the length."""
        return {length: self.settings.stride or max(1, length // 2) for length in self.lengths.scored}

    def settle(self) -> Lengths:
        """Takes lengths as `stream` does, and strides that divide the longest and skip no token."""
        self.lengths = lengths = super().settle()
        for length, stride in self.strides().items():
            if stride > length or lengths.scored[-1] % stride:
                raise UserError(
                    f"{self.config.task}: expected a stride of at most the context length {length} that divides the "
                    f"longest, {lengths.scored[-1]}, found {stride}: ask for another stride."
                )
        return lengths

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Moves over the block's targets, with left context from the block before."""
        stride = self.strides()[context_length]
        return sliding_windows(block["start"], block["stop"], context_length, stride=stride, region=block["region"])


class Position(Stream):
    """One pass at the longest length; NLL by position in log-spaced bins."""

    protocol = "position"

    def settle(self) -> Lengths:
        """Takes the longest length alone."""
        lengths = self.settle_full_windows(targets=0)
        return Lengths(scored=lengths.scored[-1:], dropped=lengths.dropped)

    def logged(self, doc: Mapping[str, Any], nll: Mapping[Window, NDArray[np.float64]]) -> dict[str, Any]:
        """Adds the block's NLL by position to its rows by source document."""
        length = self.lengths.scored[0]
        (window,) = self.windows(doc, length)
        bins = [[float(nll[window][first - 1 : last].sum()), last - first + 1] for first, last in position_bins(length)]
        return super().logged(doc, nll) | {"position_nll": bins}

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
