"""Group averages: the plain mean over a group's tasks at every length, with its standard error.

lm-eval averages the metrics that a group lists, and passes over listed ones that no task has; so every length people
use is listed.
"""

from sbeval.records import metric_key

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
