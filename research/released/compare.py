"""Compares a checkpoint's results files with the paper's tables: each published value agrees or differs.

    python -m research.released.compare results/released

The paper and whoever runs this put the same questions to the same weights, so a difference does not come from the
choice of questions: it comes from rounding, from prompts that a later lm-eval words otherwise, or from an error. So a
share of right answers may differ by one standard error, which 19 runs of 20 stay within if one answer in sixteen is
tipped where two of five are right, and perplexity by a hundredth of itself; both besides by half a unit of the last
digit that the paper prints.
"""

import argparse
import math
import sys
from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from sbeval import paper
from sbeval.errors import UserError
from sbeval.reports import load_results
from sbeval.reports.kinds.suite import published_tables
from sbeval.reports.read.results import Results

RELEASED = "3B Stick-breaking"
_PRINTED_TO = 0.05
_SHARE_OF_PERPLEXITY = 0.01
_PERPLEXITY, _AVERAGE = "Wikitext", "Avg."


class Comparison(NamedTuple):
    """One published value and the measured one.

    Attributes:
        measured: in the column's own unit, None where nothing was.
        allowed: by how much it may differ.
    """

    table: int
    column: str
    published: float
    measured: float | None
    allowed: float

    @property
    def verdict(self) -> str:
        """Returns "agree", "differ" or "not measured"."""
        if self.measured is None:
            return "not measured"
        return "agree" if abs(self.measured - self.published) <= self.allowed else "differ"


def compare(results: Results, *, model: str, row: str = RELEASED) -> list[Comparison]:
    """Returns each of the paper's values in a row beside the model's; runs with a `--limit` count as not made.

    Raises:
        UserError: the paper has no such row, or the files no such model.
    """
    rows = sorted({value.row for value in paper.published_values() if value.table > 1})
    if row not in rows:
        raise UserError(f"Expected one of the paper's rows {', '.join(rows)}, found {row!r}: name one with --row.")
    labels = [known.label for known in results.models]
    if model not in labels:
        raise UserError(f"Expected one of the models {', '.join(labels)}, found {model!r}: name one with --model.")
    whole = results.measurements[results.measurements["limit_samples"].isna()]
    values = _cells(whole, model)
    errors = _cells(whole.assign(value=whole["stderr"]), model)
    comparisons = [
        Comparison(table=1, column=column, published=published, measured=_fact(results, model, column), allowed=0.0)
        for column, published in _row(1, row.split()[0]).items()
        if column in ("parameters", "training length")
    ]
    for table in sorted({column.table for column in paper.measured_columns()}):
        errors_here = [errors.get((table, column), math.nan) for column in _row(table, row) if _is_share(column)]
        for column, published in _row(table, row).items():
            value, error = values.get((table, column)), errors.get((table, column), math.nan)
            if column == _PERPLEXITY:
                error = _SHARE_OF_PERPLEXITY * published
            elif column == _AVERAGE:
                error = math.hypot(*errors_here) / len(errors_here)
            allowed = _PRINTED_TO + (0.0 if math.isnan(error) else error)
            comparisons.append(Comparison(table, column, published, value, allowed))
    return comparisons


def _is_share(column: str) -> bool:
    return column not in (_PERPLEXITY, _AVERAGE)


def _row(table: int, row: str) -> dict[str, float]:
    return {value.column: value.value for value in paper.published_values() if (value.table, value.row) == (table, row)}


def _cells(measurements: pd.DataFrame, model: str) -> Mapping[tuple[int, str], float]:
    tables = published_tables(measurements)
    return {(table.number, name): cell for table in tables for name, cell in table.measured.get(model, {}).items()}


def _fact(results: Results, model: str, column: str) -> float | None:
    record = results.model(model).record
    return record.parameters if column == "parameters" else record.training_length_tokens


def written(comparisons: list[Comparison]) -> str:
    """Returns the comparisons as a table, and one line that counts them."""
    lines = [f"{'table':<6} {'column':<16} {'paper':>13} {'measured':>13} {'difference':>11} {'allowed':>8}"]
    for one in comparisons:
        places = 1 if one.table > 1 else 0
        measured = difference = ""
        if one.measured is not None:
            more = 2 * places  # so that a reader sees how near to the edge it is
            measured, difference = f"{one.measured:,.{more}f}", f"{one.measured - one.published:+,.{more}f}"
        cells = f"{one.table:<6} {one.column:<16} {one.published:>13,.{places}f} {measured:>13} {difference:>11}"
        lines.append(f"{cells} {one.allowed:>8.2f}  {one.verdict}")
    counts = {name: sum(one.verdict == name for one in comparisons) for name in ("agree", "differ", "not measured")}
    return "\n".join([*lines, "", ", ".join(f"{count} {name}" for name, count in counts.items())])


def main() -> int:
    """Prints the comparison; the exit code is 1 if a value differs."""
    parser = argparse.ArgumentParser(description="Results files beside the paper's tables: agree or differ.")
    parser.add_argument("results", nargs="+", help="results files of lm-eval, or folders that hold some")
    parser.add_argument("--row", default=RELEASED, help="row of the paper's tables (default: %(default)s)")
    parser.add_argument("--model", help="label of a model in the files (default: the only one)")
    given = parser.parse_args()
    try:
        results = load_results(given.results)
        labels = [known.label for known in results.models]
        if given.model is None and len(labels) > 1:
            raise UserError(f"Expected results of one model, found {', '.join(labels)}: name one with --model.")
        comparisons = compare(results, model=given.model or labels[0], row=given.row)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    print(written(comparisons))
    return int(any(one.verdict == "differ" for one in comparisons))


if __name__ == "__main__":
    raise SystemExit(main())
