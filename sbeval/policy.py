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
        description="Name of a task as in the results. ruler is the mean over RULER's tasks. * is every number that "
        "both models have, and their effective lengths, which may not be shorter."
    )
    length: Annotated[int | str, Expected("a positive number of tokens, or mean", _length)] | None = Field(
        default=None,
        description="Context length in tokens. mean averages over the octaves of context length, for NLL over those "
        "beyond the training length.",
    )
    largest_change: _Change = Field(
        description="Largest change for the worse, in nats per token or in the unit of the score."
    )
    share_of_rise: _Change = Field(
        default=0.0,
        description="Share of the reference's own loss: how far its NLL at this length is above its NLL at its "
        "training length. Where that is larger than largest_change, it replaces largest_change.",
    )
    metric: Text | None = Field(
        default=None,
        description="Metric of the task, where the task scores each sample; bits_per_byte for NLL of models with "
        "different tokenizers.",
    )

    @property
    def tokens(self) -> int | None:
        """The context length, None for the mean and for a task without one."""
        return self.length if isinstance(self.length, int) else None


class Policy(Settings):
    """A policy."""

    rules: tuple[Rule, ...] = Field(description="Rules that the candidate has to pass.")


def read_policy(path: Path) -> tuple[Rule, ...]:
    """Returns the rules of a file.

    Raises:
        UserError: the file cannot be read, or does not hold rules.
    """
    rules = Policy.read(read_yaml(path, "a policy"), place="the policy", source=path.name).rules
    if not rules:
        raise UserError.expected(f"rules in {path.name}", found="none", remedy="add one with task and largest_change")
    return rules
