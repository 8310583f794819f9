"""The tables of results that a run prints: rows by context length, not one row for each number as in lm-eval."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sbeval.results.intervals import MINIMUM_CLUSTERS, decimals
from sbeval.results.records import RELATIVE_ERROR, parse_metric_key

_TASKS_ABREAST = 3
_LEAST_DIGITS = 3
_EXACT = "exact_match"
_MORE_SCORES = ("found", "said_absent", "invented", "soft_match", "first_step", RELATIVE_ERROR)
"""Metrics beside scores and exact answers that have a row of their own."""
_NONE = "-"


def compact_table(
    results: Mapping[str, Any], lm_eval_table: Callable[[dict[str, Any]], str], column: str = "results"
) -> str:
    """Returns the printed tables of a run.

    NLL has a row for each context length, scores have a row for each task. Results without context lengths are in
    lm-eval's own table.

    Args:
        results: the results of lm-eval.
        lm_eval_table: makes lm-eval's table from results.
        column: "results", or "groups". Groups that are also among the results are not shown twice.
    """
    rows: Mapping[str, Mapping[str, Any]] = results[column]
    if column == "groups":
        rows = {name: row for name, row in rows.items() if name not in results["results"]}
    nll = {name: values for name, row in rows.items() if (values := _by_length(row, "nll"))}
    scores = {name: shares for name, row in rows.items() if name not in nll and (shares := _scores(name, row))}
    tables = []
    names = list(nll)
    for start in range(0, len(names), _TASKS_ABREAST):
        side_by_side = names[start : start + _TASKS_ABREAST]
        tables.append(_nll_table({name: (nll[name], _by_length(rows[name], "nll_ci95")) for name in side_by_side}))
    if scores:
        tables.append(_score_table({title: values for shares in scores.values() for title, values in shares.items()}))
    if column == "results" and (unfit := _unfit_table(results.get("configs") or {}, rows)):
        tables.append(unfit)
    without_lengths = {name: row for name, row in rows.items() if name not in nll and name not in scores}
    # keys of numbers are "metric,filter"; a group without numbers has no such key
    if rest := {name: row for name, row in without_lengths.items() if any("," in key for key in row)}:
        tables.append(lm_eval_table({**results, column: rest}))
    return "\n\n".join(tables)


def _by_length(row: Mapping[str, Any], metric: str) -> dict[int, Any]:
    """Returns the values of a metric by context length, ascending."""
    parsed = ((parse_metric_key(key), value) for key, value in row.items())
    values = ((key[1], value) for key, value in parsed if key is not None and key[0] == metric)
    return dict(sorted(values, key=lambda pair: pair[0]))


def _scores(name: str, row: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    """Returns a task's scores or shares of exact answers; maps the title of a row to its values by context length."""
    metrics = dict.fromkeys(parsed[0] for key in row if (parsed := parse_metric_key(key)))
    shown = [metric for metric in metrics if metric in _MORE_SCORES or _is_score(metric)]
    return {f"{name}{_metric_words(metric)}": _by_length(row, metric) for metric in shown}


def _is_score(metric: str) -> bool:
    return metric in ("score", _EXACT) or (metric.startswith(f"{_EXACT}_") and not metric.endswith("_ci95"))


def _metric_words(metric: str) -> str:
    """Returns the words behind a task's name in the title of a row; "" for its main score."""
    if metric in ("score", _EXACT):
        return ""
    return f", {metric.removeprefix(_EXACT).removeprefix('_').replace('_', ' ')}"


def _nll_table(tasks: Mapping[str, tuple[Mapping[int, Any], Mapping[int, Any]]]) -> str:
    lengths = sorted({length for values, _ in tasks.values() for length in values})
    digits = {name: _digits(ends.values()) for name, (_, ends) in tasks.items()}
    lines = [["context", *tasks]]
    for length in lengths:
        cells = [
            _with_interval(values.get(length), ends.get(length), digits[name]) for name, (values, ends) in tasks.items()
        ]
        lines.append([f"{length:,}", *cells])
    text = f"NLL in nats per token [95% interval], lower is better\n{_aligned(lines)}"
    if any(ends.get(length) is None for values, ends in tasks.values() for length in values):
        text += f"\nno interval: it needs {MINIMUM_CLUSTERS} documents"
    return text


def _score_table(tasks: Mapping[str, Mapping[int, Any]]) -> str:
    lengths = sorted({length for values in tasks.values() for length in values})
    header = ["score at context", *(f"{length:,}" for length in lengths)]
    lines = [[name, *(_number(values.get(length)) for length in lengths)] for name, values in tasks.items()]
    return _aligned([header, *lines], left=1)


def _unfit_table(configs: Mapping[str, Any], tasks: Iterable[str]) -> str:
    """Returns the table of samples that were left out or cut, since their prompts do not fit; "" if none was."""
    counts: dict[str, dict[int, int]] = {}
    for task in tasks:
        metadata = (configs.get(task) or {}).get("metadata")
        record = metadata.get("sbeval") if isinstance(metadata, Mapping) else None
        for field, words in (("left_out_samples", "left out"), ("cut_samples", "cut")):
            by_length = (record or {}).get(field) or {}
            if any(by_length.values()):
                counts[f"{task}, {words}"] = {int(length): count for length, count in by_length.items()}
    if not counts:
        return ""
    lengths = sorted({length for by_length in counts.values() for length in by_length})
    header = ["samples that do not fit", *(f"{length:,}" for length in lengths)]
    lines = [
        [name, *(f"{row[length]:,}" if length in row else _NONE for length in lengths)] for name, row in counts.items()
    ]
    return _aligned([header, *lines], left=1)


def _digits(intervals: Iterable[Any]) -> int:
    """Returns the decimals that show two significant digits of the narrowest interval's width, at least three."""
    widths = [float(ends[1]) - float(ends[0]) for ends in intervals if _is_interval(ends)]
    return max((decimals(width, least=_LEAST_DIGITS) for width in widths), default=_LEAST_DIGITS)


def _is_interval(ends: Any) -> bool:
    return isinstance(ends, Sequence) and len(ends) == 2


def _with_interval(value: Any, ends: Any, digits: int) -> str:
    if not _is_interval(ends):
        return _number(value, digits)
    return f"{_number(value, digits)} [{_number(ends[0], digits)}, {_number(ends[1], digits)}]"


def _number(value: Any, digits: int = _LEAST_DIGITS) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) and math.isfinite(value) else _NONE


def _aligned(lines: Sequence[Sequence[str]], left: int = 0) -> str:
    """Returns the lines as text with aligned columns: the first `left` columns flush left, the rest flush right."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]

    def row(cells: Iterable[str]) -> str:
        placed = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "   ".join(placed).rstrip()

    return "\n".join(map(row, lines))
