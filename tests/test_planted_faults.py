"""Every planted fault of `tests/measures/planted_faults.py` can be planted in the code as it is now."""

import re

import pytest

from tests.measures.planted_faults import FAULTS, Fault, why_not_planted


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_stands_in_one_place_and_its_tests_exist(name: str) -> None:
    assert why_not_planted(FAULTS[name]) is None


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("keeping", "no such code stands anywhere", ""), "its code stands in 0 places"),
        (Fault("keeping", "import", ""), "its code stands in [0-9]+ places instead of one: import"),
        (Fault("no_such", FAULTS["bits per byte are nats"].code, ""), "there are no tests at no_such"),
    ],
)
def test_a_fault_that_cannot_be_planted_is_told_with_the_reason(fault: Fault, reason: str) -> None:
    assert re.match(reason, why_not_planted(fault) or "")
