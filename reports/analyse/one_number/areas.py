"""Areas under curves over the logarithm of the context length, divided by its width: the mean over octaves.

Of NLL it is the mean change beyond the training length, on identical targets: for each document, the area from the
training length to the longest length, less NLL at the training length. Of scores it is the mean score from the shortest
to the longest length. Both are weighted means over lengths, so that the intervals of single numbers hold for them too.

Shape suffixes: K lengths, C documents or samples.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sbeval.reports.analyse.statistics import mean_interval, score_interval
from sbeval.reports.read.samples import SampleKey, SumsByDocument
from sbeval.results.digits import with_interval
from sbeval.results.intervals import ratio_interval, uneven


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Area:
    """A mean over octaves.

    Attributes:
        from_tokens: shortest length it is taken over.
        to_tokens: longest one.
        estimate: in nats per token, or a score.
        low: lower end of the 95% interval, NaN where there is none.
        high: upper end.
        units: documents or samples it rests on; None where samples were not logged.
        doubtful: whether the documents' sizes are so uneven that the interval covers less often than it says.
    """

    from_tokens: int
    to_tokens: int
    estimate: float
    low: float
    high: float
    units: int | None
    doubtful: bool = False

    @property
    def text(self) -> str:
        """Such as "+0.120 [+0.100, +0.140]", for a change."""
        return with_interval(self.estimate, self.low, self.high).replace("-", "\N{MINUS SIGN}")


def octave_weights(lengths: Sequence[int]) -> NDArray[np.float64]:
    """Returns the weight of each length in the area by trapezoids over log length; they add up to 1.

    Args:
        lengths: two or more context lengths in tokens, ascending.
    """
    halves = np.diff(np.log2(np.asarray(lengths, np.float64))) / 2
    sides = np.concatenate([[0.0], halves, [0.0]])
    weights_K: NDArray[np.float64] = (sides[1:] + sides[:-1]) / (2 * halves.sum())
    return weights_K


def change_weights(lengths: Sequence[int], reference_tokens: int | None) -> NDArray[np.float64] | None:
    """Returns the weights [K] that make the mean change beyond a reference length; None where no length is beyond it.

    They add up to 0: each length beyond the reference counts as in `octave_weights`, the reference is subtracted.
    """
    if reference_tokens is None or reference_tokens not in lengths[:-1]:
        return None
    weights_K = np.zeros(len(lengths))
    start = list(lengths).index(reference_tokens)
    weights_K[start:] = octave_weights(lengths[start:])
    weights_K[start] -= 1
    return weights_K


def nll_area(sums: SumsByDocument, reference_tokens: int | None) -> Area | None:
    """Returns the mean change of NLL beyond the reference, in nats per token, on documents with identical targets.

    Args:
        sums: sums by document.
        reference_tokens: the training length, or the longest length below it that was evaluated.

    Returns:
        None where no length beyond the reference has a target that the others have too.
    """
    weights_K = change_weights(sums.lengths, reference_tokens)
    same_C = (sums.tokens == sums.tokens[:, :1]).all(axis=1) & (sums.tokens[:, 0] > 0)
    if weights_K is None or reference_tokens is None or not same_C.any():
        return None
    tokens_C = sums.tokens[same_C, 0]
    found = ratio_interval(sums.nll_nats[same_C] @ weights_K, tokens_C, seed=0)
    return Area(
        from_tokens=reference_tokens,
        to_tokens=sums.lengths[-1],
        estimate=found.estimate,
        low=math.nan if found.low is None else found.low,
        high=math.nan if found.high is None else found.high,
        units=found.clusters,
        doubtful=uneven(tokens_C),
    )


def score_area(
    means: Mapping[int, float], samples: Sequence[Mapping[int, Mapping[SampleKey, float]]] = ()
) -> Area | None:
    """Returns the mean score over octaves, each task weighing the same.

    Args:
        means: context length to the mean score over all tasks.
        samples: for each task, context length to (sample to its score); the interval rests on the samples that have all
            lengths of `means`, and there is none where a task has no such sample.

    Returns:
        None for fewer than two lengths.
    """
    lengths = sorted(means)
    if len(lengths) < 2:
        return None
    weights_K = octave_weights(lengths)
    estimate = float(weights_K @ [means[length] for length in lengths])
    parts: list[tuple[float, float, float]] = []
    count = 0
    for by_length in samples:
        shared = set.intersection(*(set(by_length.get(length, {})) for length in lengths))
        own_C = np.array([[by_length[length][key] for length in lengths] for key in sorted(shared)])
        if len(shared) < 2:
            parts = []
            break
        own_C = own_C @ weights_K
        low, high = score_interval(own_C.mean(), own_C.std(ddof=1) / len(own_C) ** 0.5, len(own_C))
        parts.append((float(own_C.mean()), float(low), float(high)))
        count += len(own_C)
    low_end, high_end = mean_interval(*zip(*parts, strict=True)) if parts else (math.nan, math.nan)
    shift = estimate - float(np.mean([part[0] for part in parts])) if parts else math.nan
    if not abs(shift) < 1e-6:  # the samples logged are not those the score is of
        low_end, high_end, count = math.nan, math.nan, 0
    return Area(
        from_tokens=lengths[0],
        to_tokens=lengths[-1],
        estimate=estimate,
        low=low_end,
        high=high_end,
        units=count or None,
    )
