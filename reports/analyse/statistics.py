"""Simultaneous intervals for paired differences of ratios, over clusters.

Several differences are looked at together (one a context length), so each single 95% interval would be wrong more
often than it says. The max-t band holds for all of them at once: documents are resampled, every difference is divided
by its own standard error in that resample, and the band's width is the 95% point of the largest of them (Westfall &
Young 1993; Efron & Tibshirani 1993 for the studentised bootstrap), but never less than a single normal interval's.

Legend: C clusters, K differences, B resamples, W weights a cluster: 1, or one for each difference.
"""

import dataclasses
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sbeval.results.intervals import MINIMUM_CLUSTERS, linearised_errors, resampled_counts

RESAMPLES = 2000
CONFIDENCE = 0.95
_NO_SPREAD = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Differences with one band over all of them.

    Attributes:
        estimates: float64 [K].
        lows: float64 [K]; NaN where there is no interval.
        highs: float64 [K]; NaN where there is no interval.
        clusters: number of clusters the band rests on.
    """

    estimates: NDArray[np.float64]
    lows: NDArray[np.float64]
    highs: NDArray[np.float64]
    clusters: int


def simultaneous_band(
    differences_CK: NDArray[np.float64],
    weights: NDArray[np.float64],
    *,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    minimum_clusters: int = MINIMUM_CLUSTERS,
    least_errors_K: NDArray[np.float64] | None = None,
) -> Band:
    """Estimates sum(differences) / sum(weights) for each column, with a max-t band over the columns.

    Args:
        differences_CK: per cluster, the difference of two sums over the same targets, such as NLL in nats.
        weights: what both sums are divided by, such as tokens: per cluster, [C] and above zero, or per cluster and
            difference, [C, K], zero where a cluster has no part in a difference.
        seed: seed of the resampling.
        confidence: how often the whole band covers all true differences.
        resamples: B.
        minimum_clusters: below this many clusters there is no band.
        least_errors_K: standard errors below which none is believed, see `graded_errors`; None for no such bound.
    """
    clusters, count = differences_CK.shape
    empty = np.full(count, np.nan)
    if clusters == 0:
        return Band(estimates=empty, lows=empty, highs=empty, clusters=0)
    weights_CW = weights.reshape(clusters, -1)
    estimates_K = differences_CK.sum(axis=0) / weights_CW.sum(axis=0)
    if clusters < max(2, minimum_clusters):
        return Band(estimates=estimates_K, lows=empty, highs=empty, clusters=clusters)
    residuals_CK = differences_CK - estimates_K * weights_CW
    errors_K = linearised_errors(np.ones((1, clusters)), residuals_CK, weights_CW)[1][0]
    varying_K = errors_K > np.finfo(np.float64).eps * np.abs(estimates_K)
    largest = []
    for counts_BC in _counts(clusters, resamples, seed):
        shifts_BK, spreads_BK = linearised_errors(counts_BC, residuals_CK, weights_CW)
        # a resample that misses the few clusters that differ at all (right or wrong answers) has no spread of its own
        own_BK = np.where(spreads_BK > _NO_SPREAD * errors_K, spreads_BK, errors_K)
        t_BK = np.abs(shifts_BK) / np.where(varying_K, own_BK, 1.0)
        largest.append(np.max(np.where(varying_K, t_BK, 0.0), axis=1))
    normal = NormalDist().inv_cdf((1 + confidence) / 2)
    believed_K = errors_K if least_errors_K is None else np.maximum(errors_K, least_errors_K)
    width_K = max(float(np.quantile(np.concatenate(largest), confidence)), normal) * believed_K
    return Band(estimates=estimates_K, lows=estimates_K - width_K, highs=estimates_K + width_K, clusters=clusters)


def graded_errors(differences_CK: NDArray[np.float64], weights_C: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns standard errors [K] of mean differences of scores such as right or wrong, with two observations added.

    One of the added differences is +1 and one -1 (Bonett & Price 2012), so that 30 samples on which two models agree do
    not pass for certainty. Differences are between -1 and 1, not weighted; unequal weights count as fewer samples.
    """
    total = weights_C.sum()
    count = total**2 / (weights_C**2).sum()
    squares_K = (weights_C @ differences_CK**2 / total * count + 2) / (count + 2)
    means_K = weights_C @ differences_CK / total * count / (count + 2)
    errors_K: NDArray[np.float64] = np.sqrt((squares_K - means_K**2) / (count + 2))
    return errors_K


def wilson_interval(successes: float, trials: float, *, z: float = 1.959963984540054) -> tuple[float, float]:
    """Returns Wilson's 95% interval of a proportion; it stays inside 0 to 1 and is honest at the ends.

    `successes` may be a sum of scores between 0 and 1; the interval is then conservative.
    """
    if not trials > 0:
        return float("nan"), float("nan")
    share = successes / trials
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * np.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


def believed_error(rows: pd.DataFrame) -> pd.Series:
    """Returns standard errors of shares, columns value, stderr and samples.

    Where every sample scored the same the error is 0, which is no certainty: one success and one failure are added, or
    the error is NaN where the samples are not counted.
    """
    share = (rows["value"] * rows["samples"] + 1) / (rows["samples"] + 2)
    added = (share * (1 - share) / (rows["samples"] + 2)) ** 0.5
    return rows["stderr"].where(rows["stderr"] > 0, added.where(rows["stderr"].notna()))


def share_interval(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Returns the ends of 95% intervals of shares, from columns value, stderr and samples; NaN where unknown.

    They are 1.96 standard errors wide on each side, inside 0..1; where every sample scored the same, Wilson's.
    """
    half = 1.96 * rows["stderr"]
    certain = (rows["stderr"] == 0) & rows["value"].between(0, 1)
    counts = zip(rows["value"], rows["samples"].where(certain, 0), strict=True)
    ends = [wilson_interval(value * count, count) for value, count in counts]
    wilson = pd.DataFrame(ends, columns=["low", "high"], index=rows.index, dtype="float64")
    lows = (rows["value"] - half).clip(lower=0.0).mask(certain, wilson["low"])
    highs = (rows["value"] + half).clip(upper=1.0).mask(certain, wilson["high"])
    return lows, highs


@lru_cache(maxsize=8)
def _counts(clusters: int, resamples: int, seed: int) -> tuple[NDArray[np.float64], ...]:
    """Kept, since bands over as many clusters share their resamples."""
    return tuple(resampled_counts(clusters, resamples, seed))
