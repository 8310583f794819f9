"""Steps that cannot be recorded as a CUDA graph: errors are put in the way of a recording, the rest is as on a GPU."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from sbeval.model_adapters.batching import DoesNotFit
from sbeval.model_adapters.generate.slots import graph_capture, schedule
from sbeval.model_adapters.generate.slots.stepper import Stepper
from tests.model_adapters.generate.slots import LINES
from tests.model_adapters.small import Checkpoints, generated, load_lm

Fail = Callable[[Exception, int], None]


def answers(lm: Any) -> list[str]:
    settings = ({"until": ["\n\n"], "max_gen_toks": tokens} for tokens in (20, 9))
    return generated(lm, [(line, setting) for setting in settings for line in LINES])


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Lets recordings fail as on a GPU: what is raised last is another error than the one that made it fail."""

    def prepare(error: Exception, times: int) -> None:
        left = [times]

        @contextlib.contextmanager
        def graph(*_: Any, **__: Any) -> Iterator[None]:
            yield
            if left[0]:
                left[0] -= 1
                try:
                    raise error
                finally:
                    if isinstance(error, torch.OutOfMemoryError):
                        raise RuntimeError("operation failed due to a previous error during capture")

        for name in ("Stream", "current_stream", "CUDAGraph", "graph_pool_handle", "default_generators"):
            monkeypatch.setattr(torch.cuda, name, MagicMock())
        monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None)
        made = graph_capture.GraphCapture.__init__

        def as_on_a_gpu(self: graph_capture.GraphCapture, _: torch.device) -> None:
            made(self, torch.device("cuda"))

        monkeypatch.setattr(graph_capture.GraphCapture, "__init__", as_on_a_gpu)

    return prepare


@pytest.mark.parametrize("launches_wait", [False, True])
def test_steps_that_cannot_be_recorded_go_one_by_one_and_the_log_says_so_once(
    launches_wait: bool,
    checkpoint: Checkpoints,
    fail: Fail,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lm = load_lm(checkpoint("llama"), batch_size=3)
    expected = answers(lm)
    monkeypatch.setattr(schedule, "_FEWEST_ROOM_TOKENS", 32)  # texts of several sizes, one after the other
    if launches_wait:
        fail(AssertionError("it was recorded"), 9)
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    else:
        fail(RuntimeError("operation not permitted when stream is capturing\nand more"), 9)
    with caplog.at_level(logging.WARNING):
        assert answers(lm) == expected
    (message,) = [record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()]
    reason = "CUDA_LAUNCH_BLOCKING is set" if launches_wait else "operation not permitted when stream is capturing"
    assert f"as a CUDA graph: {reason}" in message
    assert "and more" not in message


@pytest.mark.exhaustive
def test_memory_that_runs_out_in_a_recording_halves_the_slots_and_is_one_sentence_for_one(
    checkpoint: Checkpoints, fail: Fail, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lm = load_lm(checkpoint("llama"), batch_size=4)
    expected = answers(lm)
    fail(torch.OutOfMemoryError("out of memory"), 2)
    capture = Stepper.capture

    def tried(self: Stepper, graph_capture: graph_capture.GraphCapture) -> None:
        capture(self, graph_capture)
        self._graph = None  # where none fails, there is still none to replay

    monkeypatch.setattr(Stepper, "capture", tried)
    with caplog.at_level(logging.WARNING):
        assert answers(lm) == expected
    messages = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert [message.partition("on with ")[2] for message in messages] == ["2 texts at a time", "1 texts at a time"]
    fail(torch.OutOfMemoryError("out of memory"), 9)
    with pytest.raises(DoesNotFit, match="it ran out with this one alone"):
        answers(lm)


class Cuda:
    """What torch leaves begun of a recording that failed, in releases that end some of it and in those that do not."""

    def __init__(self, ends: bool) -> None:
        self.own = self.stream = MagicMock()
        self.generator = MagicMock(**{"clone_state.return_value": "not recording"})
        self.ends, self.underway, self.held = ends, list[Any](), list[Any]()

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextlib.contextmanager
    def graph(self, _: Any, pool: Any = None, stream: Any = None) -> Iterator[None]:
        self.stream = stream or MagicMock()
        self.underway.append(pool)
        self.held.append(pool)
        try:
            yield
        finally:
            if self.ends:
                self.underway.remove(pool)
                self.held.remove(pool)
            raise RuntimeError("operation failed due to a previous error during capture")

    def end(self, _: int, pool: Any) -> None:
        if pool not in self.underway:
            raise RuntimeError("not currently recording to this pool")
        self.underway.remove(pool)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name, fake in {
            "Stream": MagicMock(),
            "CUDAGraph": MagicMock(),
            "current_stream": lambda *_: self.stream,
            "device": lambda _: contextlib.nullcontext(),
            "stream": self.on,
            "graph": self.graph,
            "graph_pool_handle": lambda: (0, 7),
            "default_generators": [self.generator],
            "memory_snapshot": lambda: [{"segment_pool_id": list(pool), "active_size": 0} for pool in self.held],
        }.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end)
        patch.setattr(torch._C, "_cuda_releasePool", lambda _, pool: self.held.remove(pool))


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    "error", [RuntimeError("not while recording"), ValueError("no"), torch.OutOfMemoryError("out")]
)
def test_a_recording_that_failed_leaves_nothing_begun(
    error: Exception, ends: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = Cuda(ends)
    cuda.install(monkeypatch)
    record = graph_capture.GraphCapture(torch.device("cuda", 0))

    def step() -> None:
        if cuda.held:
            raise error

    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            record.graph_of(step, torch.device("cuda", 0))
        assert record.possible
    else:
        assert record.graph_of(step, torch.device("cuda", 0)) is None
        assert not record.possible
        assert caplog.text.rstrip().endswith(str(error)), "what it failed of first"
    assert cuda.stream is cuda.own
    assert not cuda.underway
    assert not cuda.held
    cuda.generator.graphsafe_set_state.assert_called_once_with("not recording")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are recorded on a GPU")
@pytest.mark.parametrize("how", ["a number is read", "the host waits", "memory runs out", "the model refuses"])
def test_after_a_recording_that_failed_a_gpu_works_as_before(how: str, checkpoint: Checkpoints) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    lm = load_lm(checkpoint("llama"), device="cuda", batch_size=3)
    expected = answers(lm)
    x_N = torch.ones(2**23, device=device)

    def step() -> None:
        doubled_N = x_N * 2  # memory of the recording's own
        if torch.cuda.is_current_stream_capturing():
            if how == "a number is read":
                doubled_N.sum().item()
            elif how == "the host waits":
                torch.cuda.synchronize()
            elif how == "memory runs out":
                torch.empty(2**50, dtype=torch.uint8, device=device)
            else:
                raise ValueError("not while it is recorded")
        x_N.copy_(doubled_N)

    def pools() -> set[Any]:
        torch.cuda.empty_cache()
        return {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}

    before, stream = pools(), torch.cuda.current_stream()
    torch.manual_seed(3)
    drawn_N = torch.rand(5, device=device)
    torch.manual_seed(3)
    record = graph_capture.GraphCapture(device)
    if how == "memory runs out":
        with pytest.raises(torch.OutOfMemoryError):
            record.graph_of(step, device)
    else:
        assert record.graph_of(step, device) is None
        assert not record.possible

    assert torch.cuda.current_stream() == stream
    torch.cuda.synchronize()
    assert pools() <= before
    torch.testing.assert_close(torch.rand(5, device=device), drawn_N, rtol=0, atol=0)
    assert torch.zeros(4, pin_memory=True).to(device, non_blocking=True).sum() == 0
    x_N.fill_(1.0)
    second = graph_capture.GraphCapture(device).graph_of(lambda: x_N.mul_(2).sin(), device)
    x_N.fill_(1.0)
    second.replay()
    assert x_N.eq(2).all()
    del second
    assert pools() <= before
    assert answers(lm) == expected
