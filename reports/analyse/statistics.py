"""Confidence intervals of scores, and simultaneous bands for paired differences, by bootstrap over documents.

Documents are called "clusters": the tokens of one document are not independent. A "band" is a set of confidence
intervals, one for each difference, that cover all true values at once in 95% of cases.

A report judges several differences together, one for each context length. With separate 95% intervals, some interval
would miss its true value in more than 5% of cases. A max-t band covers all true values at once: documents are
resampled, and the deviation of each difference is divided by its standard error in that resample. The half width of the
band, in standard errors, is the 95% quantile of the largest absolute value (Westfall & Young 1993; Efron & Tibshirani
1993 for the studentised bootstrap). It is never less than the half width of a single normal interval. This half width
is the same on both sides. Intervals of skewed differences, however, miss the true value on one side only. If a claim
uses only one end of a band (`each_side`), each side is therefore at least as wide as the 97.5% quantile of the largest
value on that side.

Shape suffixes: C clusters, K differences, B resamples, W weights for each cluster: 1, or one for each difference.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from statistics import NormalDist

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from sbeval.results.intervals import MINIMUM_CLUSTERS, RESAMPLES, linearised_errors, resampled, uneven, with_interval

Floats = NDArray[np.float64]
CONFIDENCE = 0.95
_NO_SPREAD = 1e-3
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A number and the two ends of its confidence interval; the ends are NaN if there is no interval."""

    estimate: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """The number as a signed change with its interval, such as "+0.120 [+0.100, +0.140]"."""
        return with_interval(self.estimate, self.low, self.high).replace("-", "\N{MINUS SIGN}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """K differences with confidence intervals that cover all true differences at once.

    Attributes:
        estimates: the differences, float64 [K].
        lows: lower ends of the intervals, float64 [K]; NaN if there is no interval.
        highs: upper ends of the intervals, float64 [K]; NaN if there is no interval.
        clusters: number of clusters that the intervals are computed from.
        doubtful: whether clusters are so uneven in size that the intervals cover the true values in fewer cases than
            they claim.
    """

    estimates: Floats
    lows: Floats
    highs: Floats
    clusters: int
    doubtful: bool = False

    def __iter__(self) -> Iterator[tuple[float, float, float]]:
        """Yields (estimate, low, high) for each difference."""
        return zip(self.estimates.tolist(), self.lows.tolist(), self.highs.tolist(), strict=True)


def simultaneous_band(
    differences_CK: Floats,
    weights: Floats,
    *,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    least_errors_K: Floats | None = None,
    each_side: bool = False,
) -> Band:
    """Estimates sum(differences) / sum(weights) for each column, with a max-t band over the columns.

    Args:
        differences_CK: float64 [C, K]; for each cluster, the difference of two sums over the same targets, such as NLL
            in nats.
        weights: the divisor of both sums, such as the number of tokens: [C], above zero; or [C, K], zero for a cluster
            that does not contribute to a difference.
        seed: seed of the resampling.
        confidence: probability that the band covers all true differences at once.
        resamples: number B of resamples.
        least_errors_K: lower bounds of the standard errors, such as `graded_errors`; None for no bounds.
        each_side: whether the half width is computed separately for the lower and the upper side. Needed if a claim
            uses only one end of an interval and differences may be skewed.
    """
    clusters, count = differences_CK.shape
    empty = np.full(count, np.nan)
    if clusters == 0:
        return Band(estimates=empty, lows=empty, highs=empty, clusters=0)
    weights_CW = weights.reshape(clusters, -1)
    estimates_K = differences_CK.sum(axis=0) / weights_CW.sum(axis=0)
    if clusters < MINIMUM_CLUSTERS:
        return Band(estimates=estimates_K, lows=empty, highs=empty, clusters=clusters)
    residuals_CK = differences_CK - estimates_K * weights_CW
    errors_K = linearised_errors(np.ones((1, clusters)), residuals_CK, weights_CW)[1][0]
    varying_K = errors_K > np.finfo(np.float64).eps * np.abs(estimates_K)
    believed_K = errors_K if least_errors_K is None else np.maximum(errors_K, least_errors_K)

    def furthest(counts_BC: Floats) -> Floats:
        shifts_BK, spreads_BK = linearised_errors(counts_BC, residuals_CK, weights_CW)
        # two models may give different answers in few clusters; a resample without these has a standard error of 0
        resampled_errors_BK = np.where(spreads_BK > _NO_SPREAD * errors_K, spreads_BK, errors_K)
        t_BK = np.where(varying_K, shifts_BK / np.where(varying_K, resampled_errors_BK, 1.0), 0.0)
        return np.stack([np.max(t_BK, axis=1), np.max(-t_BK, axis=1)], axis=1)

    furthest_B2 = resampled(furthest, clusters, resamples=resamples, seed=seed)
    normal = NormalDist().inv_cdf((1 + confidence) / 2)
    width = max(float(np.quantile(furthest_B2.max(axis=1), confidence)), normal)
    sides_2 = np.quantile(furthest_B2, (1 + confidence) / 2, axis=0) if each_side else np.zeros(2)
    below, above = np.maximum(width, sides_2).tolist()
    return Band(
        estimates=estimates_K,
        lows=estimates_K - below * believed_K,
        highs=estimates_K + above * believed_K,
        clusters=clusters,
        doubtful=uneven(weights_CW.max(axis=1)),
    )


def graded_errors(differences_CK: Floats, weights_C: Floats) -> Floats:
    """Returns standard errors of mean differences of scores such as 0 or 1 (wrong or right).

    Two observations are added first: a difference of +1 and one of -1 (Bonett & Price 2012). Without them, 30 samples
    on which two models have equal scores would give a standard error of 0, as if the models were certainly equal. If
    weights are unequal, the number of samples is replaced by a smaller, effective one.

    Args:
        differences_CK: float64 [C, K], between -1 and 1.
        weights_C: float64 [C], weights of the samples.

    Returns:
        The standard errors, float64 [K].
    """
    total = weights_C.sum()
    count = total**2 / (weights_C**2).sum()
    squares_K = (weights_C @ differences_CK**2 / total * count + 2) / (count + 2)
    means_K = weights_C @ differences_CK / total * count / (count + 2)
    errors_K: Floats = np.sqrt((squares_K - means_K**2) / (count + 2))
    return errors_K


def wilson_interval(share: ArrayLike, trials: ArrayLike) -> tuple[Floats, Floats]:
    """Returns the lower and upper ends of Wilson's 95% intervals of proportions.

    These intervals lie within 0 and 1, and their width is above 0 for a proportion of 0 or 1 too.

    Args:
        share: successes divided by trials.
        trials: number of trials, not necessarily an integer. If it is not above 0, the ends are NaN.
    """
    shares, counts = np.asarray(share, np.float64), np.asarray(trials, np.float64)
    counts = np.where(counts > 0, counts, np.nan)
    middle = (shares + _Z**2 / (2 * counts)) / (1 + _Z**2 / counts)
    half = _Z * np.sqrt(shares * (1 - shares) / counts + _Z**2 / (4 * counts**2)) / (1 + _Z**2 / counts)
    return np.maximum(0.0, middle - half), np.minimum(1.0, middle + half)


def score_interval(means: ArrayLike, stderrs: ArrayLike, samples: ArrayLike) -> tuple[Floats, Floats]:
    """Returns the lower and upper ends of 95% intervals of mean scores between 0 and 1; NaN if they are unknown.

    They are Wilson's intervals with an effective number of trials: the number of scores of 0 or 1 that would give the
    same variance of the mean. Scores such as the share of four answers found vary less than scores of 0 or 1, so each
    counts as more than one trial. The variance is computed after adding one score of 0 and one of 1; otherwise a few
    equal scores would give an interval of width 0. For scores of 0 or 1 the result is Wilson's interval
    (`research/interval_studies/score_intervals.py` measures its coverage).

    Args:
        means: mean score of the samples.
        stderrs: standard error of the mean: standard deviation divided by the square root of the number of samples.
        samples: number of samples. If it is NaN, the number of scores of 0 or 1 that would give this standard error is
            used.
    """
    mean, stderr, count = (np.asarray(values, np.float64) for values in (means, stderrs, samples))
    mean = np.where((mean >= 0) & (mean <= 1), mean, np.nan)
    count = np.where(count > 0, count, np.nan)
    centre = (mean * count + 1) / (count + 2)
    square = (stderr**2 * count * (count - 1) + count * mean**2 + 1) / (count + 2)
    relative = np.clip((square - centre**2) / (centre * (1 - centre)), 1 / count, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        uncounted = np.where(stderr > 0, mean * (1 - mean) / stderr**2, np.nan)
    return wilson_interval(mean, np.where(np.isnan(count), uncounted, count / relative))


def share_interval(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Returns lower and upper ends of `score_interval` for the rows of a table with columns value, stderr, samples."""
    columns = (rows[name].to_numpy(dtype=float, na_value=np.nan) for name in ("value", "stderr", "samples"))
    lows, highs = score_interval(*columns)
    return pd.Series(lows, index=rows.index), pd.Series(highs, index=rows.index)


def mean_interval(values: ArrayLike, lows: ArrayLike, highs: ArrayLike) -> tuple[float, float]:
    """Returns the lower and upper end of the interval of a mean of independent estimates, from their intervals.

    The distances between estimates and lower ends are squared and added for the lower end, and the distances to the
    upper ends for the upper end (Zou & Donner 2008). Asymmetric intervals thus give an asymmetric interval. Both ends
    are NaN if any interval is unknown.
    """
    value, low, high = (np.asarray(numbers, np.float64) for numbers in (values, lows, highs))
    below, above = (np.sqrt(((value - end) ** 2).sum()) / len(value) for end in (low, high))
    return float(value.mean() - below), float(value.mean() + above)


def octave_weights(lengths: Sequence[int]) -> Floats:
    """Returns the weights [K] of lengths in the mean over octaves: the trapezoidal rule over log2 length; sum 1.

    Args:
        lengths: two or more context lengths in tokens, ascending.
    """
    halves = np.diff(np.log2(np.asarray(lengths, np.float64))) / 2
    sides = np.concatenate([[0.0], halves, [0.0]])
    weights_K: Floats = (sides[1:] + sides[:-1]) / (2 * halves.sum())
    return weights_K


def change_weights(lengths: Sequence[int], reference_tokens: int | None) -> Floats | None:
    """Returns the weights [K] of the mean change beyond a reference length; None if no length is beyond it.

    They are `octave_weights` of the reference length and all longer ones, minus 1 at the reference length, so their sum
    is 0. Shorter lengths have the weight 0.
    """
    if reference_tokens is None or reference_tokens not in lengths[:-1]:
        return None
    weights_K = np.zeros(len(lengths))
    start = list(lengths).index(reference_tokens)
    weights_K[start:] = octave_weights(lengths[start:])
    weights_K[start] -= 1
    return weights_K
