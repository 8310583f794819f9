"""How far the ends of intervals and bands lie from those of 64 times as many resamples, and over seeds.

    OMP_NUM_THREADS=1 python -m research.interval_studies.resamples docs/results/demo/results.tar.xz

Simulated documents have log-normal sizes and skewed NLL that is tied to them, as in `tests/results/test_intervals.py`;
their bands are over differences at eight lengths. Real ones are the files of the demo's archive.
"""

import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from research.interval_studies.coverage import REFERENCE_TOKENS, lengths_of
from research.published_results.found import FIXED, NAMES, STREAM, read_tasks, table
from sbeval.corpora.archives import unpack
from sbeval.reports.analyse.statistics import simultaneous_band
from sbeval.results.intervals import RESAMPLES, ratio_interval

DRAWS, SEEDS, DIFFERENCES = 20, 10, 8
MANY = 64 * RESAMPLES
Documents = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
"""NLL in nats [C] with tokens [C], and differences [C, K] with tokens [C]."""


def simulated(count: int, seed: int) -> Documents:
    """Draws a text."""
    random = np.random.default_rng(seed)
    log_size = random.normal(0, 0.8, count)
    tokens = 3000 * np.exp(log_size)
    nll = 1.9 + random.gamma(2, 0.3, count) + 0.1 * log_size
    differences = random.normal(0, 0.05, (count, 1)) + random.normal(0, 0.05, (count, DIFFERENCES))
    return nll * tokens, tokens, differences * tokens[:, None], tokens


def ends_of(documents: Documents, resamples: int, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the two ends of an interval of NLL, and the lower and upper end of the widest difference's band."""
    nll, sizes, differences, tokens = documents
    interval = ratio_interval(nll, sizes, seed=seed, resamples=resamples)
    band = simultaneous_band(differences, tokens, seed=seed, resamples=resamples)
    widest = int(np.argmax(band.highs - band.lows))
    return np.array([interval.low, interval.high], float), np.array([band.lows[widest], band.highs[widest]])


def row(name: str, texts: Iterable[Documents]) -> list[str]:
    """Returns moves from many resamples in per cent of the half width and in nats, median and largest, over seeds."""
    shares: tuple[list[float], list[float]] = ([], [])
    nats: tuple[list[float], list[float]] = ([], [])
    for documents in texts:
        many = ends_of(documents, MANY)
        for seed in range(SEEDS):
            for place, ends in enumerate(ends_of(documents, RESAMPLES, seed)):
                moves = np.abs(ends - many[place])
                nats[place].extend(moves)
                shares[place].extend(moves / ((many[place][1] - many[place][0]) / 2))
    return [
        name,
        *(
            f"{np.median(share):.1%}, {max(share):.1%} ({np.median(nat):.4f}, {max(nat):.4f})"
            for share, nat in zip(shares, nats, strict=True)
        ),
    ]


def main(archive: Path) -> None:
    rows = [row(f"{count} simulated", (simulated(count, draw) for draw in range(DRAWS))) for count in (20, 40, 100)]
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as packed:
            unpack(packed, Path(folder))
        sums = read_tasks(Path(folder))[1]
    for (model, task), measured in sums.items():
        if task in (FIXED, STREAM):
            column = measured.lengths.index(REFERENCE_TOKENS)
            text = (measured.nll_nats[:, column], measured.tokens[:, column], *lengths_of(measured))
            rows.append(row(f"`{task}`, {NAMES[model]}", [text]))
    print(f"{RESAMPLES:,} resamples against {MANY:,}, {SEEDS} seeds of each text: median and largest move of an end\n")
    print("\n".join(table(["documents", "interval of NLL, % of half width (nats)", "widest difference's band"], rows)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
