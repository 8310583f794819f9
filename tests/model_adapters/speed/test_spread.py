"""A model whose layers are spread over GPUs: hooks that are left, and windows that the GPUs work on at once."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, attach_align_device_hook_on_blocks
from torch import nn

from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.model_adapters.speed.faster import make_faster
from sbeval.model_adapters.speed.parts import FusedGatedMLP
from sbeval.model_adapters.speed.spread import Relay, settle_hooks
from tests.model_adapters.small import english, instances, odd, tiny_tokenizer

TOKENS = torch.arange(40)[None]
BLOCKS = ["model.layers.0", "model.layers.1"]
PLACED = ["model.embed_tokens", *BLOCKS, "model.norm", "model.rotary_emb", "lm_head"]


def hooked() -> Any:
    model: Any = odd("llama")
    devices = dict.fromkeys([*PLACED, ""], torch.device("cpu"))
    attach_align_device_hook_on_blocks(model, devices, offload=dict.fromkeys(PLACED, False))
    return model


@torch.no_grad()
def test_a_spread_model_is_fused_behind_the_hooks_of_its_blocks():
    expected = odd("llama")(TOKENS).logits
    model = hooked()
    settle_hooks(model)
    kept = {name for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
    assert kept == {*PLACED, ""}
    assert make_faster(model)
    assert sum(isinstance(module, FusedGatedMLP) for module in model.modules()) == len(BLOCKS)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)


def test_tables_of_angles_lie_where_the_first_block_does():
    model = hooked()
    model.model.rotary_emb._hf_hook.execution_device = torch.device("meta")
    settle_hooks(model)
    assert model.model.rotary_emb._hf_hook.execution_device == torch.device("cpu")
    assert model.model.norm._hf_hook.execution_device == torch.device("cpu")


def test_hooks_that_bring_weights_stay():
    model: Any = odd("llama")
    attach_align_device_hook_on_blocks(model, {"": torch.device("cpu")}, offload={"": True}, weights_map=None)
    before = [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    settle_hooks(model)
    assert [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")] == before
    assert Relay.of(model) is None


class Stream:
    """A stream that counts its time: work takes 1 in the block's stream, and copies have two streams wait."""

    current: dict[torch.device, "Stream"]

    def __init__(self, device: torch.device) -> None:
        self.device, self.now = device, 0.0

    def wait_stream(self, other: "Stream") -> None:
        self.now = max(self.now, other.now)

    def wait_event(self, event: float) -> None:
        self.now = max(self.now, event)

    def record_event(self) -> float:
        return self.now


class Block(nn.Module):
    def __init__(self, device: str, log: list[tuple[str, float]]) -> None:
        super().__init__()
        self.device, self.log = torch.device(device), log
        self._hf_hook = AlignDevicesHook(execution_device=device)

    def forward(self) -> None:
        stream = Stream.current[self.device]
        first = Stream.current[torch.device("cuda:0")]  # from which accelerate copies to every block
        first.now = stream.now = max(first.now, stream.now)
        self.log.append((str(self.device), stream.now))
        stream.now += 1


@pytest.fixture
def streams(monkeypatch) -> None:
    Stream.current = {torch.device("cuda", place): Stream(torch.device("cuda", place)) for place in (0, 1)}

    @contextlib.contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        before, Stream.current[stream.device] = Stream.current[stream.device], stream
        yield
        Stream.current[stream.device] = before

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream.current.__getitem__)


@pytest.mark.parametrize(("alone", "begins"), [(False, [0, 2, 4]), (True, [0, 3, 6])])
def test_a_gpu_begins_with_a_window_where_the_one_before_has_passed_on(alone, begins, streams):
    log: list[tuple[str, float]] = []
    blocks = nn.ModuleList([Block(f"cuda:{place // 2}", log) for place in range(4)])
    model = nn.ModuleDict({"layers": blocks})
    assert Relay.of(model) is not None
    relay = Relay.of(model)
    assert relay is not None
    assert [len(block._forward_pre_hooks) for block in blocks] == [0, 1, 2, 1]
    assert relay.windows == 2
    if alone:
        assert relay.alone()
        assert not relay.alone()
    for _ in begins:
        with relay.window():
            for block in blocks:
                block()
    assert log == [(f"cuda:{place // 2}", begin + place) for begin in begins for place in range(4)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_windows_on_two_gpus_have_the_scores_of_one():
    model: Any = odd("llama", num_hidden_layers=6).cuda()
    alone = StickBreakingLM(copy.deepcopy(model), tokenizer=tiny_tokenizer(adds_bos=False), max_length=32)
    second = [*(f"model.layers.{place}" for place in (3, 4, 5)), "model.norm", "model.rotary_emb", "lm_head"]
    places = {name: 0 for name in ("model.embed_tokens", *(f"model.layers.{place}" for place in range(3)))}
    spread = accelerate.dispatch_model(model, places | dict.fromkeys(second, 1))
    lm = StickBreakingLM(spread, tokenizer=tiny_tokenizer(adds_bos=False), max_length=32)
    assert lm.session is not None
    assert lm.session.relay is not None
    requests = instances("loglikelihood_rolling", [(english() * 20,), (english()[:300],)])
    expected = alone.loglikelihood_rolling(requests, disable_tqdm=True)
    for _ in range(3):
        torch.testing.assert_close(lm.loglikelihood_rolling(requests, disable_tqdm=True), expected, rtol=1e-6, atol=0.0)
