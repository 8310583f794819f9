"""RULER's scores, substring matches without regard to case after its clean-up of the answer, and their group averages.

A group's average is the plain mean over its tasks at every length, with its standard error. lm-eval averages the
metrics that a group lists, and passes over listed ones that no task has; so every length people use is listed.
"""

import re
from collections.abc import Sequence

from sbeval.results.records import metric_key

_CONTROL = re.compile(r"[\x00-\x1f]")


def parse_answer(answer: str) -> str:
    """Cleans a generated answer as RULER does: outer white space off, control characters turned into line breaks."""
    return _CONTROL.sub("\n", answer.strip()).strip()


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """Returns the share of references found in the answer, 0 to 1."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def string_match_part(answer: str, references: Sequence[str]) -> float:
    """Returns 1 where any reference is found in the answer, else 0; references are aliases of one answer."""
    return float(any(reference.lower() in answer.lower() for reference in references))


_POWERS = range(7, 21)
_STEPS = {step * n for step in (500, 512) for n in range(1, 257)} | {64 * n for n in range(2, 257)}
LENGTHS = sorted(_STEPS | {2**n for n in _POWERS} | {3 * 2 ** (n - 1) for n in _POWERS})


def averages(metric: str) -> list[dict[str, object]]:
    """Returns lm-eval's entries for the mean of a metric at every length."""
    return [
        {"metric": metric_key(metric, length), "aggregation": "mean", "weight_by_size": False} for length in LENGTHS
    ]


AVERAGES = averages("score")
FORCED_AVERAGES = averages("exact_match")
