"""Every kind of foreign input, by name, and the case that a number stands for."""

import functools

from tests.fuzz import checkpoints, corpora, results, runs, settings, typed
from tests.fuzz.outcomes import Outcome, Reader, run_case

KINDS: dict[str, Reader] = {
    f"{group} {name}": functools.partial(module.fuzz, name)
    for group, module in (
        *(("checkpoint", checkpoints), ("settings", settings), ("report", results)),
        *(("corpus", corpora), ("run", runs), ("typed", typed)),
    )
    for name in module.NAMES
}
DEFAULT_SEED = 0


def kind_of(number: int, group: str = "") -> str:
    """Returns the kind of input that a case damages: all in turn, or all of a group, which begins their names."""
    kinds = [kind for kind in KINDS if kind.startswith(group)]
    return kinds[number % len(kinds)]


def run_number(number: int, seed: int = DEFAULT_SEED, group: str = "") -> Outcome:
    """Runs one case; the same number, seed and group give the same damage."""
    return run_case(KINDS[kind_of(number, group)], f"{seed}:{number}")
