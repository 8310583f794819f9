"""Metrics of lm-eval's own tasks where an answer is missing: NaN, since a metric would count it as a wrong one.

NaN among the scores of choices makes the first of them the most probable, and an empty text is a wrong answer. So a
task's metrics are computed as always, then replaced by NaN for documents with a missing answer, and so are the means
over them. Tasks of this project do this themselves, length by length.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sbeval.scoring.non_finite import NoText


class Null(float):
    """NaN that stands for a metric of a document without an answer."""

    def __new__(cls, value: float = math.nan) -> "Null":
        """Makes one."""
        return super().__new__(cls, value)


class _NullAnswers(list[Any]):
    """Several answers to one request, one of which is missing."""


def record_nulls(task_class: type[Any]) -> None:
    """Makes lm-eval's tasks record NaN for documents without an answer; a second call does nothing.

    Args:
        task_class: lm-eval's, whose `apply_filters` runs between a model's answers and a task's metrics.
    """
    original = task_class.apply_filters
    if hasattr(original, "records_nulls"):
        return

    @functools.wraps(original)
    def apply_filters(task: Any) -> Any:
        found = original(task)
        if _mark_answers(task) and not getattr(task, "reads_null", False):
            task.process_results = _null_for_null(task.process_results)
        if not getattr(task, "reads_null", False):
            task.aggregation = functools.partial(_null_among_null, task.aggregation)
        return found

    apply_filters.records_nulls = True  # type: ignore[attr-defined]
    task_class.apply_filters = apply_filters


def is_null(answer: Any) -> bool:
    """Returns whether an answer, or the score of one, is missing."""
    if isinstance(answer, tuple) and answer:
        return is_null(answer[0])
    return isinstance(answer, NoText | _NullAnswers) or (isinstance(answer, float) and math.isnan(answer))


def _mark_answers(task: Any) -> bool:
    """Marks filtered answers whose request has none, since filters make plain texts; returns whether there are any."""
    marked = [instance for instance in task.instances if any(map(is_null, instance.resps))]
    for instance in marked:
        for name, filtered in instance.filtered_resps.items():
            if isinstance(filtered, str):
                none = next(answer for answer in instance.resps if is_null(answer))
                instance.filtered_resps[name] = none
            elif isinstance(filtered, list):
                instance.filtered_resps[name] = _NullAnswers(filtered)
    return bool(marked)


def _null_for_null(process: Callable[..., Mapping[str, Any]]) -> Callable[..., Mapping[str, Any]]:
    @functools.wraps(process)
    def process_results(document: Any, results: Sequence[Any]) -> Mapping[str, Any]:
        if not any(map(is_null, results)):
            return process(document, results)
        return dict.fromkeys(process(document, [_stand_in(answer) for answer in results]), Null())

    return process_results


def _stand_in(answer: Any) -> Any:
    """Returns an answer of the same kind that metrics can be computed from."""
    if isinstance(answer, tuple) and is_null(answer):
        return (0.0, *answer[1:])
    return 0.0 if isinstance(answer, float) and is_null(answer) else answer


def _null_among_null(aggregation: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    return {name: _NullAware(function) for name, function in aggregation().items()}


class _NullAware:
    """An aggregation that is NaN where a document's metric is missing.

    It equals the function it calls until it has met such a metric: lm-eval looks the standard error up by function.
    """

    def __init__(self, function: Callable[[Sequence[Any]], Any]) -> None:
        self._function = function
        self._met_null = False
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, items: Sequence[Any]) -> Any:
        self._met_null = any(isinstance(item, Null) for item in items)
        return math.nan if self._met_null else self._function(items)

    def __eq__(self, other: object) -> bool:
        return not self._met_null and self._function == other

    def __hash__(self) -> int:
        return hash(self._function)
