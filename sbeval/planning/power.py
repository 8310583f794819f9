"""How large a paired difference has to be for its confidence interval to exclude zero in most repetitions of a run.

A rise is shown if the lower end of its interval is above zero. The interval is that of Student's t for the mean of n
differences, corrected for their skewness as the studentised bootstrap of reports corrects it. With g the skewness
divided by sqrt(n), q the quantile of the interval's end and z that of the power, the smallest rise changes by

    - g (2 q + z) (q + z) / 6

standard errors. This is the first term of an expansion in which three things meet: the ends of the interval move by
g (2 q^2 + 1) / 6 (Hall, *The Bootstrap and Edgeworth Expansion*, 1992, section 2.6); the standard error of a run is
correlated with its mean, by g / 2; and the mean itself is skewed. So with a long tail above, rises are shown sooner
than falls. The second term, `_SECOND` g^2, is fitted to simulated runs (`research/interval_studies/plan_power.py`).

If m differences are judged at once, the confidence of each is 1 - 0.05 / m (Bonferroni). The simultaneous band of a
report is as wide on both sides, so there skewness widens the side of the shorter tail too.

The spread of a pilot is uncertain. `Spread` holds draws of what it may be, and a smallest difference has its power on
average over these draws.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import norm, t

from sbeval.results.intervals import MINIMUM_CLUSTERS

CONFIDENCE = 0.95
POWER = 0.8
MOST_UNITS = 10**9
Floats = NDArray[np.float64]
_SECOND = 1.6
_ENDS = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The standard deviation of differences over documents or samples, and how certain it is.

    Attributes:
        estimate: the standard deviation, in the unit of the difference.
        skewness: skewness of the differences.
        draws_B2: what standard deviation and skewness may be: draws of both, float64 [B, 2]. None if they are stated.
        largest: largest difference that is possible with a stated spread, in the unit of the difference.
    """

    estimate: float
    skewness: float = 0.0
    draws_B2: Floats | None = None
    largest: float = math.inf

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the 95% interval; both equal the estimate if it is stated."""
        if self.draws_B2 is None:
            return self.estimate, self.estimate
        low, high = np.quantile(self.draws_B2[:, 0], _ENDS)
        return min(float(low), self.estimate), max(float(high), self.estimate)

    def smallest(
        self, units: int, *, rise: bool, power: float = POWER, comparisons: int = 1
    ) -> tuple[float, float, float]:
        """Returns the smallest rise or fall that is shown with this power on average over the draws, and its interval.

        The interval is that of the difference with this power for the true spread. All are NaN if there is no interval,
        or if the smallest difference is larger than the largest possible one.
        """
        sign = 1 if rise else -1
        options = {"units": units, "comparisons": comparisons}
        if self.draws_B2 is None:
            stated = float(smallest_difference(self.estimate, skewness=sign * self.skewness, power=power, **options))
            if stated > self.largest:
                stated = math.nan
            return stated, stated, stated
        spreads_B, skewness_B = self.draws_B2.T
        low, high = np.quantile(
            smallest_difference(spreads_B, skewness=sign * skewness_B, power=power, **options), _ENDS
        )
        # the difference with power p is the p-quantile of what the lower end of an interval lacks of the true rise
        count = len(spreads_B)
        powers_B = (np.random.default_rng(0).permutation(count) + 0.5) / count
        lacks_B = smallest_difference(spreads_B, skewness=sign * skewness_B, power=powers_B, **options)
        at = float(np.quantile(lacks_B, power))
        return at, min(float(low), at), max(float(high), at)

    def needed(self, difference: float, *, power: float = POWER) -> tuple[int | None, int | None, int | None]:
        """Returns how many documents or samples show a rise and a fall of this size, with the ends of its interval.

        A number is at least `MINIMUM_CLUSTERS`, below which there is no interval, and None above `MOST_UNITS`. All are
        None for a difference that is larger than the largest possible one.
        """
        if difference > self.largest:
            return None, None, None

        def larger(units: int, place: int) -> float:
            return max(self.smallest(units, rise=rise, power=power)[place] for rise in (True, False))

        at, low, high = (
            _fewest(lambda units, place=place: larger(units, place) <= difference)  # type: ignore[misc]
            for place in range(3)
        )
        return at, low, high


def smallest_difference(
    spread: ArrayLike,
    units: int,
    *,
    skewness: ArrayLike = 0.0,
    power: ArrayLike = POWER,
    comparisons: int = 1,
    confidence: float = CONFIDENCE,
) -> Floats:
    """Returns the smallest true rise that is shown with this probability, in the unit of `spread`; NaN for none.

    For the smallest fall, pass the skewness with the opposite sign. Spread, skewness and power may be arrays.

    Args:
        spread: standard deviation of differences over documents or samples.
        units: number of documents or samples; below `MINIMUM_CLUSTERS` there is no interval.
        skewness: of the differences over documents.
        power: probability that the interval excludes zero.
        comparisons: number of differences that are judged at once.
        confidence: probability that all intervals cover their true differences.
    """
    if units < MINIMUM_CLUSTERS:
        return np.full(np.shape(spread), math.nan)
    tail = (1 - confidence) / (2 * comparisons)
    end, freedom = float(t.ppf(1 - tail, units - 1)), units - 1
    # noncentral t, whose quantile of probability 1 - power is the end: its normal approximation (Johnson & Welch 1940)
    z = norm.ppf(power)
    errors = end * (1 - 1 / (4 * freedom)) + z * math.sqrt(1 + end**2 / (2 * freedom))
    moved = _moved(np.asarray(skewness) / math.sqrt(units), z, tail, one_by_one=comparisons == 1)
    limit = np.abs(errors)
    difference: Floats = np.asarray(spread) * (errors + np.clip(moved, -limit / 2, limit)) / math.sqrt(units)
    return difference


def _moved(skewness: Floats, z: Floats, tail: float, *, one_by_one: bool) -> Floats:
    """Returns by how many standard errors the skewness of a mean changes the smallest rise.

    Args:
        skewness: of one document, divided by sqrt(n).
        z: quantile of the power.
        tail: probability beyond the end of an interval.
        one_by_one: whether an interval has ends of its own; otherwise it is as wide on both sides.
    """
    q = float(norm.ppf(1 - tail))
    lowest = (2 * q + z) * (q + z) / (12 * _SECOND)  # of the parabola, which would rise again beyond it
    skewness = np.minimum(skewness, np.maximum(lowest, 0.0))
    if one_by_one:
        end = -skewness * (2 * q**2 + 1) / 6
    else:  # most misses are on the side of the longer tail
        side = float(norm.ppf(1 - 2 * tail))
        end = np.maximum(0.0, side + np.abs(skewness) * (2 * side**2 + 1) / 6 - q)
    moved: Floats = end - skewness * (q * z / 2 + (z**2 - 1) / 6) + _SECOND * skewness**2
    return moved


def _fewest(shows: Callable[[int], bool]) -> int | None:
    low, high = MINIMUM_CLUSTERS - 1, MINIMUM_CLUSTERS
    while not shows(high):
        low, high = high, 2 * high
        if high > MOST_UNITS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shows(middle) else (middle, high)
    return high
