"""How often a run shows the difference that `sbeval plan` says it shows in 80 % of cases.

    OMP_NUM_THREADS=1 python -m research.interval_studies.plan_power

Runs with that true difference are drawn: differences in nats per token by document, of four shapes, and tokens by
document, of two spreads of sizes. A run shows the difference if the lower end of its interval (`ratio_interval`), or of
its band over four equal differences (`simultaneous_band`, planned for four), is above zero. So "long tail above" is a
rise with such differences, and "long tail below" a fall.

The first columns plan with the spread and the skewness of a million documents. The others plan with pilots, each of
documents of its own: the share of runs that show the difference planned with a pilot, averaged over pilots, and the
share of pilots whose interval of the smallest difference holds the difference that 80 % of runs show. Scores are those
of samples of which a share changes from right to wrong or back.

An interval moves with the true difference. So runs are drawn with a difference of zero, and a run shows every
difference above what its lower end lacks.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from research.interval_studies.archive import table
from sbeval.planning.power import POWER, Spread, smallest_difference
from sbeval.reports.analyse.statistics import simultaneous_band
from sbeval.reports.spreads import spread_of
from sbeval.results.intervals import ratio_interval

STUDIES, RESAMPLES = 1000, 1000
PILOTS = (60, 240)
SPREAD = 0.05
"""Standard deviation over documents of a difference in nats per token."""
COMPARISONS = 4
Floats = NDArray[np.float64]
Noise = Callable[[np.random.Generator, tuple[int, ...]], Floats]
SHAPES: dict[str, Noise] = {
    "normal": lambda random, shape: random.normal(0, 1, shape),
    "long tail above": lambda random, shape: random.exponential(1, shape) - 1,
    "long tail below": lambda random, shape: 1 - random.exponential(1, shape),
    "Student's t, 5": lambda random, shape: random.standard_t(5, shape) / (5 / 3) ** 0.5,
}


def draw(random: np.random.Generator, noise: Noise, sizes: float, shape: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Draws differences in nats [documents, K] or [documents], whose mean is zero, and tokens [documents]."""
    tokens = np.maximum(32, random.lognormal(6, sizes, shape[0])).round()
    return SPREAD * noise(random, shape) * (tokens[:, None] if len(shape) > 1 else tokens), tokens


def population(noise: Noise, sizes: float) -> Spread:
    """Returns the spread and the skewness of a million documents."""
    nats, tokens = draw(np.random.default_rng(7), noise, sizes, (1_000_000,))
    residuals = (nats - nats.sum() / tokens.sum() * tokens) / tokens.mean()
    spread = float(np.sqrt((residuals**2).mean()))
    return Spread(estimate=spread, skewness=float((residuals**3).mean()) / spread**3)


def lacks(random: np.random.Generator, noise: Noise, sizes: float, documents: int) -> Floats:
    """Returns by how much the lower end of each run's interval is below zero, ascending."""
    ends = []
    for study in range(STUDIES):
        low = ratio_interval(*draw(random, noise, sizes, (documents,)), seed=study, resamples=RESAMPLES).low
        ends.append(-float("nan" if low is None else low))
    return np.sort(ends)


def lacks_together(random: np.random.Generator, noise: Noise, sizes: float, documents: int) -> Floats:
    """Returns the same for four differences of a run, whose simultaneous band is drawn."""
    bands = [
        simultaneous_band(*draw(random, noise, sizes, (documents, COMPARISONS)), seed=study, resamples=RESAMPLES)
        for study in range(STUDIES // COMPARISONS)
    ]
    return np.sort(np.concatenate([-band.lows for band in bands]))


def main() -> None:
    """Prints both tables."""
    rows = []
    for shape, noise in SHAPES.items():
        for sizes in (0.3, 0.7):
            spread = population(noise, sizes)
            random = np.random.default_rng(8)
            pilots = {
                count: [spread_of(*draw(random, noise, sizes, (count,)), graded=False) for _ in range(STUDIES // 2)]
                for count in PILOTS
            }
            for documents in (40, 120):
                lacks_S = lacks(random, noise, sizes, documents)
                together_S = lacks_together(random, noise, sizes, documents)
                planned, _, _ = spread.smallest(documents, rise=True)
                together, _, _ = spread.smallest(documents, rise=True, comparisons=COMPARISONS)
                shares = [_share_below(lacks_S, planned), _share_below(together_S, together)]
                true = float(np.quantile(lacks_S, POWER))
                for count in PILOTS:
                    plans = np.array([pilot.smallest(documents, rise=True) for pilot in pilots[count]])
                    shares.append(_share_below(lacks_S, plans[:, 0]))
                    shares.append(float(((plans[:, 1] <= true) & (true <= plans[:, 2])).mean()))
                rows.append((shape, f"{sizes}", f"{documents}", *(f"{share:.1%}" for share in shares)))
    header = ["differences", "deviation of log sizes", "documents", "shown", "each of four at once"]
    for count in PILOTS:
        header += [f"shown, pilots of {count}", f"intervals of pilots of {count} hold it"]
    print(f"Runs that show the planned difference, of {STUDIES} (planned: 80%):\n")
    print("\n".join(table(header, rows)))
    rows = []
    for changed in (0.05, 0.2, 0.5):
        for samples in (100, 500):
            random = np.random.default_rng(9)
            true = float(smallest_difference(changed**0.5, samples))
            if true >= changed:
                continue
            chances = [(changed + true) / 2, (changed - true) / 2, 1 - changed]
            count = 0
            for study in range(STUDIES):
                scores = random.choice([1.0, -1.0, 0.0], samples, p=chances)[:, None]
                count += simultaneous_band(scores, np.ones(samples), seed=study, resamples=RESAMPLES).lows[0] > 0
            rows.append((f"{changed:.0%}", f"{samples}", f"{true:.3f}", f"{count / STUDIES:.1%}"))
    print(f"\nScores: runs that show the planned difference, of {STUDIES} (planned: 80%):\n")
    print("\n".join(table(["samples that change", "samples", "difference", "shown"], rows)))


def _share_below(lacks_S: Floats, differences: float | Floats) -> float:
    return float(np.mean(np.searchsorted(lacks_S, differences))) / len(lacks_S)


if __name__ == "__main__":
    main()
