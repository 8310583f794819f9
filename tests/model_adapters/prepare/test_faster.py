"""Padded linear maps, fused norms, MLPs and rotations compute what the model's own parts do."""

import copy
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.hooks import attach_align_device_hook_on_blocks
from torch import nn
from transformers.generation import GenerationMixin

from sbeval.model_adapters.generate.growing_cache import steps_without_plans
from sbeval.model_adapters.prepare.changes.linear import AlignedLinear, align_linears
from sbeval.model_adapters.prepare.changes.mlps import FusedGatedMLP, fuse_mlps
from sbeval.model_adapters.prepare.changes.rotations import FusedRotation, fuse_rotations
from sbeval.models import SbevalForCausalLM
from sbeval.models.mlp import Mixture
from sbeval.scoring.scorer import TokenScorer
from tests.marks import exhaustive
from tests.model_adapters.prepare.faster import make_faster
from tests.model_adapters.small import ARCHITECTURES, odd

TOKENS = torch.arange(40)[None]
OF_EACH_KIND = ("llama", "gemma2", "gpt_neox", "stickbreaking", "rope", "gpt2")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU kernels run in Triton's interpreter


@pytest.mark.parametrize("architecture", [*OF_EACH_KIND, *exhaustive(*sorted({*ARCHITECTURES} - {*OF_EACH_KIND}))])
@torch.no_grad()
def test_a_faster_model_gives_the_same_logits_with_fused_rotations_and_gated_mlps(architecture):
    model = odd(architecture)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    expected, state = model(TOKENS).logits, copy.deepcopy(model.state_dict())
    own = {type(module): type(module).forward for module in model.modules()}
    assert make_faster(model)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {n: t.shape for n, t in state.items()}
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    # Cohere rotates neighbours, our own family has its kernel in its own rotation
    own_or_other = isinstance(model, SbevalForCausalLM) or architecture in ("cohere", "gpt2")
    assert len(rotated(model)) == (0 if own_or_other else len(model.base_model.layers))
    gated = 0 if architecture in ("gpt2", "gpt_neox") else len(model.base_model.layers)
    gated -= sum(isinstance(module, Mixture) for module in model.modules())
    assert sum(isinstance(module, FusedGatedMLP) for module in model.modules()) == gated
    assert all(kind.forward is forward for kind, forward in own.items())


def test_gemmas_norms_are_left_alone_and_llamas_are_fused():
    for architecture, fused in (("llama", True), ("qwen3", True), ("gemma2", False), ("gemma3", False)):
        model = odd(architecture)
        make_faster(model)
        assert any(isinstance(module, nn.RMSNorm) for module in model.modules()) == fused


def test_a_norm_that_also_adds_stays_as_it_is_beside_others_that_are_fused():
    class AddingRMSNorm(transformers.models.llama.modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(hidden_states if residual is None else hidden_states + residual)

    class AddingLayer(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
            mixed = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
            return hidden_states + mixed + self.mlp(self.post_attention_layernorm(mixed, hidden_states))

    model = odd("llama")
    adding = [layer.post_attention_layernorm for layer in model.model.layers]
    for layer in model.model.layers:
        layer.__class__, layer.post_attention_layernorm.__class__ = AddingLayer, AddingRMSNorm
    assert make_faster(model)
    assert [layer.post_attention_layernorm for layer in model.model.layers] == adding
    assert isinstance(model.model.norm, nn.RMSNorm)


def rotated(model: nn.Module) -> list[str]:
    """The modules whose forward is a copy of their class's with another rotation."""
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    names = {name: getattr(forward, "__func__", forward).__globals__ for name, forward in forwards.items() if forward}
    return [name for name, known in names.items() if isinstance(known.get("apply_rotary_pos_emb"), FusedRotation)]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_neox", "stickbreaking"])
def test_gradients_of_a_faster_model_are_its_own(architecture):
    model = odd(architecture)

    def gradient() -> torch.Tensor:
        embeddings = model.get_input_embeddings().weight
        (gradient,) = torch.autograd.grad(model(TOKENS).logits.square().sum(), embeddings)
        return gradient

    expected = gradient()
    make_faster(model)
    torch.testing.assert_close(gradient(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


# the last two differ from relu and gelu beyond 6 and 10 alone
OTHERS = ("quick_gelu", "relu2", "relu6", "gelu_10")


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu", *OTHERS])
def test_an_mlp_is_fused_where_its_activation_is_known(activation):
    config = ARCHITECTURES["llama"](64)
    config.hidden_act = activation
    model = nn.Sequential(transformers.models.llama.modeling_llama.LlamaMLP(config))
    x = 2.0 * torch.randn(1, 3, config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    assert len(fuse_mlps(model)) == (activation not in OTHERS)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("limit", [7.0, 16.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_mlp_that_clamps_large_channels_alone_stays_as_it_is(limit, dtype):
    class Clamped(transformers.models.llama.modeling_llama.LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = self.gate_proj(x).clamp(max=limit), self.up_proj(x).clamp(-limit, limit)
            return self.down_proj(self.act_fn(gate) * up)

    torch.manual_seed(0)
    config = ARCHITECTURES["llama"](64)
    assert not fuse_mlps(nn.Sequential(Clamped(config)).to(dtype))
    assert fuse_mlps(nn.Sequential(transformers.models.llama.modeling_llama.LlamaMLP(config)).to(dtype))


def test_an_mlp_in_whole_numbers_stays_as_it_is():
    model = nn.Sequential(transformers.models.llama.modeling_llama.LlamaMLP(ARCHITECTURES["llama"](64)))
    for child in (model[0].gate_proj, model[0].up_proj, model[0].down_proj):
        child.weight = nn.Parameter(child.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)

        def asserts(x: torch.Tensor) -> None:
            raise AssertionError(x.dtype)

        child.forward = asserts
    assert not fuse_mlps(model)
    assert not align_linears(model)


@pytest.mark.parametrize("angles", [(2, 5, 8), (1, 5, 8), (2, 1, 8), (1, 1, 8)])
@pytest.mark.parametrize("texts", [1, 2])
def test_a_rotation_broadcasts_angles_as_the_models_own_does(angles, texts):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(texts, heads, 5, 8, generator=generator).to(DEVICE) for heads in (4, 2))
    halves = torch.randn(2, *angles[:2], angles[2] // 2, generator=generator).to(DEVICE)
    cos, sin = (torch.cat([half, half], dim=-1) for half in halves)
    own = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    for found, expected in zip(FusedRotation(own)(q, k, cos, sin), own(q, k, cos, sin), strict=True):
        torch.testing.assert_close(found, expected)


def test_an_attention_with_a_forward_of_its_own_stays_as_it_is():
    model = odd("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    first.forward = first.forward
    assert fuse_rotations(model) == [second]


class Quantised(torch.Tensor):
    """Stands for weights of a class of their own."""


def test_weights_of_a_class_of_their_own_stay_as_they_are():
    model = odd("llama")
    mlp, norm = model.model.layers[0].mlp, model.model.norm
    for module in (mlp.up_proj, norm):
        module.weight = nn.Parameter(module.weight.detach().as_subclass(Quantised), requires_grad=False)
    make_faster(model)
    assert type(mlp.up_proj) is nn.Linear
    assert type(mlp.gate_proj) is AlignedLinear
    assert type(model.model.norm) is type(norm)


def refusing(model: nn.Module, *, when: Callable[[object], bool]) -> nn.Module:
    """The model, whose forward asserts something of `use_cache`, as flash-linear-attention's do."""
    own = model.forward

    def forward(input_ids: torch.Tensor, use_cache: bool | None = None) -> object:
        assert not when(use_cache), "use_cache should be False in training"
        return own(input_ids=input_ids, use_cache=use_cache)

    model.forward = forward
    return model


def test_a_model_is_compared_without_keeping_its_input_and_run_as_it_is_where_it_refuses_that():
    assert make_faster(refusing(odd("llama"), when=lambda use_cache: use_cache is not False))
    model = refusing(odd("llama"), when=lambda use_cache: True)
    assert not make_faster(model)
    assert not any(isinstance(module, AlignedLinear | FusedGatedMLP | nn.RMSNorm) for module in model.modules())


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "stickbreaking"])
@pytest.mark.parametrize("offloaded", [False, True])
@torch.no_grad()
def test_a_model_spread_over_devices_keeps_its_own_parts_and_results(architecture, offloaded, tmp_path):
    model = odd(architecture)
    expected = model(TOKENS).logits
    body = model.base_model_prefix
    pieces = [f"{body}.{name}" for name, _ in model.base_model.named_children() if name != "layers"]
    pieces += [f"{body}.layers.{index}" for index in range(len(model.base_model.layers))]
    pieces += [name for name, _ in model.named_children() if name != body]
    keys = getattr(model, "_skip_keys_device_placement", None)
    if offloaded:
        places = {piece: "disk" if ".layers." in piece else "cpu" for piece in pieces}
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, skip_keys=keys)
    else:  # the hooks of a model on several devices, all of which are the CPU here
        attach_align_device_hook_on_blocks(
            model, dict.fromkeys(pieces, "cpu"), dict.fromkeys(pieces, False), skip_keys=keys
        )
    assert not make_faster(model)
    assert torch.equal(model(TOKENS).logits, expected)
    positions = torch.arange(20, 30)
    found = TokenScorer(model).score(TOKENS, torch.zeros_like(positions), positions, positions + 1)
    logprobs = expected[0, positions].log_softmax(-1).gather(1, positions[:, None] + 1)[:, 0]
    torch.testing.assert_close(found.logprobs, logprobs)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", *exhaustive("gemma2", "gpt_neox")])
def test_a_faster_model_is_compiled_whole_and_once(architecture):
    model = odd(architecture, head_dim=16)
    expected = model(TOKENS[:, :24]).logits
    assert make_faster(model)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(TOKENS[:, :24], use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1


@pytest.mark.exhaustive
def test_generation_with_a_static_cache_is_compiled_and_the_same(monkeypatch):
    model = odd("llama", head_dim=16)
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(TOKENS[:, :24], **settings)
    make_faster(model)
    monkeypatch.setattr(GenerationMixin, "_valid_auto_compile_criteria", lambda *_, **__: True)  # as on a GPU
    torch._dynamo.reset()
    compiling = transformers.CompileConfig(backend="eager", mode=None, fullgraph=False)
    with steps_without_plans(model):
        found = model.generate(TOKENS[:, :24], cache_implementation="static", compile_config=compiling, **settings)
    assert torch.equal(found, expected)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
