"""How often rules for "more context lowers NLL up to L" name a length whose own step is no gain.

    OMP_NUM_THREADS=1 python -m research.interval_studies.lengths_rule

Forty documents, seven lengths, and steps of the size, spread and correlation of the stick-breaking checkpoint in
`docs/results/demo` (identical targets). A name is wrong where the true NLL at that length is not below that at the
length before it. `own step` is the rule of `reports/analyse/claims.py`.

The first table is of that rule on a flat curve, by number of documents, spread of their sizes and shape of the noise.
Skewed noise errs on one side alone, and one band for both sides would let all of its errors through there.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from research.interval_studies.archive import table
from sbeval.reports.analyse.claims import last_gain_step
from sbeval.reports.analyse.statistics import simultaneous_band

DOCUMENTS, TRIALS, RESAMPLES = 40, 400, 1000
STEP_DEVIATIONS = np.array([0.20, 0.12, 0.13, 0.07, 0.16, 0.10])
"""Standard deviation over documents of each step, nats a token."""
FLAT_TRIALS, FLAT_DOCUMENTS = 2000, (20, 40, 100)
SIZE_LOG_DEVIATIONS = (0.1, 0.7)
REFERENCE = 2
"""Index of the training length."""
CURVES = {
    "as measured": (-0.145, -0.078, -0.052, -0.019, -0.027, -0.002),
    "flat": (0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    "stops at the third": (-0.145, -0.078, 0.0, 0.0, 0.0, 0.0),
    "pauses, then gains": (-0.145, -0.078, 0.0, -0.05, 0.0, 0.0),
    "gains, then pauses": (-0.145, -0.078, -0.05, 0.0, 0.0, 0.0),
    "pauses twice": (-0.145, 0.0, -0.05, 0.0, -0.05, 0.0),
    "slow throughout": (-0.04, -0.04, -0.04, -0.04, -0.04, -0.04),
    "gains, then breaks": (-0.145, -0.078, 0.1, 0.3, 0.0, -0.02),
}
Draw = Callable[[np.random.Generator, tuple[int, int]], NDArray[np.float64]]
NOISE: dict[str, Draw] = {
    "normal": lambda random, shape: random.normal(size=shape),
    "exponential, long tail above": lambda random, shape: random.exponential(size=shape) - 1,
    "exponential, long tail below": lambda random, shape: 1 - random.exponential(size=shape),
    "log-normal, long tail above": lambda random, shape: _log_normal(random, shape),
    "Student's t, 3 degrees of freedom": lambda random, shape: random.standard_t(3, shape) / np.sqrt(3),
}
"""Noise of mean 0 and variance 1."""
Rule = Callable[[NDArray[np.float64], NDArray[np.float64]], int]
"""From NLL sums [documents, lengths] and tokens [documents] to the index of the length named; 0 names none."""


def _log_normal(random: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    return (random.lognormal(0, 1, shape) - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e)


def signs_of(
    nll: NDArray[np.float64], tokens: NDArray[np.float64], pairs: Sequence[tuple[int, int]], *, each_side: bool = False
) -> dict[tuple[int, int], int]:
    """Returns -1 for a pair whose later length is measurably lower, 1 for higher, 0 for neither; one band for all."""
    differences = np.stack([nll[:, later] - nll[:, earlier] for earlier, later in pairs], axis=1)
    band = simultaneous_band(differences, tokens, resamples=RESAMPLES, each_side=each_side)
    ends = zip(pairs, band.lows, band.highs, strict=True)
    return {pair: -1 if high < 0 else 1 if low > 0 else 0 for pair, low, high in ends}


def own_step(nll: NDArray[np.float64], tokens: NDArray[np.float64]) -> int:
    """The longest length below the one before it, before any step up."""
    pairs = list(itertools.pairwise(range(nll.shape[1])))
    return last_gain_step(list(signs_of(nll, tokens, pairs, each_side=True).values()))


def own_step_by_one_width(nll: NDArray[np.float64], tokens: NDArray[np.float64]) -> int:
    """The same with a band of one width on both sides."""
    pairs = list(itertools.pairwise(range(nll.shape[1])))
    return last_gain_step(list(signs_of(nll, tokens, pairs).values()))


def no_longer_lower(nll: NDArray[np.float64], tokens: NDArray[np.float64]) -> int:
    """The shortest length from which no longer one is lower, over all pairs."""
    lengths = nll.shape[1]
    signs = signs_of(nll, tokens, list(itertools.combinations(range(lengths), 2)))
    for start in range(lengths):
        if next((sign for later in range(start + 1, lengths) if (sign := signs[start, later])), 0) >= 0:
            return start
    raise AssertionError("the longest length has none beyond it")


def chain(nll: NDArray[np.float64], tokens: NDArray[np.float64]) -> int:
    """From each length named to the next one that is measurably lower, over all pairs."""
    lengths = nll.shape[1]
    signs = signs_of(nll, tokens, list(itertools.combinations(range(lengths), 2)))
    named = 0
    while (next_one := next((later for later in range(named + 1, lengths) if signs[named, later]), None)) is not None:
        if signs[named, next_one] > 0:
            break
        named = next_one
    return named


def against_training_length(nll: NDArray[np.float64], tokens: NDArray[np.float64]) -> int:
    """The longest length beyond the training length that is below it, or else the training length."""
    others = [index for index in range(nll.shape[1]) if index != REFERENCE]
    signs = signs_of(nll, tokens, [(REFERENCE, other) for other in others])
    lower = [other for _, other in signs if signs[REFERENCE, other] < 0 and other > REFERENCE]
    return max(lower, default=REFERENCE if signs[REFERENCE, 0] > 0 else 0)


def in_order(nll: NDArray[np.float64], tokens: NDArray[np.float64]) -> int:
    """Steps by their own single intervals, from the shortest on, up to the first that is not shown."""
    for index, pair in enumerate(itertools.pairwise(range(nll.shape[1]))):
        if signs_of(nll, tokens, [pair])[pair] >= 0:
            return index
    return nll.shape[1] - 1


RULES: dict[str, Rule] = {
    "own step": own_step,
    "no longer one is lower (all pairs)": no_longer_lower,
    "chain (all pairs)": chain,
    "below the training length": against_training_length,
    "own steps in order, single intervals": in_order,
}


def names_on_a_flat_curve(
    rule: Rule, noise: Draw, *, documents: int, size_log_deviation: float, trials: int = FLAT_TRIALS
) -> float:
    """Returns the share of draws in which a rule names a length though no step is a gain."""
    random = np.random.default_rng(0)
    named = 0
    for _ in range(trials):
        tokens = np.maximum(20, random.lognormal(6, size_log_deviation, documents)).round()
        steps = noise(random, (documents, len(STEP_DEVIATIONS))) * STEP_DEVIATIONS
        nll = np.concatenate([np.zeros((documents, 1)), steps.cumsum(axis=1)], axis=1) * tokens[:, None]
        named += rule(nll, tokens) > 0
    return named / trials


def _flat_table() -> list[str]:
    rows = []
    for name, noise in NOISE.items():
        for documents, deviation in itertools.product(FLAT_DOCUMENTS, SIZE_LOG_DEVIATIONS):
            setting = {"documents": documents, "size_log_deviation": deviation}
            shares = [names_on_a_flat_curve(rule, noise, **setting) for rule in (own_step, own_step_by_one_width)]
            rows.append([name, str(documents), f"{deviation:g}", *(f"{share:.1%}" for share in shares)])
    columns = ["noise", "documents", "deviation of log sizes", "own step", "one width on both sides"]
    return table(columns, rows)


def main() -> None:
    print(f"Names a length on a flat curve, of {FLAT_TRIALS} draws:\n")
    print("\n".join(_flat_table()))
    names = list(RULES)
    wrong, lengths_named = [], []
    for curve, steps in CURVES.items():
        random = np.random.default_rng(0)
        named: dict[str, list[int]] = {name: [] for name in names}
        for _ in range(TRIALS):
            tokens = np.maximum(20, random.normal(500, 50, DOCUMENTS)).round()
            own = np.array(steps) + random.normal(size=(DOCUMENTS, len(steps))) * STEP_DEVIATIONS
            nll = np.concatenate([np.zeros((DOCUMENTS, 1)), own.cumsum(axis=1)], axis=1) * tokens[:, None]
            for name, rule in RULES.items():
                named[name].append(rule(nll, tokens))
        truth = max((index + 1 for index in range(len(steps)) if steps[index] < 0), default=0)
        share = {name: np.mean([index > 0 and steps[index - 1] >= 0 for index in named[name]]) for name in names}
        wrong.append([curve, *(f"{share[name]:.1%}" for name in names)])
        lengths_named.append([curve, str(truth), *(f"{np.mean(named[name]):.2f}" for name in names)])
    print(f"Names a length whose own step is no gain, of {TRIALS} draws:\n")
    print("\n".join(table(["curve", *names], wrong)))
    print("Steps up to the length named, on average, beside the last true gain:\n")
    print("\n".join(table(["curve", "last true gain", *names], lengths_named)))


if __name__ == "__main__":
    main()
