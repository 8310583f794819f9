"""Settings of a `sbeval report --gate` file: how much worse than the reference each number of a candidate may be."""

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sbeval.errors import UserError
from sbeval.foreign_files import read_yaml
from sbeval.settings import Expected, Settings, Text, as_whole, number

FAIL_IF_WORSE = Path(__file__).with_name("fail_if_worse.yaml")
"""The policy file of `sbeval report --fail-if-worse`, with one rule."""


def _length(value: Any) -> int | str:
    return "mean" if value == "mean" else as_whole(value, 1)


_Change = Annotated[float, number("a number of 0 or more", lambda value: 0 <= value < math.inf)]


class Rule(Settings):
    """One rule of a policy: by how much one metric of one task may get worse."""

    task: Text = Field(
        description="Name of a task as in the results. ruler is the mean over RULER's tasks. * means every number that "
        "both models have, and the effective length, which may not become shorter."
    )
    length: Annotated[int | str, Expected("a positive number of tokens, or mean", _length)] | None = Field(
        default=None,
        description="Context length in tokens. mean averages over the octaves of context length, for NLL over those "
        "beyond the training length.",
    )
    up_to: Annotated[int, Expected("a positive number of tokens", lambda value: as_whole(value, 1))] | None = Field(
        default=None,
        description="Context length in tokens up to which the rule holds, at every length that both runs have; only "
        "for NLL, in place of length. With it a quantized KV cache loses at most largest_change up to this length.",
    )
    largest_change: _Change = Field(
        description="Largest change for the worse, in nats per token or in the unit of the score."
    )
    share_of_rise: _Change = Field(
        default=0.0,
        description="Allowed change as a share of the reference's own loss: its NLL at this length minus its NLL at "
        "its training length. If larger than largest_change, it replaces largest_change.",
    )
    metric: Text | None = Field(
        default=None,
        description="Metric of the task, if the task scores each sample; bits_per_byte for the NLL of models with "
        "different tokenizers.",
    )

    @property
    def tokens(self) -> int | None:
        """The context length, None for the mean and for a task without one."""
        return self.length if isinstance(self.length, int) else None


class Policy(Settings):
    """The rules of a `--gate` file."""

    rules: tuple[Rule, ...] = Field(description="Rules that the candidate has to pass.")


def read_policy(path: Path) -> tuple[Rule, ...]:
    """Reads the rules of a `--gate` file.

    Raises:
        UserError: the file cannot be read, or holds no rules.
    """
    rules = Policy.read(read_yaml(path, "a policy"), place="the policy", source=path.name).rules
    if not rules:
        raise UserError(f"{path.name} holds no rules: add one with task and largest_change.")
    return rules
