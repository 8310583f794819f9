"""Needles that are not there: which samples have none, and the scores of values that were found or invented.

With the option `absent`, a share of the samples ask for a key that is not in the text. Everything else in such a sample
is as in the others: the haystack, and needles with other keys. Every prompt says what to answer then (`NONE`).
"""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from sbeval.results.records import FOUND, INVENTED, MARGIN_ABSENT, MARGIN_THERE, OF_ABSENT, OF_PRESENT, SAID_ABSENT
from sbeval.tasks.draws import NeedleType, seeded_random

NONE = "none"
GENERATED = {FOUND: True, SAID_ABSENT: True, INVENTED: False}
"""Metrics of generated answers, mapped to whether higher is better."""
FORCED = {**GENERATED, MARGIN_THERE: False, MARGIN_ABSENT: True}
"""Metrics of forced choices, mapped to whether higher is better."""
MOST_DISTRACTORS = 3
"""Largest number of values from a haystack of needles among which a model chooses, beside those of the needles."""
_SAYS_NONE = re.compile(rf"\b{NONE}\b", re.IGNORECASE)
_VALUES = {
    "numbers": re.compile(r"\d{7}"),
    "words": re.compile(r"[a-z]+-[a-z]+", re.IGNORECASE),
    "uuids": re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE),
}


def is_absent(share: float, index: int, *name: object) -> bool:
    """Whether sample `index` asks for a key that is not there.

    Of every 1 / `share` consecutive samples one is drawn, so the first N samples hold the share, up to one sample. If
    more than half of the samples are absent, those that are not are drawn.

    Args:
        share: share of absent samples, 0 to below 1.
        index: index of the sample.
        name: the seed of the draws.
    """
    exact = Fraction(str(share))
    if exact == 0:
        return False
    rarer = min(exact, 1 - exact)
    number = math.floor(rarer * (index + 1))  # of the stretch of samples in which the index is, or the next one
    if math.ceil(number / rarer) > index:
        number -= 1
    first, stop = (math.ceil(count / rarer) for count in (number, number + 1))
    is_drawn = index == seeded_random(*name, "absent", number).randrange(first, stop)
    return is_drawn == (rarer == exact)


def says_none(answer: str) -> bool:
    """Whether an answer contains the word `NONE`."""
    return _SAYS_NONE.search(answer) is not None


def contains_value(kind: NeedleType, answer: str) -> bool:
    """Whether an answer contains a text that could be a value of this kind, whether or not it is in the prompt."""
    return _VALUES[kind].search(answer) is not None


class Choice(NamedTuple):
    """The log-probabilities of the answers among which a model chooses, in nats.

    Attributes:
        none: of `NONE`.
        values: of the values in the text, the right one first if its key is there.
    """

    none: float
    values: Sequence[float]

    def scores(self, *, absent: bool) -> dict[str, float]:
        """Returns the metrics of one sample; `absent` says whether its key is not there."""
        margin = self.none - max(self.values)
        if math.isnan(margin) or any(map(math.isnan, self.values)):
            return dict.fromkeys(OF_ABSENT if absent else OF_PRESENT, math.nan)
        if absent:
            return {SAID_ABSENT: float(margin > 0), INVENTED: float(margin <= 0), MARGIN_ABSENT: margin}
        found = int(np.argmax([self.none, *self.values])) == 1
        return {FOUND: float(found), MARGIN_THERE: margin}


def generated_scores(answer: str, score: float, *, absent: bool, holds_value: bool) -> dict[str, float]:
    """Returns the metrics of one generated answer.

    Args:
        answer: the cleaned answer.
        score: the score of the answer against the right values.
        absent: whether the sample's key is not there.
        holds_value: whether the answer contains a text that could be a value.
    """
    if not absent:
        return {FOUND: score}
    return {SAID_ABSENT: float(says_none(answer) and not holds_value), INVENTED: float(holds_value)}
