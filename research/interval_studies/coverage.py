"""Coverage of 95 % intervals and bands over documents.

    OMP_NUM_THREADS=1 python -m research.interval_studies.coverage docs/results/demo/results.tar.xz

Simulated documents have log-normal sizes and skewed NLL, which a slope ties to the log of the size. Real ones are drawn
with replacement from the files of the demo's archive, whose own ratio is then the truth.
"""

import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from research.interval_studies.archive import FIXED, NAMES, STREAM, read_tasks, table
from sbeval.corpora.archives import unpack
from sbeval.reports.analyse.statistics import simultaneous_band
from sbeval.reports.read.samples import SumsByDocument
from sbeval.results.intervals import UNEVEN_LOG_DEVIATION, ratio_interval

TRIALS, RESAMPLES = 800, 1000
LOG_DEVIATIONS = (0.1, 0.5, 0.8, 1.0, 1.2, 1.5, 1.8)
REFERENCE_TOKENS = 1024


def simulated() -> list[str]:
    """Coverage of intervals of NLL by how much sizes differ."""
    rows, doubtful = [], []
    for slope in (0.0, 0.1):
        for documents in (20, 60, 200):
            covered = []
            for deviation in LOG_DEVIATIONS:
                random = np.random.default_rng(round(100 * deviation) + documents)
                truth = 2.5 + slope * deviation**2
                inside = 0
                for _ in range(TRIALS):
                    log_size = random.normal(0, deviation, documents)
                    tokens = 3000 * np.exp(log_size)
                    nll = 1.9 + random.gamma(2, 0.3, documents) + slope * log_size
                    found = ratio_interval(nll * tokens, tokens, seed=0, resamples=RESAMPLES)
                    assert found.low is not None
                    assert found.high is not None
                    inside += found.low <= truth <= found.high
                covered.append(inside / TRIALS)
                if deviation > UNEVEN_LOG_DEVIATION:
                    doubtful.append(inside / TRIALS)
            rows.append([f"{slope:g}", str(documents), *(f"{share:.1%}" for share in covered)])
    header = ["NLL by log size", "documents", *(f"log deviation {deviation:g}" for deviation in LOG_DEVIATIONS)]
    return [*table(header, rows), f"Above {UNEVEN_LOG_DEVIATION:g}: {min(doubtful):.1%} to {max(doubtful):.1%}.", ""]


def lengths_of(sums: SumsByDocument) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns differences to the training length [documents, other lengths] and tokens [documents]."""
    reference = sums.lengths.index(REFERENCE_TOKENS)
    same = (sums.tokens == sums.tokens[:, :1]).all(axis=1) & (sums.tokens[:, 0] > 0)
    differences = np.delete(sums.nll_nats - sums.nll_nats[:, [reference]], reference, axis=1)
    return differences[same], sums.tokens[same, 0]


def real(sums: dict[tuple[str, str], SumsByDocument]) -> list[str]:
    """Coverage of bands over lengths on files drawn from a real corpus."""
    rows = []
    for (model, task), own in sums.items():
        if task not in (FIXED, STREAM):
            continue
        differences, tokens = lengths_of(own)
        truth = differences.sum(axis=0) / tokens.sum()
        random = np.random.default_rng(0)
        covered = []
        for documents in (20, 40, 60, 115):
            inside = 0
            for _ in range(TRIALS):
                drawn = random.integers(0, len(tokens), documents)
                band = simultaneous_band(differences[drawn], tokens[drawn], resamples=RESAMPLES)
                inside += bool(((band.lows <= truth) & (truth <= band.highs)).all())
            covered.append(f"{inside / TRIALS:.1%}")
        rows.append([f"`{task}`", NAMES[model], f"{np.log(tokens).std(ddof=1):.2f}", *covered])
    return table(["task", "model", "log deviation of sizes", "20 files", "40", "60", "115"], rows)


def main(archive: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        with tarfile.open(archive) as packed:
            unpack(packed, Path(name))
        sums = read_tasks(Path(name))[1]
    print(f"Intervals of NLL cover, of {TRIALS} draws of simulated documents:\n")
    print("\n".join(simulated()))
    print(f"Bands over all lengths against 1K cover, of {TRIALS} draws of real files:\n")
    print("\n".join(real(sums)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
