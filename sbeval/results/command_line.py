"""The command line of this process as a results file keeps it: enough to run it again, without secrets."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

HIDDEN = "***"
_SECRET = r"(?:(?:hf|hub|api|access|auth|use_auth|wandb)[_-])?(?:token|key|secret|password)"
_ASSIGNED = re.compile(rf"(?i)(?P<name>(?:^|(?<=[\s,{{\"'])|(?<=--)){_SECRET}\"?[=:]\s*)[^,\s}}]+")
_OPTION = re.compile(rf"(?i)--{_SECRET}")


def recorded_command(arguments: Sequence[str] | None = None) -> str:
    """Returns a command line in the shell's writing, with tokens, keys and passwords replaced by `***`.

    Args:
        arguments: the program and its arguments; those of this process if None.
    """
    program, *rest = sys.argv if arguments is None else arguments
    path = Path(program)
    command = ["python", "-m", path.parent.name] if path.name == "__main__.py" else [path.name or "python"]
    hide_next = False
    for argument in rest:
        command.append(HIDDEN if hide_next else _ASSIGNED.sub(rf"\g<name>{HIDDEN}", argument))
        hide_next = _OPTION.fullmatch(argument) is not None
    return " ".join(part if part == HIDDEN else shlex.quote(part) for part in command)
