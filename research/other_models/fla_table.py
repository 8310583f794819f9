"""Writes the table of flash-linear-attention's classes into docs/reference/formats.md, from the rows of runs.

    python -m research.other_models.fla_table build/fla_models/rows.jsonl

Rows are what `research.other_models.fla_models` leaves. Of several files a class takes the best of its rows, numbers
before a reason why not, and either before a run that did not finish; the rows are kept in fla_rows.jsonl beside this
file, which can be named among the files so that a run of some classes leaves the others as they were.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "formats.md"
ROWS = Path(__file__).with_name("fla_rows.jsonl")
BEGIN, END = "<!-- written by research/other_models/fla_table.py -->", "<!-- end of what it wrote -->"
NOT_FINISHED = "not finished"
MISSING = {r"flash.attn|flash attention": "needs flash-attn", r"mamba_ssm": "needs mamba_ssm"}
"""Packages that a class asks for, by what it says."""


class Row(NamedTuple):
    """The result of one class.

    Attributes:
        name: the class without `ForCausalLM`.
        model_type: its configuration's; empty if no model could be made.
        loaded: its format and whose class it is, or "no: " and why not.
        scored: numbers, or "no: " and why not, or "not finished" and why.
        generated: the same.
        seconds: what it took in all.
        where: versions, device and context length.
    """

    name: str
    model_type: str
    loaded: str
    scored: str
    generated: str
    seconds: int
    where: str


def read(files: Iterable[Path]) -> list[Row]:
    """Returns one row a class, in the order of their names."""
    best: dict[str, Row] = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = Row(**json.loads(line))
            other = best.setdefault(row.name, row)
            scored, generated = (min(pair, key=_rank) for pair in zip(row[3:5], other[3:5], strict=True))
            newer = min((row, other), key=lambda one: _rank(one.scored) + _rank(one.generated))
            best[row.name] = newer._replace(scored=scored, generated=generated)
    return [best[name] for name in sorted(best, key=str.lower)]


def _rank(said: str) -> int:
    return 2 if said.startswith(NOT_FINISHED) else int(said.startswith("no: "))


def outcome(said: str) -> str:
    """Returns "yes" for numbers, "not finished", or the reason in few words."""
    rank = _rank(said)
    if rank != 1:
        return NOT_FINISHED if rank else "yes"
    reason = said.removeprefix("no: ")
    return next((short for found, short in MISSING.items() if re.search(found, reason, re.IGNORECASE)), reason)


def table(rows: Sequence[Row]) -> str:
    """Returns the table, classes with the same outcome in one line, those that ran first."""
    classes: dict[tuple[str, str], list[str]] = defaultdict(list)
    ranks: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        both = outcome(row.scored), outcome(row.generated)
        classes[both].append(row.name)
        ranks[both] = sorted((_rank(row.scored), _rank(row.generated)))
    lines = [f"With {'; and '.join(sorted({row.where for row in rows}))}:", ""]
    lines += ["| scored | generated | classes |", "| --- | --- | --- |"]
    lines += [f"| {' | '.join(both)} | {', '.join(classes[both])} |" for both in sorted(classes, key=ranks.__getitem__)]
    return "\n".join(lines)


def with_table(page: str, rows: Sequence[Row]) -> str:
    """Returns the page with the table between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"Expected {BEGIN} and {END} in the page, found no such pair: put them where the table goes.")
    return f"{before}{begin}\n\n{table(rows)}\n\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+", help="rows.jsonl of runs")
    rows = read(parser.parse_args(arguments).rows)
    ROWS.write_text("".join(json.dumps(row._asdict()) + "\n" for row in rows), encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
