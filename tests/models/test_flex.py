"""FlexAttention with our biases and windows is the softmax of the definition, and nothing is lost where it fails."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from sbeval.models import flex
from sbeval.models.biases import AlibiBias, FireBias
from sbeval.models.flex import (
    LONG_TOKENS,
    SHORTEST,
    CompiledFlexAttention,
    causal_blocks,
    flex_causal_attention,
    flex_with_options,
    long_causal_attention,
    suits_flex,
    suits_long_flex,
    whole_blocks,
)
from sbeval.models.softmax import Bias, softmax_attention

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# compiling for a CPU takes minutes over all cases; not compiled it computes the same from all pairs
ATTENTION = torch.compile(flex_with_options, dynamic=True, fullgraph=True) if ON_GPU else flex_with_options
WINDOWS = [37, 200, 10**6] if ON_GPU else [1, 37, 128, 200, 10**6]  # a window of 1 would be compiled for itself
NEAR = {"rtol": 1e-4, "atol": 3e-4} if ON_GPU else {"rtol": 1e-5, "atol": 1e-5}  # TF32 or the like in its products


def make_bias(kind: str, heads: int) -> Bias | None:
    torch.manual_seed(0)
    if kind == "none":
        return None
    if kind == "alibi":
        return AlibiBias(heads)
    bias = FireBias(heads)
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        bias.threshold.fill_(20.0)
    return bias.to(DEVICE)


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(["none", "alibi", "fire"]),
    length=st.sampled_from([1, 60, 128, 300]),
    window=st.sampled_from(WINDOWS),
    heads=st.sampled_from([(4, 4), (6, 2)]),
    later=st.sampled_from([0, 1000]),
)
@torch.no_grad()
def test_it_is_the_attention_of_the_definition(
    kind: str, length: int, window: int, heads: tuple[int, int], later: int
) -> None:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, h, length, 16, generator=generator).to(DEVICE) for h in (heads[0], heads[1], heads[1]))
    bias = make_bias(kind, heads[0])
    positions = torch.arange(later, later + length, device=DEVICE)
    expected = softmax_attention(
        q.double(),
        k.double(),
        v.double(),
        scale=0.3,
        sliding_window=window,
        bias=bias,
        position_ids_BQ=positions[None],
    )
    found = flex_causal_attention(
        q,
        k,
        v,
        scale=0.3,
        sliding_window=min(window, length),
        score_mod=None if bias is None else bias.score_mod(positions, q.device),
        attention=ATTENTION,
    )
    assert_close(found.double(), expected, **NEAR)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 900), window=st.integers(1, 1000))
def test_blocks_hold_every_pair_that_is_seen_and_full_ones_no_other(length: int, window: int) -> None:
    blocks = causal_blocks(length, window, torch.device("cpu"))
    count = -(-length // 128)
    index = torch.arange(count * 128)
    distance = index[:, None] - index
    seen = ((distance >= 0) & (distance < window)).view(count, 128, count, 128)
    listed: dict[str, torch.Tensor] = {}
    for name, counts, indices in (
        ("partial", blocks.kv_num_blocks, blocks.kv_indices),
        ("full", blocks.full_kv_num_blocks, blocks.full_kv_indices),
    ):
        listed[name] = torch.zeros(count, count, dtype=torch.bool)
        for row in range(count):
            listed[name][row, indices[0, 0, row, : counts[0, 0, row]].long()] = True
    assert torch.equal(listed["full"], seen.all(3).all(1))
    assert torch.equal(listed["full"] | listed["partial"], seen.any(3).any(1))
    assert not bool((listed["full"] & listed["partial"]).any())


def problem() -> dict[str, Any]:
    q, k, v = torch.randn(3, 1, 2, 5, 16)
    return {"q_BHLD": q, "k_BGLD": k, "v_BGLD": v, "scale": 0.3, "sliding_window": 5, "score_mod": None}


def test_a_failure_to_compile_is_told_once_and_not_met_again(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fails(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        raise RuntimeError("there is no compiler\nand more")

    attention = CompiledFlexAttention(fails)
    assert attention(**problem()) is None
    assert attention(**problem()) is None
    assert len(calls) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "PyTorch's FlexAttention does not run here (there is no compiler): going on with blocks of rows"
    ]


def test_memory_that_runs_out_is_no_failure_to_compile() -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError

    attention = CompiledFlexAttention(fails)
    with pytest.raises(torch.OutOfMemoryError):
        attention(**problem())
    assert attention.works


@pytest.mark.parametrize("with_gradient", ["q", "k", "v", "bias", None])
def test_whatever_keeps_a_gradient_keeps_flex_out(with_gradient: str | None) -> None:
    with FakeTensorMode():
        tensors = {name: torch.empty(1, 2, SHORTEST, 64, device="cuda") for name in ("q", "k", "v", "bias")}
        if with_gradient is not None:
            tensors[with_gradient].requires_grad_()
        assert suits_flex(*tensors.values()) == (with_gradient is None)
        with torch.no_grad():
            assert suits_flex(*tensors.values())


def test_one_process_may_compile_more_kinds_than_dynamo_allows_by_itself() -> None:
    compiled = torch.compile(flex_with_options, dynamic=True, fullgraph=True, backend="eager")
    attention = CompiledFlexAttention(compiled)
    kinds = range(2, torch._dynamo.config.recompile_limit + 4)
    torch._dynamo.reset()
    for heads in kinds:
        q, k, v = torch.randn(3, 1, heads, 5, 16)
        with torch.no_grad():
            assert attention(q, k, v, scale=0.3, sliding_window=5, score_mod=None) is not None
    assert attention.works


Options = Callable[..., dict[str, Any]]


@pytest.fixture
def options_of(capability: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> Options:
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
def capability(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """The compute capability PyTorch reports."""
    reported = {"is": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: reported["is"])
    monkeypatch.setattr(flex, "_blocks", lambda *_: None)  # a fake device has none
    return reported


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("windowed", [True, False])
def test_what_holds_without_a_window_alone_is_said_without_a_window_alone(
    biased: bool, windowed: bool, options_of: Options
) -> None:
    options = options_of(
        torch.bfloat16,
        32,
        sliding_window=300 if windowed else 4096,
        score_mod=(lambda logit, *_: logit) if biased else None,
    )
    assert options["BLOCK_M"] == 64
    assert ("ROWS_GUARANTEED_SAFE" in options) == ("BLOCKS_ARE_CONTIGUOUS" in options) == (not windowed)
    assert "PRESCALE_QK" not in options


def test_tiles_are_those_of_pytorch_where_they_were_not_tuned(
    options_of: Options, capability: dict[str, tuple[int, int]]
) -> None:
    assert "BLOCK_M" in options_of(torch.float16, 24)
    for dtype, head_dim in ((torch.float32, 32), (torch.bfloat16, 40), (torch.bfloat16, 64)):
        assert set(options_of(dtype, head_dim)) == {"IS_DIVISIBLE"}
    capability["is"] = (8, 0)
    assert set(options_of(torch.bfloat16, 32)) == {"IS_DIVISIBLE"}


def test_long_plain_attention_is_for_small_heads_as_many_for_keys_as_for_queries(
    capability: dict[str, tuple[int, int]],
) -> None:
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
        q = torch.empty(plain, dtype=torch.bfloat16, device="cuda").requires_grad_()
        assert not suits_long_flex(q, q, q)
    capability["is"] = (10, 0)
    assert not suits(plain)


def test_a_cpu_keeps_its_own_attention() -> None:
    q = torch.empty(1, 2, LONG_TOKENS, 32, dtype=torch.bfloat16)
    assert long_causal_attention(q, q, q, scale=0.3) is None


tuned_gpu = pytest.mark.skipif(
    not ON_GPU or torch.cuda.get_device_capability() != (9, 0), reason="tiles are tuned for compute capability 9.0"
)


@torch.no_grad()
def test_options_are_constants_of_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("texts", "length", "head_dim"), [(1, LONG_TOKENS, 32), (2, LONG_TOKENS + 77, 32), (1, 6000, 24), (1, 8192, 16)]
)
def test_long_plain_attention_errs_no_more_than_pytorchs(
    dtype: torch.dtype, texts: int, length: int, head_dim: int
) -> None:
    generator = torch.Generator("cuda").manual_seed(length)
    # heads as a model's projections leave them, one position after the other
    shape = (3, texts, length, 4, head_dim)
    q, k, v = torch.randn(shape, generator=generator, device="cuda").to(dtype).transpose(2, 3)
    scale = 2.0 * head_dim**-0.5
    found = long_causal_attention(q, k, v, scale=scale)
    assert found is not None
    assert found.dtype == dtype
    assert torch.equal(softmax_attention(q, k, v, scale=scale), found)
    expected = _exact(q, k, v, scale=scale)
    others = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    error, error_of_others = ((x.double() - expected).square().mean().sqrt() for x in (found, others))
    assert error <= 1.2 * error_of_others
    assert_close(found, others, rtol=2**-6, atol=2**-6 if dtype == torch.bfloat16 else 2**-9)


def _exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    bias: Bias | None = None,
) -> torch.Tensor:
    """The definition in fp64, text by text and head by head."""
    length = q.shape[2]
    index = torch.arange(length, device=q.device)
    distance = index[:, None] - index
    seen = (distance >= 0) & (distance < (window or length))
    added = None if bias is None else bias(index[None], distance)[0]
    output = torch.empty_like(q, dtype=torch.float64)
    for text in range(q.shape[0]):
        for head in range(q.shape[1]):
            logits = scale * q[text, head].double() @ k[text, head].double().mT
            if added is not None:
                logits += added[head]
            output[text, head] = logits.masked_fill_(~seen, -torch.inf).softmax(-1) @ v[text, head].double()
    return output


@tuned_gpu
@torch.no_grad()
@pytest.mark.parametrize("kind", ["none", "alibi", "fire"])
@pytest.mark.parametrize("window", [None, 60, 300, 1500])
@pytest.mark.parametrize("length", [2048, 1999])
def test_tuned_tiles_change_no_window_and_no_bias(kind: str, window: int | None, length: int) -> None:
    generator = torch.Generator("cuda").manual_seed(length)
    q, k, v = torch.randn(3, 1, 4, length, 32, generator=generator, device="cuda").to(torch.bfloat16)
    bias = make_bias(kind, 4)
    positions = torch.arange(length, device="cuda")
    found = flex_causal_attention(
        q,
        k,
        v,
        scale=0.3,
        sliding_window=window or length,
        score_mod=None if bias is None else bias.score_mod(positions, q.device),
        attention=ATTENTION,
    )
    assert found.isfinite().all()
    expected = _exact(q, k, v, scale=0.3, window=window, bias=bias)
    assert_close(found.double(), expected, rtol=2**-6, atol=2**-6)


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 500))
def test_positions_of_fire_reach_to_the_end_of_the_last_block(length: int) -> None:
    add = make_bias("fire", 2).score_mod(torch.arange(length, device=DEVICE), torch.device(DEVICE))
    last = torch.tensor(whole_blocks(length) - 1, device=DEVICE)
    zero = torch.zeros((), device=DEVICE)
    assert add(zero, zero.int(), zero.int(), last, last).isfinite()
