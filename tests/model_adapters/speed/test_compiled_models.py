"""Models with replaced parts under torch.compile, as `cache_implementation=static` runs them on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers.generation import GenerationMixin

from sbeval.model_adapters.speed.faster import make_faster
from sbeval.model_adapters.speed.generating import steps_without_plans
from tests.model_adapters.small import odd

TOKENS = torch.arange(24)[None]


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_neox"])
def test_a_faster_model_is_compiled_whole_and_once(architecture: str) -> None:
    model = odd(architecture, head_dim=16)
    expected = model(TOKENS).logits
    assert make_faster(model)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(TOKENS, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1


def test_generation_with_a_static_cache_is_compiled_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = odd("llama", head_dim=16)
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(TOKENS, **settings)
    make_faster(model)
    monkeypatch.setattr(GenerationMixin, "_valid_auto_compile_criteria", lambda *_, **__: True)  # as on a GPU
    torch._dynamo.reset()
    compiling = transformers.CompileConfig(backend="eager", mode=None, fullgraph=False)
    with steps_without_plans(model):
        found = model.generate(TOKENS, cache_implementation="static", compile_config=compiling, **settings)
    assert torch.equal(found, expected)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
