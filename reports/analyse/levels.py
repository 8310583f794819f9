"""Differences between neighbouring levels of graded tasks, on the same samples: which one is harder?"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from sbeval.reports.analyse.paired import PairedDifference, metric_differences, scores_by_length
from sbeval.reports.analyse.statistics import CONFIDENCE
from sbeval.reports.read.samples import MetricKey, SampleKey, SampleScores

LEVELS = ("basic", "easy", "medium", "hard")
Order = Literal["measured", "reversed", "not measured", "unknown"]
ORDERS: Mapping[Order, str] = {
    "measured": "measured",
    "reversed": "measured the other way round",
    "not measured": "not measured",
    "unknown": "unknown, since there are fewer than 20 samples",
}
"""Maps the order of two levels to its description."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LevelDifference:
    """A level's score minus that of the next harder level, at one context length.

    Attributes:
        easier: name of the level.
        harder: name of the next harder level.
        length: context length in tokens.
        difference: the difference on the samples of all levels, with an interval.
    """

    easier: str
    harder: str
    length: int
    difference: PairedDifference

    @property
    def order(self) -> Order:
        """Whether the order of both levels is measured: whether the interval of the difference leaves zero out.

        It is "reversed" if the harder level has the measurably higher score.
        """
        if math.isnan(self.difference.low):
            return "unknown"
        if self.difference.low > 0:
            return "measured"
        return "reversed" if self.difference.high < 0 else "not measured"


def level_differences(
    by_level: Mapping[str, SampleScores], metric: str, *, confidence: float = CONFIDENCE
) -> list[LevelDifference]:
    """Compares each level with the next harder one at every length that all levels have.

    Samples are paired by their index, and only those that all levels have count. The intervals of one length cover all
    true differences of neighbouring levels at once.

    Args:
        by_level: level to the scores of its samples.
        metric: name of the metric, without context length.
        confidence: probability that the intervals of one length cover all true differences.
    """
    levels = [level for level in LEVELS if level in by_level]
    by_length = {level: _by_index(by_level[level], metric) for level in levels}
    if len(levels) < 2:
        return []
    differences = []
    for length in sorted(set.intersection(*(set(scores) for scores in by_length.values()))):
        pairs = list(itertools.pairwise(levels))
        names: list[MetricKey] = [(f"{easier} {harder}", "") for easier, harder in pairs]
        sides = [
            SampleScores(scores={name: by_length[pair[side]][length] for name, pair in zip(names, pairs, strict=True)})
            for side in (0, 1)
        ]
        compared = metric_differences(sides[0], sides[1], names, confidence=confidence)
        differences += [
            LevelDifference(easier=easier, harder=harder, length=length, difference=difference)
            for (easier, harder), difference in zip(pairs, compared, strict=False)
        ]
    return differences


def _by_index(scores: SampleScores, metric: str) -> dict[int, dict[SampleKey, float]]:
    """Returns context length to (sample to its score), with samples named by their index only."""
    return {
        length: {(str(scores.indices[key]), ""): score for key, score in of_length.items() if key in scores.indices}
        for length, of_length in scores_by_length(scores, metric).items()
    }


def order_words(differences: Sequence[LevelDifference]) -> str:
    """Returns a text on the order of each pair of levels: "order of basic and easy measured, of easy and ..."."""
    return "order " + ", ".join(f"of {each.easier} and {each.harder} {ORDERS[each.order]}" for each in differences)
