"""How often the verdicts of `sbeval report --compare A B --gate FILE` are wrong, and how often there are any.

    OMP_NUM_THREADS=1 python -m research.interval_studies.gates

A policy is simulated for 1, 3 and 6 tasks. A task of perplexity has three rules, for 1K, for 16K and for the mean over
octaves beyond 1K, on forty documents and seven lengths from 256 to 16K; every third task is one of right and wrong
answers, 1,000 samples and one rule. Changes are drawn at one distance from what the rules allow, all in one direction.
Verdicts are those of `Judged`, intervals those of the command with fewer resamples.
"""

import numpy as np

from research.interval_studies.guard import DOCUMENTS, RESAMPLES, SPREAD
from research.published_results.found import table
from sbeval.policy import Rule
from sbeval.reports.analyse.statistics import CONFIDENCE, change_weights, graded_errors, simultaneous_band
from sbeval.reports.judge import Judged

DRAWS = 1000
LENGTHS = [256 << step for step in range(7)]
TRAINED_TOKENS = 1024
SAMPLES, CHANGED_ANSWERS = 1000, 0.1
"""Samples of a task of answers, and the share of them that one of the two models alone has right."""
LIMIT_NATS, LIMIT_SHARE = 0.05, 0.05


def perplexity_verdicts(random: np.random.Generator, beyond_limit: float, confidence: float) -> list[str]:
    """Draws two models on one text, of which the second is worse by what each rule allows and more."""
    weights_K = change_weights(LENGTHS, TRAINED_TOKENS)
    assert weights_K is not None
    true_K = np.where(np.asarray(LENGTHS) <= TRAINED_TOKENS, 1, 2) * LIMIT_NATS + beyond_limit
    limits = [LIMIT_NATS, 2 * LIMIT_NATS, float(true_K @ weights_K) - beyond_limit]
    tokens = np.maximum(20, random.normal(500, 50, DOCUMENTS)).round()
    shared = random.normal(0, SPREAD, (DOCUMENTS, 1))
    change_CK = true_K + shared + random.normal(0, SPREAD, (DOCUMENTS, len(LENGTHS)))
    nats = np.column_stack([change_CK, change_CK @ weights_K]) * tokens[:, None]
    band = simultaneous_band(nats, tokens, confidence=confidence, resamples=RESAMPLES)
    places = [LENGTHS.index(TRAINED_TOKENS), len(LENGTHS) - 1, len(LENGTHS)]
    return [verdict(limit, band.lows[place], band.highs[place]) for limit, place in zip(limits, places, strict=True)]


def answer_verdicts(random: np.random.Generator, beyond_limit: float, confidence: float) -> list[str]:
    """Draws two models on one task of right and wrong answers, the second worse by the limit and more."""
    change = LIMIT_SHARE + beyond_limit
    shares = [(CHANGED_ANSWERS + change) / 2, (CHANGED_ANSWERS - change) / 2]
    drawn = random.choice([1.0, -1.0, 0.0], (SAMPLES, 1), p=[*shares, 1 - CHANGED_ANSWERS])
    ones = np.ones(SAMPLES)
    least = graded_errors(drawn, ones)
    options = {"confidence": confidence, "resamples": RESAMPLES, "least_errors_K": least}
    band = simultaneous_band(drawn, ones, **options)  # type: ignore[arg-type]
    return [verdict(LIMIT_SHARE, band.lows[0], band.highs[0])]


def verdict(limit: float, low: float, high: float) -> str:
    """Judges one change by a rule."""
    return Judged(rule=Rule(task="x", largest_change=limit), name="x", low=low, high=high, allowed=limit).verdict


def verdicts(random: np.random.Generator, tasks: int, beyond_limit: float) -> list[str]:
    """Draws one policy's verdicts, as `gate` forms them."""
    confidence = 1 - (1 - CONFIDENCE) / tasks
    kinds = [answer_verdicts if number % 3 == 2 else perplexity_verdicts for number in range(tasks)]
    return [one for kind in kinds for one in kind(random, beyond_limit, confidence)]


def shares(tasks: int, beyond_limit: float) -> dict[str, float]:
    """Returns how often some rule fails, some passes, and all pass."""
    random = np.random.default_rng(tasks)
    drawn = [verdicts(random, tasks, beyond_limit) for _ in range(DRAWS)]
    return {
        "fails": float(np.mean(["fail" in one for one in drawn])),
        "passes": float(np.mean(["pass" in one for one in drawn])),
        "all pass": float(np.mean([set(one) == {"pass"} for one in drawn])),
    }


def main() -> None:
    rows, power = [], []
    for tasks in (1, 3, 6):
        at_limit = shares(tasks, 0.0)
        rows.append([str(tasks), f"{at_limit['fails']:.1%}", f"{at_limit['passes']:.1%}"])
        cells = [shares(tasks, distance) for distance in (-0.05, -0.03, 0.03, 0.05)]
        power.append([str(tasks), *(f"{cell['all pass' if n < 2 else 'fails']:.1%}" for n, cell in enumerate(cells))])
    print(f"Every change exactly at what its rule allows, of {DRAWS} draws:\n")
    print("\n".join(table(["tasks", "some rule fails", "some rule passes"], rows)))
    print(f"Every change at a distance from what its rule allows, of {DRAWS} draws:\n")
    header = ["tasks", "all pass at 0.05 less", "at 0.03 less", "the file fails at 0.03 more", "at 0.05 more"]
    print("\n".join(table(header, power)))


if __name__ == "__main__":
    main()
