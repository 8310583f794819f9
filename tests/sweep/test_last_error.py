"""A failed run is reported with the message that ended it, whatever the log holds around it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from sbeval.sweep.attempt import _last_error

MESSAGES = (
    "Expected a model at pretrained=x, but there is no such folder: x: correct the path.",
    "config.json in folder names no quantisation method; correct it",
    "sb_text: expected context_lengths of at most 64 tokens, found 128: run all lengths at once.",
    "There is no task 'sb_nope': try sb_pile, sb_copy. (rank 0 of 2, process 7 on host)",
    "torch.OutOfMemoryError: CUDA out of memory.",
)
BEFORE = (
    "2026-01-02:03:04:05 WARNING  [x:1] the model has no embedding for <a>: no text may hold it",
    "/usr/lib/x.py:12: UserWarning: the given array is not writable: copy it.",
    "Running token_logprobs requests:   1%|          | 2.05k/1.92M [00:01<22:41, 1.41ktoken/s]",
)
LAUNCHER = "subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 1."


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("after", [(), (LAUNCHER, "=" * 60)], ids=["alone", "launched"])
def test_the_message_that_ended_a_run_is_found(message: str, after: tuple[str, ...], tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("\n".join([*BEFORE, message, *after]) + "\n", encoding="utf-8")
    assert _last_error(SimpleNamespace(log_file=log)) == message  # type: ignore[arg-type]
