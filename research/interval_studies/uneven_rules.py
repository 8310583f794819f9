"""Coverage and width of other rules for intervals over documents of uneven sizes.

    OMP_NUM_THREADS=1 python -m research.interval_studies.uneven_rules

The documents are those of `coverage`. Beside the rule of reports, the studentised bootstrap, stands Student's t with
jackknife errors and Satterthwaite's degrees of freedom (Bell & McCaffrey 2002, for a weighted mean): few where a few
documents weigh as much as all others.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from research.interval_studies.archive import table
from sbeval.results.intervals import ratio_interval

TRIALS, RESAMPLES = 600, 1000
LOG_DEVIATIONS = (0.5, 1.0, 1.5, 1.8)


def few_freedoms(nll: NDArray[np.float64], tokens: NDArray[np.float64]) -> tuple[float, float]:
    """Returns the ends of the t interval of sum(nll) / sum(tokens), [C] each."""
    clusters, share = len(tokens), tokens / tokens.sum()
    estimate = nll.sum() / tokens.sum()
    pull = share / (1 - share)
    error = np.sqrt(((pull * (nll / tokens - estimate)) ** 2).sum() * (clusters - 1) / clusters)
    centred = np.eye(clusters) - share
    form = centred.T @ (pull[:, None] ** 2 * centred)
    freedoms = np.trace(form) ** 2 / (form**2).sum()
    half = float(stats.t.ppf(0.975, freedoms) * error)
    return estimate - half, estimate + half


def main() -> None:
    rows = []
    for slope in (0.0, 0.1):
        for documents in (20, 60, 200):
            for deviation in LOG_DEVIATIONS:
                random = np.random.default_rng(round(100 * deviation) + documents)
                truth = 2.5 + slope * deviation**2
                ends: dict[str, list[tuple[float, float]]] = {"reports": [], "jackknife t": [], "the wider of both": []}
                for _ in range(TRIALS):
                    log_size = random.normal(0, deviation, documents)
                    tokens = 3000 * np.exp(log_size)
                    nll = (1.9 + random.gamma(2, 0.3, documents) + slope * log_size) * tokens
                    found = ratio_interval(nll, tokens, seed=0, resamples=RESAMPLES)
                    assert found.low is not None
                    assert found.high is not None
                    both = [(found.low, found.high), few_freedoms(nll, tokens)]
                    wider = (min(low for low, _ in both), max(high for _, high in both))
                    for own, interval in zip(ends.values(), (*both, wider), strict=True):
                        own.append(interval)
                cells = []
                for own in ends.values():
                    lows, highs = np.array(own).T
                    inside = ((lows <= truth) & (truth <= highs)).mean()
                    cells.append(f"{inside:.1%}, {np.median(highs - lows):.2f}")
                rows.append([f"{slope:g}", str(documents), f"{deviation:g}", *cells])
    print(f"Coverage and median width in nats, of {TRIALS} draws:\n")
    header = ["NLL by log size", "documents", "log deviation", "reports", "jackknife t", "the wider of both"]
    print("\n".join(table(header, rows)))


if __name__ == "__main__":
    main()
