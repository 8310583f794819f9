"""FlexAttention's kernel is told what holds, and long plain texts of small heads go through it.

What is tuned runs on a GPU of one kind alone; elsewhere the choices are tested, not the kernel.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from sbeval.models import flex
from sbeval.models.flex import (
    LONG_TOKENS,
    CompiledFlexAttention,
    flex_causal_attention,
    flex_with_options,
    suits_long_flex,
)
from sbeval.models.softmax import long_causal_attention, softmax_attention
from tests.models.small import make_bias

Options = Callable[..., dict[str, Any]]


@pytest.fixture
def options_of(capability, monkeypatch) -> Options:
    """From a dtype and a size of heads to what FlexAttention's kernel would be compiled with on a GPU."""

    def of(dtype: torch.dtype, head_dim: int, **changes: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def attention(*args: Any, **options: Any) -> torch.Tensor:
            found.update(options["kernel_options"])
            return torch.empty(1, 2, 4096, head_dim)

        monkeypatch.setattr(flex, "flex_attention", attention)
        with FakeTensorMode():
            q = torch.empty(1, 2, 4096, head_dim, dtype=dtype, device="cuda")
            flex_causal_attention(q, q, q, scale=0.3, **{"sliding_window": 4096, "score_mod": None, **changes})
        return found

    return of


@pytest.fixture
def capability(monkeypatch) -> dict[str, tuple[int, int]]:
    """The compute capability PyTorch reports."""
    reported = {"is": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: reported["is"])
    monkeypatch.setattr(flex, "_blocks", lambda *_: None)  # a fake device has none
    return reported


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("windowed", [True, False])
def test_what_holds_without_a_window_alone_is_said_without_a_window_alone(biased, windowed, options_of):
    score_mod = (lambda logit, *_: logit) if biased else None
    options = options_of(torch.bfloat16, 32, sliding_window=300 if windowed else 4096, score_mod=score_mod)
    assert options["BLOCK_M"] == 64
    assert ("ROWS_GUARANTEED_SAFE" in options) == ("BLOCKS_ARE_CONTIGUOUS" in options) == (not windowed)
    assert "PRESCALE_QK" not in options


def test_tiles_not_tuned_are_those_of_pytorch(options_of, capability):
    assert "BLOCK_M" in options_of(torch.float16, 24)
    for dtype, head_dim in ((torch.float32, 32), (torch.bfloat16, 40), (torch.bfloat16, 64)):
        assert set(options_of(dtype, head_dim)) == {"IS_DIVISIBLE"}
    capability["is"] = (8, 0)
    assert set(options_of(torch.bfloat16, 32)) == {"IS_DIVISIBLE"}


def test_long_plain_attention_is_for_small_heads_without_groups(capability):
    def suits(
        shape: tuple[int, ...], keys: tuple[int, ...] | None = None, *, dtype: torch.dtype = torch.bfloat16
    ) -> bool:
        with FakeTensorMode():
            q, k = (torch.empty(x, dtype=dtype, device="cuda") for x in (shape, keys or shape))
            return suits_long_flex(q, k, k)

    plain = (1, 4, LONG_TOKENS, 32)
    assert suits(plain)
    assert suits((2, 4, LONG_TOKENS + 1, 16), dtype=torch.float16)
    assert not suits((1, 4, LONG_TOKENS - 1, 32))
    assert not suits((1, 4, LONG_TOKENS, 64))
    assert not suits((1, 4, LONG_TOKENS, 8))
    assert not suits(plain, (1, 2, LONG_TOKENS, 32))
    assert not suits(plain, (1, 4, LONG_TOKENS + 1, 32))
    assert not suits(plain, dtype=torch.float32)
    with FakeTensorMode():
        q = torch.empty(plain, dtype=torch.bfloat16, device="cuda")
        assert not suits_long_flex(q, q, q.float())
        q = torch.empty(plain, dtype=torch.bfloat16, device="cuda").requires_grad_()
        assert not suits_long_flex(q, q, q)
    capability["is"] = (10, 0)
    assert not suits(plain)


def test_a_cpu_keeps_its_own_attention():
    for length, head_dim in ((LONG_TOKENS, 32), (2**17, 128)):
        q = torch.empty(1, 2, length, head_dim, dtype=torch.bfloat16)
        assert long_causal_attention(q, q, q, scale=0.3) is None


@pytest.mark.exhaustive
@torch.no_grad()
@pytest.mark.parametrize("heads_first", [True, False])
def test_whole_blocks_and_a_length_between_them_share_one_kernel(heads_first):
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    attention = CompiledFlexAttention(torch.compile(flex_with_options, dynamic=True, fullgraph=True, backend=backend))
    limit = torch._dynamo.config.recompile_limit
    for length, rotated in ((384, False), (300, False), (640, True), (639, True)):
        # projections leave one position after the other
        shape = (1, 4, length, 16) if heads_first else (1, length, 4, 16)
        q, k, v = (torch.randn(shape) if heads_first else torch.randn(shape).transpose(1, 2) for _ in range(3))
        q = q.clone() if rotated else q  # and so no view of anything
        found = attention(q, k, v, scale=0.3, sliding_window=length, score_mod=None)
        assert_close(found, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3))
    assert len(compiled) == 1
    assert torch._dynamo.config.recompile_limit == limit


tuned_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="tiles are tuned for compute capability 9.0",
)


@torch.no_grad()
def test_options_are_constants_of_what_is_compiled(monkeypatch):
    monkeypatch.setattr(flex, "is_tuned", lambda q: True)
    options: list[dict[str, Any]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        options.extend(node.args[6] for node in graph.graph.nodes if "flex_attention" in str(node.target))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(flex_with_options, dynamic=True, fullgraph=True, backend=backend)
    for length in (256, 300, 640):
        q, k, v = torch.randn(3, 1, 2, length, 16)
        flex_causal_attention(q, k, v, scale=0.3, sliding_window=length, score_mod=None, attention=compiled)
    assert options
    for of_one in options:
        assert of_one["IS_DIVISIBLE"] is True
        assert (of_one["BLOCK_M"], of_one["BLOCK_N"], of_one["num_warps"], of_one["num_stages"]) == (64, 64, 4, 3)
        assert all(isinstance(value, bool | int | str) for value in of_one.values())


@tuned_gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("texts", "length", "head_dim"), [(1, 4096, 32), (2, 4096 + 77, 32), (1, 6000, 24), (1, 8192, 16)]
)
def test_long_plain_attention_errs_no_more_than_pytorchs(dtype, texts, length, head_dim, monkeypatch):
    monkeypatch.setattr(flex, "LONG_TOKENS", 4096)  # all pairs of more would fill the memory
    generator = torch.Generator("cuda").manual_seed(length)
    # heads as a model's projections leave them, one position after the other
    shape = (3, texts, length, 4, head_dim)
    q, k, v = torch.randn(shape, generator=generator, device="cuda").to(dtype).transpose(2, 3)
    scale = 2.0 * head_dim**-0.5
    found = long_causal_attention(q, k, v, scale=scale)
    assert found.dtype == dtype
    assert torch.equal(softmax_attention(q, k, v, scale=scale), found)
    expected = softmax_attention(*(x.double() for x in (q, k, v)), scale=scale)  # in blocks of rows
    others = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    error, error_of_others = ((x.double() - expected).square().mean().sqrt() for x in (found, others))
    assert error <= 1.2 * error_of_others
    assert_close(found, others, rtol=2**-6, atol=2**-6 if dtype == torch.bfloat16 else 2**-9)


@tuned_gpu
@torch.no_grad()
@pytest.mark.parametrize("kind", ["none", "alibi", "fire"])
@pytest.mark.parametrize("window", [None, 60, 300, 1500])
@pytest.mark.parametrize("length", [2048, 1999])
def test_tuned_tiles_change_no_window_and_no_bias(kind, window, length):
    generator = torch.Generator("cuda").manual_seed(length)
    q, k, v = torch.randn(3, 1, 4, length, 32, generator=generator, device="cuda").to(torch.bfloat16)
    bias = make_bias(kind, 4)
    positions = torch.arange(length, device="cuda")
    score_mod = None if bias is None else bias.score_mod(positions, q.device)
    found = CompiledFlexAttention()(q, k, v, scale=0.3, sliding_window=window or length, score_mod=score_mod)
    assert found.isfinite().all()
    exact = (x.double() for x in (q, k, v))
    expected = softmax_attention(*exact, scale=0.3, sliding_window=window, bias=bias, position_ids_BQ=positions[None])
    assert_close(found.double(), expected, rtol=2**-6, atol=2**-6)
