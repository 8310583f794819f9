"""A window or a sequence in pieces: a model of lm-eval tells the sum over a continuation, and nothing of its tokens.

Where targets of one window count apart, as those of two documents or of two positions do, each run of them is a
request of its own, with all that stands before it as context.
"""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.scoring.requests import TargetSequence


class Piece(NamedTuple):
    """Targets [first, stop) of a sequence, which are its next tokens one after another."""

    first: int
    stop: int

    def read(self, sequence: TargetSequence) -> NDArray[np.int64]:
        """Returns what a model reads to score the piece: its context, and its targets but the last."""
        return sequence.inputs_L[: int(sequence.positions_T[self.stop - 1]) + 1]

    def context_tokens(self, sequence: TargetSequence) -> int:
        """Returns how many of the tokens read stand before the first target."""
        return int(sequence.positions_T[self.first]) + 1

    def pair(self, sequence: TargetSequence) -> tuple[list[int], list[int]]:
        """Returns context and continuation."""
        context = sequence.inputs_L[: self.context_tokens(sequence)]
        return context.tolist(), sequence.targets_T[self.first : self.stop].tolist()


def pieces(sequence: TargetSequence, cuts: Iterable[int]) -> list[Piece]:
    """Cuts a sequence's targets where they are told apart, and where one is not the token that is read next."""
    inputs, positions, targets = sequence
    follows = np.diff(positions) == 1
    follows[follows] &= inputs[positions[1:][follows]] == targets[:-1][follows]
    inner = {int(place) for place in cuts if 0 < place < len(targets)} | {*(np.flatnonzero(~follows) + 1).tolist()}
    bounds = [0, *sorted(inner), len(targets)]
    return [Piece(first, stop) for first, stop in itertools.pairwise(bounds)]
