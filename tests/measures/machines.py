"""Runs the tests that multiply matrices as other machines would, and prints a table; `make test-machines`.

Rows are other instructions, other libraries' choices, other numbers of threads, and weights elsewhere in memory. What
a processor lacks, its libraries leave out by themselves.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = {
    "plain": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "compatible": {"MKL_CBWR": "COMPATIBLE"},
    "shifted": {"SBEVAL_TEST_MEMORY": "shifted"},
    "plain and shifted": {"ATEN_CPU_CAPABILITY": "default", "SBEVAL_TEST_MEMORY": "shifted"},
    "2 threads": {"OMP_NUM_THREADS": "2"},
    "4 threads": {"OMP_NUM_THREADS": "4"},
}
TESTS = [f"tests/{room}" for room in ("attention", "checkpoints", "models", "scoring", "model_adapters")]
COUNTS = re.compile(r"(\d+) (passed|failed|error)")


def main() -> None:
    """Runs the rows that were asked for; ends with 1 if a test failed in any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"which of: {', '.join(ROWS)}; all, if none is named")
    parser.add_argument("--workers", default="2", help="processes of pytest")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files or folders")
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.rows) - set(ROWS))
    if unknown:
        parser.error(f"expected rows among {', '.join(ROWS)}, found {', '.join(unknown)}")
    results = {row: run(row, chosen.workers, chosen.tests) for row in chosen.rows or ROWS}
    print(f"\n{'row':20}{'passed':>8}{'failed':>8}{'seconds':>9}  environment")
    for row, (passed, failed, seconds) in results.items():
        environment = " ".join(f"{name}={value}" for name, value in ROWS[row].items())
        print(f"{row:20}{passed:8}{failed:8}{seconds:9.0f}  {environment}")
    sys.exit(any(failed or not passed for passed, failed, _ in results.values()))


def run(row: str, workers: str, tests: list[str]) -> tuple[int, int, float]:
    """Returns how many tests passed and failed in a row, and the seconds it took; failures are printed as they are."""
    print(f"{row} ...", flush=True)
    start = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", workers, "--no-header", *tests],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | os.environ | ROWS[row],
        stdout=subprocess.PIPE,
        text=True,
    )
    counts = {kind: int(number) for number, kind in COUNTS.findall(ended.stdout.strip().rpartition("\n")[2])}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    if ended.returncode:
        print(ended.stdout)
    return counts.get("passed", 0), failed or int(ended.returncode != 0), time.monotonic() - start


if __name__ == "__main__":
    main()
