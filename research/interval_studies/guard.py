"""How often `sbeval report --compare A B --fail-if-worse` fails models that are equally good, and seeds of one recipe.

    OMP_NUM_THREADS=1 python -m research.interval_studies.guard docs/results/extrapolation/results.tar.xz

Equal models are simulated: forty documents a group, seven lengths and the mean over octaves, differences of mean zero.
Seeds are those of the archive, three of stick-breaking and three of RoPE, in all twelve orders of two, on `stream` and
`fixed_target`. What the guard still catches is simulated with the same documents and a candidate that is worse by a
shift.
"""

import itertools
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from research.published_results.found import FIXED, STREAM, read_tasks, table
from sbeval.corpora.archives import unpack
from sbeval.policy import FAIL_IF_WORSE, read_policy
from sbeval.reports.analyse.statistics import simultaneous_band
from sbeval.reports.judge import judge
from sbeval.reports.pairs import Measured, effective_differences, text_differences

DRAWS, RESAMPLES, DOCUMENTS, LENGTHS = 500, 2000, 40, 7
SEEDS = ("", "_seed1", "_seed2")
(RULE,) = read_policy(FAIL_IF_WORSE)
LEAST_EFFECT = RULE.largest_change
TRAINED_TOKENS = 1024
JOINT = 1 - 0.05 / 3
"""How often each group holds of two protocols and an effective length."""
SPREAD = 0.05
"""Standard deviation over documents of what a difference shares over lengths, and of what it does not; nats a token."""
BEYOND_K = np.array([0, 0, -1, 0, 0, 0, 0]) + np.array([0, 0, 1, 2, 2, 2, 1]) / 8
"""The mean over octaves from the third length on, less the third."""
SHIFTS = (0.03, 0.05, 0.1)
Ends = dict[float, float]


def lowest_ends(random: np.random.Generator, levels: Sequence[float], worse: Sequence[NDArray[np.float64]]) -> Ends:
    """Draws one comparison: the highest lower end over groups, lengths and the mean over octaves, at each level.

    Args:
        random: draws documents and differences.
        levels: how often each group's band holds.
        worse: by how much the candidate is worse at each length, in nats a token; one array a group.
    """
    highest = dict.fromkeys(levels, -np.inf)
    for true in worse:
        tokens = np.maximum(20, random.normal(500, 50, DOCUMENTS)).round()
        shared = random.normal(0, SPREAD, (DOCUMENTS, 1))
        nats = (true + shared + random.normal(0, SPREAD, (DOCUMENTS, LENGTHS))) * tokens[:, None]
        nats = np.column_stack([nats, nats @ BEYOND_K])
        for level in levels:
            band = simultaneous_band(nats, tokens, confidence=level, resamples=RESAMPLES)
            highest[level] = max(highest[level], float(band.lows.max()))
    return highest


def equal_models() -> list[str]:
    """Share of comparisons of equal models in which some band lies above zero, or above the least effect."""
    rows = []
    for groups in (1, 3, 6):
        random = np.random.default_rng(groups)
        failed = {"each group at 95%": 0, "all groups at once": 0, f"at once, beyond {LEAST_EFFECT:g}": 0}
        alone, at_once = 0.95, 1 - 0.05 / groups
        for _ in range(DRAWS):
            ends = lowest_ends(random, (alone, at_once), [np.zeros(LENGTHS)] * groups)
            own, joint = ends[alone], ends[at_once]
            for name, hit in zip(failed, (own > 0, joint > 0, joint > LEAST_EFFECT), strict=True):
                failed[name] += hit
        rows.append([str(groups), *(f"{count / DRAWS:.1%}" for count in failed.values())])
    return table(["groups", *failed], rows)


def power() -> list[str]:
    """Share of comparisons that fail a candidate that is worse in one of the groups, as the command decides."""
    everywhere, longest = np.ones(LENGTHS), np.eye(LENGTHS)[-1]
    rows = []
    for groups in (1, 3, 6):
        level = 1 - 0.05 / groups
        for where, lengths in {"every length": everywhere, "the longest length": longest}.items():
            caught = []
            for shift in SHIFTS:
                random = np.random.default_rng(groups)
                worse = [shift * lengths, *[np.zeros(LENGTHS)] * (groups - 1)]
                ends = [lowest_ends(random, (level,), worse)[level] for _ in range(DRAWS)]
                caught.append(f"{np.mean([end > LEAST_EFFECT for end in ends]):.1%}")
            rows.append([str(groups), where, *caught])
    return table(["groups", "worse in one group at", *(f"{shift:g} nats" for shift in SHIFTS)], rows)


def seeds(folder: Path) -> list[str]:
    """How many ordered pairs of seeds of one recipe fail, and by how much."""
    sums = read_tasks(folder)[1]
    rows = []
    for scheme in ("stickbreaking", "rope"):
        runs = [f"{scheme}{seed}" for seed in SEEDS]
        names = ["each group at 95%", "all groups at once", f"beyond {LEAST_EFFECT:g}"]
        failed = dict.fromkeys([*names, "shorter effective length", "as the command"], 0)
        for pair in itertools.permutations(runs, 2):
            measured = [
                [
                    Measured(
                        corpus="stdlib",
                        corpus_sha256="",
                        protocol=task.removeprefix("sb_stdlib_"),
                        tokenizer_sha256="",
                        sums=sums[run, task],
                        training_length_tokens=TRAINED_TOKENS,
                    )
                    for task in (FIXED, STREAM)
                ]
                for run in pair
            ]
            alone, joint = (text_differences(*measured, confidence=level)[0] for level in (0.95, JOINT))
            failed["each group at 95%"] += any(one.worse for one in alone)
            failed["all groups at once"] += any(one.worse for one in joint)
            failed[f"beyond {LEAST_EFFECT:g}"] += any(one.low > LEAST_EFFECT for one in joint)
            effective = effective_differences(*measured, least_effect=LEAST_EFFECT, confidence=JOINT)
            shorter = any(one.worse for one in effective)
            failed["shorter effective length"] += shorter
            failed["as the command"] += shorter or any(judge(RULE, "", one).verdict == "fail" for one in joint)
        rows.append([scheme, *(f"{count} of 6" for count in failed.values())])
    return table(["seeds of", *failed], rows)


def main(archive: Path) -> None:
    print(f"Equal models that fail, of {DRAWS} draws:\n")
    print("\n".join(equal_models()))
    print(f"Worse models that fail, of {DRAWS} draws:\n")
    print("\n".join(power()))
    with tempfile.TemporaryDirectory() as name:
        with tarfile.open(archive) as packed:
            unpack(packed, Path(name))
        print("Ordered pairs of seeds of one recipe that fail:\n")
        print("\n".join(seeds(Path(name))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
