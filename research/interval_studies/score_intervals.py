"""What 95 % intervals of mean scores between 0 and 1 cover, and those of a mean over RULER's thirteen tasks.

    OMP_NUM_THREADS=1 python -m research.interval_studies.score_intervals

Scores are right or wrong, or shares of four or ten answers found. How likely an answer is found differs between samples
by a beta distribution of that many observations; "alike" where it does not. `standard errors` is the rule of earlier
reports: 1.96 of them on each side, and Wilson's interval where all samples score the same.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from research.interval_studies.archive import table
from sbeval.reports.analyse.statistics import mean_interval, score_interval, wilson_interval

DRAWS, SUITES = 10_000, 1000
MEANS, SAMPLES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0), (10, 30, 50, 100, 500)
KINDS: dict[str, tuple[int, float | None]] = {
    "right or wrong": (1, None),
    "of 4, alike": (4, None),
    "of 4, beta of 2": (4, 2.0),
    "of 4, beta of 0.5": (4, 0.5),
    "of 10, alike": (10, None),
    "of 10, beta of 2": (10, 2.0),
}
SUITE = (1.0, 1.0, 1.0, 0.99, 0.99, 0.97, 0.95, 0.9, 0.95, 0.8, 0.7, 0.6, 0.4)
Ends = tuple[NDArray[np.float64], NDArray[np.float64]]
Rule = Callable[[NDArray[np.float64], NDArray[np.float64], int], Ends]


def standard_errors(means: NDArray[np.float64], stderrs: NDArray[np.float64], samples: int) -> Ends:
    lows, highs = wilson_interval(means, samples)
    alike = stderrs == 0
    return np.where(alike, lows, means - 1.96 * stderrs), np.where(alike, highs, means + 1.96 * stderrs)


def wilson(means: NDArray[np.float64], _stderrs: NDArray[np.float64], samples: int) -> Ends:
    return wilson_interval(means, samples)


RULES: dict[str, Rule] = {"standard errors": standard_errors, "Wilson": wilson, "reports": score_interval}


def draw(
    random: np.random.Generator, kind: tuple[int, float | None], mean: float, shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Draws scores of one kind with this true mean."""
    answers, beta = kind
    chance: NDArray[np.float64] | float = mean
    if beta is not None and 0 < mean < 1:
        chance = random.beta(mean * beta, (1 - mean) * beta, shape)
    return random.binomial(answers, chance, shape) / answers


def moments(scores: NDArray[np.float64]) -> Ends:
    """Returns means and standard errors over the last axis."""
    return scores.mean(axis=-1), scores.std(axis=-1, ddof=1) / scores.shape[-1] ** 0.5


def single() -> tuple[list[str], list[str]]:
    """Coverage of every rule for one mean, and the whole table of the reports' rule."""
    random = np.random.default_rng(0)
    summary, whole = [], []
    for kind, parameters in KINDS.items():
        covered: dict[str, dict[tuple[float, int], float]] = {name: {} for name in RULES}
        widths: dict[str, list[float]] = {name: [] for name in RULES}
        for mean in MEANS:
            for samples in SAMPLES:
                values = moments(draw(random, parameters, mean, (DRAWS, samples)))
                for name, rule in RULES.items():
                    lows, highs = rule(*values, samples)
                    inside = (lows <= mean + 1e-12) & (mean - 1e-12 <= highs)
                    covered[name][mean, samples] = float(inside.mean())
                    widths[name].append(float((np.minimum(highs, 1) - np.maximum(lows, 0)).mean()))
        for name, shares in covered.items():
            worst = min(shares, key=lambda place: shares[place])
            at = f"{shares[worst]:.1%} (mean {worst[0]:g}, {worst[1]} samples)"
            between = np.mean([share for (mean, _), share in shares.items() if 0 < mean < 1])
            summary.append([kind, name, at, f"{between:.1%}", f"{np.mean(widths[name]):.3f}"])
        own = covered["reports"]
        whole += [
            [kind, str(samples), *(f"{own[mean, samples]:.1%}" for mean in MEANS if 0 < mean < 1)]
            for samples in SAMPLES
        ]
    header = ["scores", "rule", "least coverage", "mean coverage, means 0.5 to 0.99", "mean width"]
    columns = [f"mean {mean:g}" for mean in MEANS if 0 < mean < 1]
    return table(header, summary), table(["scores", "samples", *columns], whole)


def suites() -> list[str]:
    """Coverage of the interval of a mean over thirteen tasks."""
    random = np.random.default_rng(1)
    rows = []
    for samples in SAMPLES:
        inside = {"standard errors": 0, "reports": 0}
        for _ in range(SUITES):
            values, errors = np.array(
                [moments(draw(random, KINDS["right or wrong"], mean, (samples,))) for mean in SUITE]
            ).T
            added = (values * samples + 1) / (samples + 2)
            believed = np.where(errors > 0, errors, np.sqrt(added * (1 - added) / (samples + 2)))
            half = 1.96 * np.sqrt((believed**2).sum()) / len(SUITE)
            inside["standard errors"] += abs(values.mean() - np.mean(SUITE)) <= half
            low, high = mean_interval(values, *score_interval(values, errors, samples))
            inside["reports"] += low <= np.mean(SUITE) <= high
        rows.append([str(samples), *(f"{count / SUITES:.1%}" for count in inside.values())])
    return table(["samples a task", *inside], rows)


def main() -> None:
    summary, whole = single()
    print(f"Intervals of a mean score, {DRAWS:,} draws each:\n")
    print("\n".join(summary))
    print("Coverage of the intervals that reports show:\n")
    print("\n".join(whole))
    print(f"The mean over thirteen tasks of true means {', '.join(f'{mean:g}' for mean in SUITE)}; {SUITES:,} draws:\n")
    print("\n".join(suites()))


if __name__ == "__main__":
    main()
