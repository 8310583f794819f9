"""What does the start-up line of sbeval add to every start of Python?

Two fresh virtual environments, one with `sbeval_autoload.pth`, take turns to run `python -c pass`; the difference of
each pair is one measurement. Run: `python benchmarks/startup.py [PAIRS]`.
"""

import argparse
import random
import statistics
import subprocess
import tempfile
import time
import venv
from pathlib import Path

from sbeval import autoload

RESAMPLES = 2000


def main(pairs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain, with_line = Path(folder, "plain"), Path(folder, "with_line")
        for environment in (plain, with_line):
            venv.create(environment, symlinks=True)
        (site_packages,) = with_line.glob("lib/python*/site-packages")
        autoload.install(site_packages)
        measure_ms(plain)
        measure_ms(with_line)
        without, added = [], []
        for pair in range(pairs):
            order = (plain, with_line) if pair % 2 else (with_line, plain)
            took = {environment: measure_ms(environment) for environment in order}
            without.append(took[plain])
            added.append(took[with_line] - took[plain])
    low, high = interval95(added)
    print(f"python -c pass: median {statistics.median(without):.2f} ms over {pairs} interleaved pairs")
    print(f"the line adds:  median {statistics.median(added):.2f} ms, 95 % interval {low:.2f} to {high:.2f} ms")


def measure_ms(environment: Path) -> float:
    start = time.perf_counter()
    subprocess.run([environment / "bin" / "python", "-c", "pass"], check=True)
    return (time.perf_counter() - start) * 1000


def interval95(values: list[float]) -> tuple[float, float]:
    """Bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=int, nargs="?", default=300, help="how many pairs to time")
    main(parser.parse_args().pairs)
