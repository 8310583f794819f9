"""The part of a comparison that is scored sample by sample: RULER and ordinary tasks."""

import dataclasses
import math

from sbeval.reports.analyse.paired import ruler_differences, task_difference
from sbeval.reports.analyse.statistics import CONFIDENCE
from sbeval.reports.analyse.suite import SuiteRow, divided_tasks, suite_rows
from sbeval.reports.read.results import Results
from sbeval.reports.read.samples import SAMPLE_SCORES, MetricKey, SampleScores
from sbeval.results.intervals import MINIMUM_CLUSTERS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComparedScore:
    """The candidate minus the reference on the same samples.

    Attributes:
        group: "RULER, mean over N tasks", or "ordinary tasks".
        name: task and metric; empty for RULER's mean.
        context_length_tokens: None for a task without one, and for the mean over octaves.
        estimate: paired difference.
        low: lower end of the interval, simultaneous over its group.
        high: its upper end.
        samples: how many samples both answered.
        higher_is_better: which way is better.
    """

    group: str
    name: str
    context_length_tokens: int | None
    estimate: float
    low: float
    high: float
    samples: int
    higher_is_better: bool

    @property
    def worse(self) -> bool:
        """Whether the whole interval is on the worse side of zero."""
        return self.high < 0 if self.higher_is_better else self.low > 0

    @property
    def better(self) -> bool:
        """Whether the whole interval is on the better side of zero."""
        return self.low > 0 if self.higher_is_better else self.high < 0

    def worse_by(self, least_effect: float) -> bool:
        """Whether the whole interval is on the worse side, and further from zero than a least effect."""
        return self.high < -least_effect if self.higher_is_better else self.low > least_effect


def compare_scores(
    first: tuple[Results, str], second: tuple[Results, str], *, confidence: float = CONFIDENCE
) -> tuple[list[ComparedScore], list[str]]:
    """Compares two models' sample scores; each is given as the results it stands in and its label.

    Args:
        first: the reference.
        second: the candidate.
        confidence: how often all intervals of a group hold at once.

    Returns:
        The comparisons, and what could not be compared and why.
    """
    own, base = _samples(*second), _samples(*first)
    differences, tasks = ruler_differences(own, base, confidence=confidence)
    known = {length: one for length, one in differences.items() if not math.isnan(one.low)}
    compared = [
        ComparedScore(
            group=f"RULER, mean over {len(tasks)} {'task' if len(tasks) == 1 else 'tasks'}",
            name="",
            context_length_tokens=length,
            estimate=one.estimate,
            low=one.low,
            high=one.high,
            samples=one.samples,
            higher_is_better=True,
        )
        for length, one in known.items()
    ]
    obstacles = [_too_few("RULER", one.samples) for one in list(differences.values())[:1] if math.isnan(one.low)]
    found, more = _ordinary(first, second, 1 - confidence)
    return compared + found, obstacles + more


def _ordinary(
    first: tuple[Results, str],
    second: tuple[Results, str],
    level: float,
) -> tuple[list[ComparedScore], list[str]]:
    divided = divided_tasks(first[0]) | divided_tasks(second[0])
    references = {_key(row): row for row in suite_rows(first[0], divided) if first[1] in row.cells}
    pairs = [
        (row, references[_key(row)])
        for row in suite_rows(second[0], divided)
        if _key(row) in references and second[1] in row.cells and row.higher_is_better is not None
    ]
    logged = [(row, other) for row, other in pairs if second[1] in row.samples and first[1] in other.samples]
    obstacles = [
        f"{row.name}: not compared, because samples were not logged."
        for row, other in pairs
        if (row, other) not in logged
    ]
    compared = []
    for row, other in logged:
        metric: MetricKey = (row.metric, row.filter_name)
        found = task_difference(
            row.samples[second[1]], other.samples[first[1]], metric, confidence=1 - level / len(logged)
        )
        if found is None:
            obstacles.append(f"{row.name}: not compared, because the runs share no question.")
        elif math.isnan(found.low):
            obstacles.append(_too_few(row.name, found.samples))
        else:
            compared.append(
                ComparedScore(
                    group="ordinary tasks",
                    name=row.name,
                    context_length_tokens=None,
                    estimate=found.estimate,
                    low=found.low,
                    high=found.high,
                    samples=found.samples,
                    higher_is_better=bool(row.higher_is_better),
                )
            )
    return compared, obstacles


def _key(row: SuiteRow) -> tuple[str, str, str, str]:
    return (row.name, row.task, row.metric, row.filter_name)


def _too_few(name: str, samples: int) -> str:
    return f"{name}: not compared, because only {samples} samples are shared and intervals need {MINIMUM_CLUSTERS}."


def _samples(results: Results, label: str) -> dict[str, SampleScores]:
    return {task: scores for (own, task), scores in results[SAMPLE_SCORES].items() if own == label}
