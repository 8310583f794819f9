"""`make fuzz N=10000`: the long run of the fuzz tests, in a process that may end without the run ending with it.

`python -m tests.fuzz N [--seed S] [--first F] [--kind typed]` prints a table of kinds and outcomes, and every defect
with its number; `python -m tests.fuzz 1 --first NUMBER --seed S`, with the same kind, runs that case again.
"""

import argparse
import collections
import json
import logging
import os
import subprocess
import sys

from tests.fuzz.kinds import DEFAULT_SEED, KINDS, kind_of, run_number
from tests.fuzz.outcomes import DEFECTS, GOOD


def main() -> None:
    """Runs the cases, or as the inner process some of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("cases", type=int, help="how many")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="default: %(default)s")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: %(default)s)")
    parser.add_argument("--kind", default="", help="run the kinds alone whose names begin so, such as typed")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.cases)
    if options.inner:
        _run_here(numbers, options.seed, options.kind)
    elif _run(numbers, options.seed, options.kind):
        sys.exit(1)


def _run_here(numbers: range, seed: int, group: str) -> None:
    """Runs cases in this process and writes an outcome a line."""
    logging.disable(logging.INFO)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints
    for number in numbers:
        print(json.dumps([number, *run_number(number, seed, group)]), file=out, flush=True)


def _run(numbers: range, seed: int, group: str) -> int:
    """Returns how many cases end in a defect; a process that ends within a case is followed by another behind it."""
    print(f"seed {seed}, cases {numbers.start} to {numbers.stop - 1}", flush=True)
    counts: dict[str, collections.Counter[str]] = {
        kind: collections.Counter() for kind in KINDS if kind.startswith(group)
    }
    next_number = numbers.start
    while next_number < numbers.stop:
        left = f"{numbers.stop - next_number} --first {next_number} --seed {seed} --inner".split()
        command = [sys.executable, "-m", "tests.fuzz", *left, f"--kind={group}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                number, outcome, detail = json.loads(line)
                next_number = number + 1
                _count(counts, kind_of(number, group), number, outcome, detail)
                if next_number % 1000 == 0:
                    print(f"{next_number - numbers.start} cases", file=sys.stderr, flush=True)
        if next_number < numbers.stop:
            ended = f"the process ended with {process.returncode}"
            _count(counts, kind_of(next_number, group), next_number, "crash", ended)
            next_number += 1
    _print_table(counts)
    return sum(counts[kind][outcome] for kind in counts for outcome in DEFECTS)


def _count(counts: dict[str, collections.Counter[str]], kind: str, number: int, outcome: str, detail: str) -> None:
    counts[kind][outcome] += 1
    if outcome not in GOOD:
        print(f"case {number} ({kind}): {outcome}\n{detail}", flush=True)


def _print_table(counts: dict[str, collections.Counter[str]]) -> None:
    columns = (*GOOD, *DEFECTS)
    width = max(map(len, KINDS))
    print(" " * width, *(f"{column:>10}" for column in columns))
    for kind, found in [*counts.items(), ("all", sum(counts.values(), collections.Counter()))]:
        print(f"{kind:{width}}", *(f"{found[column]:10}" for column in columns))


if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    main()
