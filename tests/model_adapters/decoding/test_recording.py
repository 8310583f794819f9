"""Steps that cannot be recorded as a CUDA graph: errors are put in the way of a recording, the rest is as on a GPU."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from sbeval.model_adapters.batching import DoesNotFit
from sbeval.model_adapters.decoding import recording
from sbeval.model_adapters.lm import StickBreakingLM
from tests.model_adapters.small import Checkpoints, english, instances

LINES = [line for line in english().splitlines() if line][3:10]
Fail = Callable[[Exception, int], None]


def answers(lm: Any) -> list[str]:
    asked = [(line, {"until": ["\n\n"], "max_gen_toks": 20}) for line in LINES]
    # two settings, which are generated one after the other
    asked += [(line, {"until": ["\n\n"], "max_gen_toks": 9}) for line in LINES]
    found: list[str] = lm.generate_until(instances("generate_until", asked), disable_tqdm=True)
    return found


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Lets recordings fail as on a GPU: what is raised last is another error than the one that made it fail."""

    def prepare(error: Exception, times: int) -> None:
        left = [times]

        @contextlib.contextmanager
        def graph(_: Any) -> Iterator[None]:
            yield
            if left[0]:
                left[0] -= 1
                try:
                    raise error
                finally:
                    if isinstance(error, torch.OutOfMemoryError):
                        raise RuntimeError("operation failed due to a previous error during capture")

        for name in ("Stream", "current_stream", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, MagicMock())
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "graph", graph)
        made = recording.Recording.__init__

        def as_on_a_gpu(self: recording.Recording, _: torch.device) -> None:
            made(self, torch.device("cuda"))

        monkeypatch.setattr(recording.Recording, "__init__", as_on_a_gpu)

    return prepare


def test_a_model_that_cannot_be_recorded_goes_step_by_step_and_the_log_says_so_once(
    checkpoint: Checkpoints, fail: Fail, caplog: pytest.LogCaptureFixture
) -> None:
    lm = StickBreakingLM(str(checkpoint("llama")), device="cpu", dtype="float32", batch_size=3)
    expected = answers(lm)
    fail(RuntimeError("operation not permitted when stream is capturing\nand more"), 9)
    with caplog.at_level(logging.WARNING):
        assert answers(lm) == expected
    (message,) = [record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()]
    assert message.endswith("run one by one: operation not permitted when stream is capturing")


def test_launches_that_wait_are_not_recorded(
    checkpoint: Checkpoints, fail: Fail, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lm = StickBreakingLM(str(checkpoint("llama")), device="cpu", dtype="float32", batch_size=3)
    expected = answers(lm)
    fail(AssertionError("it was recorded"), 9)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with caplog.at_level(logging.WARNING):
        assert answers(lm) == expected
    (message,) = [record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()]
    assert "CUDA_LAUNCH_BLOCKING is set" in message


def test_memory_that_runs_out_in_a_recording_halves_the_slots_and_is_one_sentence_for_one(
    checkpoint: Checkpoints, fail: Fail, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lm = StickBreakingLM(str(checkpoint("llama")), device="cpu", dtype="float32", batch_size=4)
    expected = answers(lm)
    fail(torch.OutOfMemoryError("out of memory"), 2)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)  # where none fails, there is still none to replay
    with caplog.at_level(logging.WARNING):
        assert answers(lm) == expected
    messages = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert [message.partition("on with ")[2] for message in messages] == ["2 texts at a time", "1 texts at a time"]
    fail(torch.OutOfMemoryError("out of memory"), 9)
    with pytest.raises(DoesNotFit, match="it ran out with this one alone"):
        answers(lm)
