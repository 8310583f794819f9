"""Parameters of a test that only `make test-all` runs."""

from typing import Any

import pytest


def exhaustive(*values: Any) -> list[Any]:
    """Returns parameters with the mark `exhaustive`; a tuple is the values of several arguments."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive)
        for value in values
    ]
