"""The product's modules and rooms import one another in one direction only."""

import pytest

from tests.measures.census import census

COUNTS = census()


@pytest.mark.parametrize("count", ["circles of files", "circles of rooms"])
def test_imports_form_no_circle(count: str) -> None:
    assert COUNTS[count] == 0
