"""The file of `sbeval report --gate`: which change of which number a candidate may show."""

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sbeval.errors import UserError
from sbeval.foreign_files import read_yaml
from sbeval.settings import Expected, Settings, Text, as_whole, number


def _length(value: Any) -> int | str:
    return "mean" if value == "mean" else as_whole(value, 1)


class PolicyRule(Settings):
    """One rule of a policy."""

    task: Text = Field(description="A task as results name it; ruler for the mean over RULER's tasks.")
    length: Annotated[int | str, Expected("a positive number of tokens, or mean", _length)] | None = Field(
        default=None, description="Context length; mean is over octaves, of NLL beyond the training length."
    )
    largest_change: Annotated[float, number("a number of 0 or more", lambda value: 0 <= value < math.inf)] = Field(
        description="Largest change for the worse: nats per token, or a score's own unit."
    )
    metric: Text | None = Field(default=None, description="Metric of a task that is scored by sample.")


class Policy(Settings):
    """A policy."""

    rules: tuple[PolicyRule, ...] = Field(description="What is asked of the candidate.")


def read_policy(path: Path) -> list[dict[str, Any]]:
    """Returns the rules of a file, each as its settings.

    Raises:
        UserError: the file cannot be read, or holds something else than rules.
    """
    rules = Policy.read(read_yaml(path, "a policy"), place="the policy", source=path.name).rules
    if not rules:
        raise UserError(f"Expected rules in {path.name}, found none: name a task and its largest_change.")
    return [rule.model_dump() for rule in rules]
