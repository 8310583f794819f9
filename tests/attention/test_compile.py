"""The operation inside torch.compile and CUDA graphs.

The graph test needs a GPU: `pytest tests/attention/test_compile.py -k cuda_graph`.
"""

from typing import Any

import pytest
import torch
from attention_problems import DEVICE, Problem, outputs_and_gradients, problem
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from sbeval.attention import stickbreaking_attention
from sbeval.attention.impl import blockwise as blocks
from sbeval.attention.impl.triton import function as kernels
from tests.marks import exhaustive

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "current-skip": {"attend_current": True, "skip_threshold": 1e-3},
    "padded": {"seq_start": torch.tensor([5], dtype=torch.int32, device=DEVICE)},
    "packed": {"cu_seqlens": torch.tensor([0, 7, 30], dtype=torch.int32, device=DEVICE)},
}


def small(queries: int = 30) -> Problem:
    return problem(heads=2, groups=1, queries=queries, keys=30, head_dim=16, dtype=torch.float32)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole_gives_the_same_with_gradients(impl: str, call: str, backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(stickbreaking_attention, fullgraph=True, backend=backend)
    p, options = small(), {"impl": impl, **CALLS[call]}
    torch.testing.assert_close(outputs_and_gradients(p, compiled, **options), outputs_and_gradients(p, **options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("impl", ["triton", *exhaustive("blockwise")])
def test_one_trace_serves_every_length_and_gradients_are_the_same(impl: str) -> None:
    torch._dynamo.reset()
    traces: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        traces.append(graph)
        return graph

    counted, differentiable = (
        torch.compile(stickbreaking_attention, fullgraph=True, dynamic=True, backend=backend)
        for backend in (counting, "aot_eager")
    )
    for queries in (7, 30, 19, 12):
        p = small(queries)
        expected, found = outputs_and_gradients(p, impl=impl), outputs_and_gradients(p, differentiable, impl=impl)
        with torch.no_grad():
            torch.testing.assert_close(counted(p.q, p.k, p.v, impl=impl).output, expected["output"])
        torch.testing.assert_close(found, expected)
    assert len(traces) == 1


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_an_exported_program_serves_every_length(impl: str) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return stickbreaking_attention(q, k, v, impl=impl).output

    length = {2: torch.export.Dim("length", min=2, max=2**20)}
    p = small()
    with torch.no_grad():
        exported = torch.export.export(Attention(), (p.q, p.k, p.v), dynamic_shapes=(length, length, length)).module()
        for queries in (7, 200):
            other = problem(heads=2, groups=1, queries=queries, dtype=torch.float32, seed=1)
            inputs = (other.q, other.k, other.v)
            torch.testing.assert_close(exported(*inputs), Attention()(*inputs))


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize(
    ("call", "dtype"), [*((call, torch.float32) for call in CALLS), ("plain", torch.float16)], ids=str
)
def test_registered_operators_keep_their_promises(impl: str, call: str, dtype: torch.dtype) -> None:
    p = small().to(dtype)
    # a layer's queries usually are a transposed view
    q = p.q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    options = CALLS[call]
    current, seq_start, packed = options.get("attend_current", False), options.get("seq_start"), None
    threshold, cu_seqlens = options.get("skip_threshold"), options.get("cu_seqlens")
    module = blocks if impl == "blockwise" else kernels
    if cu_seqlens is not None:
        packed = cu_seqlens if impl == "blockwise" else kernels.row_starts(cu_seqlens, 30)
    inputs = [q, p.k.requires_grad_(), p.v.requires_grad_(), 0.25, current, seq_start, packed, threshold]
    if impl == "triton":
        inputs.append(True)
    torch.library.opcheck(module._forward, inputs)
    _, *kept = (tensor.detach() for tensor in module._forward(*inputs))
    own = [tensor.detach() for tensor in (q, p.k, p.v)]
    torch.library.opcheck(
        module._backward, [*own, p.d_output, p.d_remainder.float(), *kept, 0.25, current, seq_start, packed]
    )


@pytest.mark.parametrize("queries", [3, *exhaustive(1, 30)])
def test_what_nobody_differentiates_keeps_its_promises(queries: int) -> None:
    p = small(queries)
    # a layer's queries usually are a transposed view
    q = p.q.transpose(1, 2).contiguous().transpose(1, 2)
    for skip_threshold in (None, 1e-3):
        torch.library.opcheck(kernels._forward, [q, p.k, p.v, 0.25, False, None, None, skip_threshold, False])


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return stickbreaking_attention(q, k, v, impl="triton").output


class Operators(TorchDispatchMode):
    """Keeps the names of what is called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_one_operator() -> None:
    p = small()
    with torch.no_grad(), Operators() as seen:
        attend(p.q, p.k, p.v)
    assert seen.names.count("sbeval::stickbreaking_forward") == 1
    assert not any("empty" in name for name in seen.names), "what the launch does is the operator's own"


@pytest.mark.filterwarnings("ignore")  # of a tracer that PyTorch has given up
def test_traces_by_example_hold_the_operator_and_not_its_result() -> None:
    p, other = small(), problem(heads=2, groups=1, queries=30, keys=30, head_dim=16, dtype=torch.float32, seed=1)
    with torch.no_grad():
        for traced in (make_fx(attend)(p.q, p.k, p.v), torch.jit.trace(attend, (p.q, p.k, p.v))):
            torch.testing.assert_close(traced(other.q, other.k, other.v), attend(other.q, other.k, other.v))


@pytest.mark.parametrize("which", ["qkv", "k", "v"])
def test_fake_tensors_give_fake_tensors(which: str) -> None:
    p = small()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = {name: getattr(p, name) for name in "qkv"}
    with torch.no_grad():
        inputs |= {name: mode.from_tensor(inputs[name]) for name in which}
        assert isinstance(attend(**inputs), FakeTensor)


@pytest.mark.parametrize("impl", ["reference", "blockwise", "triton"])
def test_packed_sequences_of_shapes_alone_give_shapes(impl: str) -> None:
    p, bounds = small(), torch.tensor([0, 7, 30], dtype=torch.int32, device=DEVICE)
    mode = FakeTensorMode()
    q, k, v, cu_seqlens = (mode.from_tensor(tensor) for tensor in (p.q, p.k, p.v, bounds))
    with torch.no_grad(), mode:
        found = stickbreaking_attention(q, k, v, cu_seqlens=cu_seqlens, impl=impl)
    assert isinstance(found.output, FakeTensor)
    assert (found.output.shape, found.remainder.shape) == (q.shape, q.shape[:3])


def test_tensors_without_values_give_shapes_on_a_device_without_values() -> None:
    p = small()
    q, k, v, cu_seqlens = (x.to("meta") for x in (p.q, p.k, p.v, torch.tensor([0, 7, 30], dtype=torch.int32)))
    for options in ({}, {"cu_seqlens": cu_seqlens}):
        assert stickbreaking_attention(q, k, v, **options).output.shape == q.shape


class Wrapped(Tensor):
    """A tensor that has no memory of its own, as those of quantized caches and of distributed models."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        wrapped.inner = inner
        return wrapped  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [each.inner if isinstance(each, Wrapped) else each for each in args]
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize("queries", [2, 30], ids=["decode", "all"])
@pytest.mark.parametrize("which", ["q", "k", "v", "kv", "seq_start"])
def test_tensors_without_memory_of_their_own_see_the_operator(which: str, queries: int) -> None:
    p = problem(heads=2, queries=queries, keys=600 if queries == 2 else 30, dtype=torch.float32)
    inputs = {"q": p.q, "k": p.k, "v": p.v, "seq_start": torch.tensor([5], device=DEVICE)}
    with torch.no_grad():
        expected = stickbreaking_attention(**inputs, impl="triton").output
        for name in [which] if which == "seq_start" else which:
            inputs[name] = Wrapped(inputs[name])
        assert torch.equal(stickbreaking_attention(**inputs, impl="triton").output, expected)


def test_what_nothing_follows_goes_past_the_operator_to_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    p = small()
    with torch.no_grad():
        expected = kernels._forward(p.q, p.k, p.v, 0.25, False, None, None, None, False)[0]
        monkeypatch.setattr(kernels, "_forward", None)
        torch.testing.assert_close(attend(p.q, p.k, p.v), expected, rtol=0, atol=0)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("call", CALLS)
def test_a_cuda_graph_replays_forward_and_backward(call: str) -> None:
    p, options = small(), CALLS[call]
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in (p.q, p.k, p.v))

    def step() -> tuple[Tensor, ...]:
        output, remainder = stickbreaking_attention(q, k, v, impl="triton", **options)
        return output, remainder, *torch.autograd.grad((output, remainder), (q, k, v), (p.d_output, p.d_remainder))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    other = problem(heads=2, groups=1, queries=30, dtype=torch.float32, seed=1)
    with torch.no_grad():
        for tensor, new in ((q, other.q), (k, other.k), (v, other.v)):
            tensor.copy_(new)
    graph.replay()
    for found, expected in zip(recorded, step(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
