"""The file of `sbeval report --gate`: which change of which number a candidate may show."""

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sbeval.errors import UserError
from sbeval.foreign_files import read_yaml
from sbeval.settings import Expected, Settings, Text, as_whole, number

FAIL_IF_WORSE = Path(__file__).with_name("fail_if_worse.yaml")
"""The policy of `sbeval report --fail-if-worse`, of one rule."""


def _length(value: Any) -> int | str:
    return "mean" if value == "mean" else as_whole(value, 1)


_Change = Annotated[float, number("a number of 0 or more", lambda value: 0 <= value < math.inf)]


class Rule(Settings):
    """One rule of a policy."""

    task: Text = Field(
        description="A task as results name it; ruler for the mean over RULER's tasks; * for every number that both "
        "have, and for effective lengths, which may not be shorter."
    )
    length: Annotated[int | str, Expected("a positive number of tokens, or mean", _length)] | None = Field(
        default=None, description="Context length; mean is over octaves, of NLL beyond the training length."
    )
    largest_change: _Change = Field(description="Largest change for the worse: nats per token, or a score's own unit.")
    share_of_rise: _Change = Field(
        default=0.0,
        description="Where this share of how far NLL of the reference itself rises from its training length to there "
        "is larger, it takes the place of largest_change.",
    )
    metric: Text | None = Field(default=None, description="Metric of a task that is scored by sample.")

    @property
    def tokens(self) -> int | None:
        """The context length, None for the mean and for a task without one."""
        return self.length if isinstance(self.length, int) else None


class Policy(Settings):
    """A policy."""

    rules: tuple[Rule, ...] = Field(description="What is asked of the candidate.")


def read_policy(path: Path) -> tuple[Rule, ...]:
    """Returns the rules of a file.

    Raises:
        UserError: the file cannot be read, or holds something else than rules.
    """
    rules = Policy.read(read_yaml(path, "a policy"), place="the policy", source=path.name).rules
    if not rules:
        raise UserError(f"Expected rules in {path.name}, found none: name a task and its largest_change.")
    return rules
