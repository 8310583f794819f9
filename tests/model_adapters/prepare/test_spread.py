"""A model whose layers are spread over GPUs: hooks that are left, and windows that the GPUs work on at once."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, attach_align_device_hook_on_blocks, remove_hook_from_module
from torch import nn

from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.model_adapters.prepare.changes.hooks import settle_hooks
from sbeval.model_adapters.prepare.changes.mlps import FusedGatedMLP
from sbeval.model_adapters.prepare.spread import Relay
from sbeval.scoring.scorer import TokenScorer
from tests.model_adapters.prepare.faster import make_faster
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


def test_tables_of_angles_lie_where_the_first_block_does(monkeypatch):
    model, moved = hooked(), []
    for name in ("model.rotary_emb", "model.norm"):
        module = model.get_submodule(name)
        module._hf_hook.execution_device = torch.device("meta")
        monkeypatch.setattr(module, "to", moved.append)
    settle_hooks(model)
    assert moved == [model.model.rotary_emb._hf_hook.execution_device] == [torch.device("cpu")]
    assert model.model.norm._hf_hook.execution_device == torch.device("meta")


@torch.no_grad()
def test_the_head_of_a_spread_model_waits_for_no_other_gpu(monkeypatch):
    model = hooked()
    scorer = TokenScorer(model)
    expected = model(TOKENS).logits
    hidden = scorer._hidden(TOKENS)
    monkeypatch.delattr(AlignDevicesHook, "pre_forward")
    monkeypatch.delattr(ModelHook, "pre_forward")
    for module in model.modules():
        if module is not model and hasattr(module, "_hf_hook"):
            remove_hook_from_module(module)
    torch.testing.assert_close(scorer._head(hidden), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_forward_that_somebody_put_over_a_hook_stays():
    model = hooked()
    mlp = model.model.layers[1].mlp
    before = mlp.forward
    mlp.forward = lambda hidden: 2 * before(hidden)
    expected = model(TOKENS).logits
    settle_hooks(model)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    assert hasattr(mlp, "_hf_hook")
    assert not hasattr(model.model.layers[0].mlp.gate_proj, "_hf_hook")


def test_blocks_whose_weights_are_brought_stay_as_they_are(streams):
    model = hooked()
    for place, block in enumerate(model.model.layers):
        for module in block.modules():
            if hasattr(module, "_hf_hook"):
                module._hf_hook.execution_device = torch.device("cuda", place)
    assert Relay.of(model) is not None
    model.model.layers[1].mlp.up_proj._hf_hook.offload = True
    assert Relay.of(model) is None
    remove_hook_from_module(model.model.rotary_emb)  # there is no GPU to bring it to
    settle_hooks(model)
    kept = [sum(hasattr(module, "_hf_hook") for module in block.modules()) for block in model.model.layers]
    assert kept[0] == 1 < kept[1]


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
    def __init__(self, device: str, log: list[tuple[str, float]], before: str = "cuda:0", takes: float = 1) -> None:
        super().__init__()
        self.device, self.log, self.before, self.takes = torch.device(device), log, torch.device(before), takes
        self._hf_hook = AlignDevicesHook(execution_device=device)

    def forward(self) -> None:
        stream = Stream.current[self.device]
        # accelerate copies positions from the first GPU to every block, and hidden states from the one before
        for other in (Stream.current[torch.device("cuda:0")], Stream.current[self.before]):
            other.now = stream.now = max(other.now, stream.now)
        self.log.append((str(self.device), stream.now))
        stream.now += self.takes


@pytest.fixture
def streams(monkeypatch) -> None:
    Stream.current = {torch.device("cuda", place): Stream(torch.device("cuda", place)) for place in range(4)}

    @contextlib.contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        before, Stream.current[stream.device] = Stream.current[stream.device], stream
        yield
        Stream.current[stream.device] = before

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream.current.__getitem__)


@pytest.mark.parametrize(
    ("gpus", "alone", "begins"), [(2, False, [0, 2, 4]), (2, True, [0, 3, 6]), (4, False, [0, 2, 4, 6, 8, 10])]
)
def test_a_gpu_begins_with_a_window_where_the_one_before_has_passed_on(gpus, alone, begins, streams):
    log: list[tuple[str, float]] = []
    devices = [f"cuda:{place // 2}" for place in range(2 * gpus)]
    blocks = nn.ModuleList(map(Block, devices, [log] * len(devices), ["cuda:0", *devices]))
    model = nn.ModuleDict({"layers": blocks})
    assert Relay.of(model) is not None
    relay = Relay.of(model)
    assert relay is not None
    assert relay.windows == gpus
    assert [len(block._forward_pre_hooks) for block in blocks] == [0, 1, *[2, 1] * (gpus - 1)]
    if alone:
        assert relay.alone()
        assert not relay.alone()
    for _ in begins:
        with relay.window():
            for block in blocks:
                block()
    assert log == [(f"cuda:{place // 2}", begin + place) for begin in begins for place in range(2 * gpus)]


def test_a_gpu_works_on_one_window_at_a_time(streams):
    log: list[tuple[str, float]] = []
    blocks = nn.ModuleList([Block("cuda:0", log), Block("cuda:1", log, takes=3)])
    relay = Relay.of(nn.ModuleDict({"layers": blocks}))
    assert relay is not None
    for _ in range(3):
        with relay.window():
            for block in blocks:
                block()
    assert [begin for device, begin in log if device == "cuda:1"] == [1, 4, 7]


def test_what_every_block_is_given_is_copied_once_a_window(streams):
    block = Block("cuda:1", [])
    relay = Relay.of(nn.ModuleDict({"layers": nn.ModuleList([Block("cuda:0", []), block])}))
    assert relay is not None
    device, angles, mask = torch.device("meta"), (torch.zeros(3), torch.zeros(3)), torch.zeros(2)
    assert relay._to_device(device, block, (), {"mask": mask}) is None
    for _ in range(2):
        with relay.window():
            given, first = relay._to_device(device, block, (1,), {"angles": angles, "mask": mask, "cache": None})
            _, second = relay._to_device(device, block, (1,), {"angles": angles, "mask": mask})
            mask.add_(1)
            _, third = relay._to_device(device, block, (1,), {"angles": angles, "mask": mask})
        assert given == (1,)
        assert first["cache"] is None
        assert all(x.is_meta for x in (*first["angles"], first["mask"], third["mask"]))
        assert all(x is y is z for x, y, z in zip(first["angles"], second["angles"], third["angles"], strict=True))
        assert first["mask"] is second["mask"] is not third["mask"]
        assert not relay._copies


def two_blocks() -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([Block("cuda:0", []), Block("cuda:1", [])])})


def test_where_memory_was_found_by_waiting_windows_run_one_at_a_time(streams, monkeypatch):
    relay = Relay.of(two_blocks())
    assert relay is not None
    # of memory that was looked for before a window, nothing follows
    for before, retries, windows in ((0, 0, 2), (3, 3, 2), (3, 4, 1)):
        stats = {"num_alloc_retries": before}
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device, stats=stats: stats)
        with relay.window():
            stats["num_alloc_retries"] = retries
        assert relay.windows == windows


def test_a_window_for_which_memory_ran_out_can_be_run_alone(streams, monkeypatch):
    relay, stats = Relay.of(two_blocks()), {"num_alloc_retries": 0}
    assert relay is not None
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)

    def run_out() -> None:
        with relay.window():
            stats["num_alloc_retries"] += 1  # as CUDA's allocator does before it gives up
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        run_out()
    assert relay.alone()
    assert not relay.alone()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_windows_on_two_gpus_have_the_scores_of_one():
    model: Any = odd("llama", num_hidden_layers=6, vocab_size=400).cuda()
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
