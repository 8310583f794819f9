"""Group averages: the plain mean over a group's tasks at every length.

lm-eval averages the metrics that a group lists, and passes over listed ones that no task has; so every length people
use is listed.
"""

from sbeval.records import metric_key

_POWERS = range(7, 21)
LENGTHS = sorted({2**n for n in _POWERS} | {3 * 2 ** (n - 1) for n in _POWERS} | {1000 * 2**n for n in range(10)})

AVERAGES = [
    {"metric": metric_key("score", length), "aggregation": "mean", "weight_by_size": False} for length in LENGTHS
]
