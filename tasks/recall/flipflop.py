"""Flip-flop language modelling: write, ignore and read a bit; a read shows the bit written last.

The simplest probe of recency, after Liu et al., *Exposing Attention Glitches with Flip-Flop Language Modeling*
(arXiv 2306.00946).
"""

from collections.abc import Mapping
from typing import Any

from sbeval.errors import UserError
from sbeval.tasks.draws import seeded_random
from sbeval.tasks.recall.task import Cell
from sbeval.tasks.recall.text import Passage, TextRecallTask

DEFAULT_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
IGNORE_SHARE = 0.8


class FlipFlopTask(TextRecallTask):
    """Scores the bit after every read; option `ignore_share`, the share of instructions that are to be ignored."""

    default_lengths = DEFAULT_LENGTHS
    option_keys = frozenset({"ignore_share"})

    def prepare(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Reads the options."""
        share = metadata.get("ignore_share", IGNORE_SHARE)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise UserError(f"Expected ignore_share to be a number from 0 to below 1, found {share!r}.")
        self._ignore_share = float(share)
        super().prepare(name, metadata)

    def passages(self, index: int, cell: Cell, events: int) -> list[Passage]:
        """Writes instructions, the first of them a write."""
        rng = seeded_random(self.config.task, self.seed, index)
        text = [f"w {(bit := rng.randrange(2))}"]
        spans = []
        written = len(text[0])
        for _ in range(events):
            ignored, reads, drawn = rng.random() < self._ignore_share, rng.random() < 0.5, rng.randrange(2)
            name, shown = ("i", drawn) if ignored else ("r", bit) if reads else ("w", drawn)
            if name == "w":
                bit = shown
            text.append(f" {name} {shown}")
            written += len(text[-1])
            if name == "r":
                spans.append((written - 1, written))
        return [Passage("".join(text), spans)]

    def chance(self, cell: Cell) -> float:
        """Returns one half."""
        return 0.5
