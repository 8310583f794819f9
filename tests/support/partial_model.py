"""A language model for tests that answers only some types of requests."""

from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM


class PartialModel(LM):  # type: ignore[misc]
    """Base class of test models; fails the test at a request type that the subclass does not implement."""

    def loglikelihood(self, requests: list[Instance]) -> Any:
        pytest.fail(f"loglikelihood was asked {len(requests)} times, and this test's task should not ask it")

    def loglikelihood_rolling(self, requests: list[Instance]) -> Any:
        pytest.fail(f"loglikelihood_rolling was asked {len(requests)} times, and this test's task should not ask it")

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> Any:
        pytest.fail(f"generate_until was asked {len(requests)} times, and this test's task should not ask it")
