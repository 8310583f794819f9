"""Context parallelism: outputs and gradients equal those of one process, and spent sticks request no keys."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor

from sbeval.attention import stickbreaking_attention, zigzag
from sbeval.attention.context_parallel import ContextParallel
from tests.marks import exhaustive

TOKENS, HEADS, GROUPS, HEAD_DIM = 360, 4, 2, 16
OPTIONS: dict[str, Any] = {"dense": {}, "current": {"attend_current": True}, "skipping": {"skip_threshold": 1e-6}}


@given(st.integers(1, 6), st.integers(2, 5000), st.integers(2, 700))
def test_every_process_has_every_older_key_once_and_as_much_work(ranks: int, chunk_tokens: int, first: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zigzag, "FIRST_RANGE_TOKENS", first)
        lists = [zigzag.key_ranges(rank, ranks, chunk_tokens) for rank in range(ranks)]
    for rank, own in enumerate(lists):
        older, newer = zigzag.chunks_of(rank, ranks)
        ends = [(zigzag.chunks_of(each.holder, ranks)[each.newer] * chunk_tokens, each) for each in own]
        keys = [key for base, each in ends for key in range(base + each.stop - 1, base + each.start - 1, -1)]
        assert keys == list(range(newer * chunk_tokens))[::-1]
        assert all(each.of_both == (base < older * chunk_tokens) for base, each in ends)
    for places in zip(*lists, strict=True):
        work = [(each.stop - each.start) * (1 + each.of_both) for each in places]
        assert max(work) - min(work) <= 2


def inputs(dtype: torch.dtype, logit_scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, HEADS, TOKENS, HEAD_DIM), *[(2, GROUPS, TOKENS, HEAD_DIM)] * 2]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return [q * logit_scale, k, v]


def worker(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo")
    zigzag.FIRST_RANGE_TOKENS = 8
    context = ContextParallel()
    own = context.positions(TOKENS)
    found: dict[str, Any] = {"own": own}
    for name, options in OPTIONS.items():
        q, k, v = (each[:, :, own].requires_grad_() for each in inputs(torch.float32, 0.3))
        with torch.no_grad():
            found[name] = tuple(context.stickbreaking_attention(q, k, v, **options))
        out = context.stickbreaking_attention(q, k, v, **options)
        loss = out.output.square().sum() + out.remainder.sum()
        found[f"{name} grad"] = (out.output.detach(), *torch.autograd.grad(loss, (q, k, v)))
    low = [each[:, :, own] for each in inputs(torch.bfloat16, 0.3)]
    found["bf16"] = tuple(context.stickbreaking_attention(*low))
    before = context.transfers.received_bytes, context.transfers.whole_bytes
    near = [each[:, :, own] for each in inputs(torch.float32, 3.0)]
    found["near"] = tuple(context.stickbreaking_attention(*near, skip_threshold=1e-5))
    found["bytes"] = (context.transfers.received_bytes - before[0], context.transfers.whole_bytes - before[1])
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=exhaustive(2, 4))
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(worker, folder, processes=request.param)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


def whole(found: list[dict[str, Any]], name: str, index: int) -> Tensor:
    """Returns one tensor of a result with its positions in order."""
    order = torch.cat([each["own"] for each in found]).argsort()
    return torch.cat([each[name][index] for each in found], dim=2).index_select(2, order)


def test_every_token_is_held_once_and_work_is_equal(found: list[dict[str, Any]]) -> None:
    assert torch.cat([each["own"] for each in found]).sort().values.tolist() == list(range(TOKENS))
    assert len({int(each["own"].sum()) for each in found}) == 1


@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_are_those_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    expected = stickbreaking_attention(*inputs(torch.float32, 0.3), impl="blockwise", **OPTIONS[name])
    for index, exact in enumerate(expected):
        torch.testing.assert_close(whole(found, name, index), exact, rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    q, k, v = (each.requires_grad_() for each in inputs(torch.float32, 0.3))
    out = stickbreaking_attention(q, k, v, impl="blockwise", **OPTIONS[name])
    grads = torch.autograd.grad(out.output.square().sum() + out.remainder.sum(), (q, k, v))
    for index, exact in enumerate((out.output.detach(), *grads)):
        assert (whole(found, f"{name} grad", index) - exact).norm() / exact.norm() < 1e-6, index


def test_half_precision_stays_within_its_rounding(found: list[dict[str, Any]]) -> None:
    exact = stickbreaking_attention(*inputs(torch.bfloat16, 0.3), impl="blockwise").output
    assert (whole(found, "bf16", 0).float() - exact.float()).norm() / exact.float().norm() < 4e-3


def test_spent_sticks_ask_for_no_older_keys(found: list[dict[str, Any]]) -> None:
    exact = stickbreaking_attention(*inputs(torch.float32, 3.0), impl="blockwise")
    assert (whole(found, "near", 0) - exact.output).abs().max() < 1e-4
    received, all_of_it = (sum(each["bytes"][index] for each in found) for index in range(2))
    assert 0 < received < all_of_it
    # without skipping, each rank receives all keys of other ranks that are older than its newer chunk
    ranks, chunk_bytes = len(found), TOKENS // (2 * len(found)) * 2 * 2 * GROUPS * HEAD_DIM * 4
    assert all_of_it == sum(2 * ranks - 2 - rank for rank in range(ranks)) * chunk_bytes
