"""No damage to a foreign file ends in a traceback, a hang, much memory, or a number that changed without a word."""

import contextlib
import json
import random
from pathlib import Path

import pytest

from sbeval.errors import UserError
from sbeval.foreign_files import parse_task_yaml, parse_yaml
from tests.fuzz.kinds import KINDS, run_number
from tests.fuzz.outcomes import GOOD, MEMORY_BYTES, Outcome, Silent, run_case
from tests.fuzz.settings import TRAPS
from tests.marks import exhaustive

CASES_PER_KIND = 8


# kinds of typed commands run each case in a process of its own
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.exhaustive] * kind.startswith("typed ")) for kind in KINDS]
)
@pytest.mark.parametrize("cases", [range(2), *exhaustive(range(2, CASES_PER_KIND))], ids=["first", "others"])
def test_damaged_input_is_an_equal_number_a_named_one_or_one_sentence(kind: str, cases: range) -> None:
    place = list(KINDS).index(kind)
    for number in range(place + cases.start * len(KINDS), cases.stop * len(KINDS), len(KINDS)):
        outcome = run_number(number)
        assert outcome.kind in GOOD, f"case {number}: {outcome.kind}\n{outcome.detail}"


@pytest.mark.parametrize("place", range(len(TRAPS)))
def test_yaml_s_traps_are_settings_or_an_error(place: int) -> None:
    def read(rng: random.Random, folder: Path) -> str:
        with contextlib.suppress(ValueError):
            parse_task_yaml(TRAPS[place])
        json.dumps(parse_yaml(TRAPS[place]))
        return "equal"

    outcome = run_case(read, "", seconds=60)
    assert outcome.kind in GOOD, outcome.detail


def test_aliases_that_do_not_multiply_and_merges_are_read() -> None:
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]") == {
        **{"a": {"x": 1}, "b": {"x": 1, "y": 2}},
        "c": [{"x": 1}, {"x": 1}],
    }


def test_a_defect_is_told_from_an_outcome() -> None:
    def reads(what: str) -> Outcome:
        def read(rng: random.Random, folder: Path) -> str:
            if what == "traceback":
                raise KeyError("a")
            if what == "sentence":
                raise UserError("Expected a, found b.")
            if what == "silent":
                raise Silent("3 became 4")
            if what == "memory":
                bytearray(2 * MEMORY_BYTES)
            while what == "hang":
                pass
            return what

        return run_case(read, "", seconds=1)

    for what in (*GOOD, "traceback", "silent", "memory", "hang"):
        assert reads(what).kind == what
