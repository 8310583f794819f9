"""Flip-flop language modelling: write, ignore and read a bit; a read shows the bit written last.

The simplest probe of recency, after Liu et al., *Exposing Attention Glitches with Flip-Flop Language Modeling*
(arXiv 2306.00946).
"""

from sbeval.tasks.draws import seeded_random
from sbeval.tasks.recall.options import FlipFlopOptions
from sbeval.tasks.recall.task import Condition
from sbeval.tasks.recall.text import Passage, TextRecallTask

DEFAULT_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


class FlipFlopTask(TextRecallTask):
    """Scores the bit after every read."""

    default_lengths = DEFAULT_LENGTHS
    options_class = FlipFlopOptions
    options: FlipFlopOptions

    def passages(self, index: int, condition: Condition, events: int) -> list[Passage]:
        """Writes instructions, the first of them a write."""
        rng = seeded_random(self.config.task, self.options.seed, index)
        text = [f"w {(bit := rng.randrange(2))}"]
        spans = []
        written = len(text[0])
        for _ in range(events):
            ignored, reads, drawn = rng.random() < self.options.ignore_share, rng.random() < 0.5, rng.randrange(2)
            name, shown = ("i", drawn) if ignored else ("r", bit) if reads else ("w", drawn)
            if name == "w":
                bit = shown
            text.append(f" {name} {shown}")
            written += len(text[-1])
            if name == "r":
                spans.append((written - 1, written))
        return [Passage("".join(text), spans)]

    def chance(self, condition: Condition) -> float:
        """Returns one half."""
        return 0.5
