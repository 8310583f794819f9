"""Parameters of a test that only `make test-all` runs, and tests that need a newer transformers."""

from typing import Any

import pytest
import transformers
from packaging.version import Version

from sbeval.caches.build import OLDEST_TRANSFORMERS_OF_QUANTIZED

NEEDS_QUANTIZED_CACHES = pytest.mark.skipif(
    Version(transformers.__version__).release < OLDEST_TRANSFORMERS_OF_QUANTIZED,
    reason="cache=quantized is refused with this transformers",
)


def exhaustive(*values: Any) -> list[Any]:
    """Returns parameters with the mark `exhaustive`; a tuple is the values of several arguments."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive)
        for value in values
    ]
