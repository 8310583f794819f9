"""How long the inputs of an ordinary task could be: what tells its runs at several lengths apart.

Tasks that come with lm-eval name no context length in their metrics. Run at several values of `max_length`, or on texts
of several lengths (`--metadata '{"max_seq_lengths": "16k"}'`, as BABILong takes it), they are rows of their own.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from sbeval.reports.runs import Run, TaskResult, argument

_TEXT = re.compile(r"(?P<count>\d+)\s*(?P<unit>[kKmM]?)")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


class InputLimit(NamedTuple):
    """What bounded the inputs of a task in one run.

    Attributes:
        text_length_tokens: length of the texts asked for by `max_seq_lengths`, None where the task takes none.
        max_length_tokens: longest input the run allowed, None where not recorded.
    """

    text_length_tokens: int | None
    max_length_tokens: int | None


UNLIMITED = InputLimit(None, None)


def input_limit(run: Run, task: TaskResult) -> InputLimit:
    """Returns the limit of an ordinary task; tasks that record their context lengths have none here."""
    if task.record is not None:
        return UNLIMITED
    allowed = run.model.max_length
    if allowed is None:
        written = argument(run.model_args, "max_length") or ""
        allowed = int(written) if written.isascii() and written.isdigit() else None
    return InputLimit(text_length(task.metadata), allowed)


def text_length(metadata: Mapping[str, Any]) -> int | None:
    """Returns the one length that a task's metadata asks its texts to have, in tokens: "16k" is 16,384."""
    asked = metadata.get("max_seq_lengths")
    if isinstance(asked, list) and len(asked) == 1:
        asked = asked[0]
    if isinstance(asked, int) and not isinstance(asked, bool):
        return asked if asked >= 0 else None
    match = _TEXT.fullmatch(asked.strip()) if isinstance(asked, str) else None
    return int(match["count"]) * _UNITS[match["unit"].lower()] if match else None
