"""Padded linear maps and another attention for long plain causal texts compute what the model's own parts do."""

import copy
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sbeval.model_adapters.prepare.changes.linear import AlignedLinear, align_linears
from sbeval.model_adapters.prepare.changes.long_attention import AttentionOfLongTexts, fuse_long_attention
from sbeval.model_adapters.prepare.changes.rotations import fuse_rotations
from sbeval.model_adapters.prepare.replacing import give_back_forwards
from sbeval.models import flex
from sbeval.models.softmax import long_causal_attention
from tests.model_adapters.prepare.faster import make_faster
from tests.model_adapters.small import odd

TOKENS = torch.arange(40)[None]
PLAIN = {"llama", "qwen3", "gemma3", "granite", "cohere"}  # Gemma 3 in its layers without a window alone
TUNED_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


class Recorded:
    """Plain causal attention of [B, H, L, D] heads, and the shapes it was called with."""

    def __init__(self) -> None:
        self.shapes: list[torch.Size] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor | None:
        if not q.shape == k.shape == v.shape:
            return None
        self.shapes.append(q.shape)
        return scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, scale=scale).to(q.dtype)


def model_of(architecture: str, *, key_heads: int = 4, **options: Any) -> transformers.PreTrainedModel:
    """A small model with heads of 16 channels."""
    return odd(architecture, head_dim=16, num_key_value_heads=key_heads, **options)


@pytest.mark.parametrize("architecture", sorted(PLAIN | {"mistral", "gemma2"}))
@pytest.mark.parametrize("rotated", [True, False])
@torch.no_grad()
def test_plain_layers_go_the_other_way_and_give_the_same_logits(architecture: str, rotated: bool) -> None:
    model = model_of(architecture)
    expected = model(TOKENS).logits
    rotations = fuse_rotations(model) if rotated else []
    attend = Recorded()
    changed = fuse_long_attention(model, attend)
    assert len(changed) == model.config.num_hidden_layers
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    layers = getattr(model.config, "layer_types", None) or ["full_attention"] * len(changed)
    plain = layers.count("full_attention") if architecture in PLAIN else 0
    assert attend.shapes == [torch.Size((1, 4, TOKENS.shape[1], 16))] * plain
    give_back_forwards([*rotations, *changed])
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(TOKENS).logits, expected)


@torch.no_grad()
def test_grouped_heads_padding_caches_and_eager_attention_go_on_as_before() -> None:
    attend = Recorded()

    def logits(model: transformers.PreTrainedModel) -> list[Tensor]:
        mask = torch.ones_like(TOKENS)
        mask[:, :3] = 0
        cache = model(TOKENS[:, :9], use_cache=True, attention_mask=mask[:, :9]).past_key_values
        return [
            model(TOKENS, attention_mask=mask).logits,
            model(TOKENS[:, 9:], past_key_values=cache, attention_mask=mask).logits,
        ]

    for model in (model_of("llama", key_heads=2), model_of("llama"), model_of("llama", attn_implementation="eager")):
        expected = logits(model)
        grouped, eager = model.config.num_key_value_heads == 2, model.config._attn_implementation == "eager"
        plain = model(TOKENS).logits
        fuse_long_attention(model, attend)
        assert all(torch.equal(f, e) for f, e in zip(logits(model), expected, strict=True))
        assert not attend.shapes
        found = model(TOKENS).logits
        assert bool(attend.shapes) == (not grouped and not eager)
        if not attend.shapes:
            assert torch.equal(found, plain)
        attend.shapes.clear()


@pytest.mark.parametrize(
    "change",
    [
        *({}, {"dropout": 0.1}, {"is_causal": False}, {"sliding_window": 3}, {"softcap": 30.0}),
        *({"attention_mask": torch.zeros(1, 1, 5, 5)}, {"position_bias": torch.zeros(1, 2, 5, 5)}),
        *({"s_aux": torch.zeros(2)}, {"output_attentions": True}, {"of_encoder": True}),
    ],
    ids=lambda change: next(iter(change), "plain"),
)
def test_whatever_is_more_than_plain_attention_is_transformers_own(change: dict[str, Any]) -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 16)
    module: Any = SimpleNamespace(is_causal=not change.get("of_encoder", False))
    asked: list[tuple[Any, dict[str, Any]]] = []

    def own(*args: Any, **keywords: Any) -> tuple[Tensor, None]:
        asked.append((args, keywords))
        return torch.zeros(1, 5, 2, 16), None

    attend = Recorded()
    arguments = {"attention_mask": None, "scaling": 0.3, "position_ids": torch.arange(5), "use_cache": False}
    arguments |= {name: value for name, value in change.items() if name != "of_encoder"}
    mask = arguments.pop("attention_mask")
    output, weights = AttentionOfLongTexts(attend, own)(module, q, k, v, mask, **arguments)
    assert weights is None
    assert (bool(attend.shapes), bool(asked)) == (not change, bool(change))
    if change:
        (args, keywords) = asked[0]
        assert args[4] is mask
        assert all(keywords[name] is value for name, value in arguments.items())
    else:
        expected = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        torch.testing.assert_close(output, expected.transpose(1, 2))
        assert output.is_contiguous()


def test_a_missing_scale_is_that_of_the_head() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 16)
    module: Any = SimpleNamespace(is_causal=True)
    found, _ = AttentionOfLongTexts(Recorded())(module, q, k, v, None)
    torch.testing.assert_close(found, sdpa_attention_forward(module, q, k, v, None)[0])


def test_other_models_keep_transformers_table() -> None:
    model, other = model_of("llama"), model_of("llama")
    attend = Recorded()
    fuse_long_attention(model, attend)
    other(TOKENS)
    assert not attend.shapes
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_forwards_of_their_own_stay_as_they_are() -> None:
    model = model_of("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    first.forward = first.forward  # as accelerate's hooks do
    assert (fuse_long_attention(model), fuse_long_attention(nn.Linear(2, 2))) == ([second], [])


@pytest.mark.skipif(not TUNED_GPU, reason="tiles are tuned for compute capability 9.0")
@torch.no_grad()
def test_a_long_text_on_a_gpu_has_the_logits_of_the_models_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "LONG_TOKENS", 4096)
    model = model_of("llama").cuda()
    torch.manual_seed(0)
    tokens = torch.randint(64, (1, 4096 + 100), device="cuda")
    exact = model(tokens).logits.double()
    model = model.to(torch.bfloat16)
    own = model(tokens).logits.double()
    used: list[bool] = []

    def attend(*heads: Tensor, **options: Any) -> Tensor | None:
        output = long_causal_attention(*heads, **options)
        used.append(output is not None)
        return output

    assert fuse_long_attention(model, attend)
    found = model(tokens).logits.double()
    assert used == [True] * model.config.num_hidden_layers
    assert (found - exact).square().mean().sqrt() <= 1.2 * (own - exact).square().mean().sqrt()
    assert make_faster(model)
    found = model(tokens).logits.double()
    assert (found - exact).square().mean().sqrt() <= 1.2 * (own - exact).square().mean().sqrt()


@settings(max_examples=20, deadline=None)
@given(
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_padding_changes_no_product(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(inputs)
    plain = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    x = torch.randn(2, 3, inputs, dtype=dtype)
    padded = AlignedLinear(plain)
    near = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(padded(x), plain(x), rtol=near, atol=near * inputs**0.5)
    assert torch.equal(padded(nn.functional.pad(x, (0, padded.padded_in_features - inputs))), padded(x))
    assert padded(x).stride(-2) * dtype.itemsize % 16 == 0


@pytest.mark.parametrize(
    "change", ["data", "parameter", "dtype", "state", "assigned state", "in place", "copy", "no bias"]
)
@torch.no_grad()
def test_other_weights_put_in_place_of_the_padded_ones_are_those_it_computes_with(change: str) -> None:
    torch.manual_seed(0)
    plain, other = nn.Linear(51, 50), nn.Linear(51, 50)
    padded = AlignedLinear(plain)
    if change == "data":
        padded.weight.data, padded.bias.data = other.weight.data, other.bias.data
    elif change == "parameter":
        padded.weight, padded.bias = other.weight, other.bias
    elif change == "dtype":
        padded, other = padded.to(torch.float64), plain.to(torch.float64)
    elif change == "in place":
        padded.weight.copy_(other.weight)
        padded.bias.copy_(other.bias)
    elif change == "copy":
        padded = copy.deepcopy(padded)
        padded.weight.mul_(2.0)
        other = plain
        other.weight.mul_(2.0)
    elif change == "no bias":
        padded.bias, other.weight, other.bias = None, plain.weight, None
    else:
        padded.load_state_dict(other.state_dict(), assign=change == "assigned state")
    x = torch.randn(3, 51, dtype=padded.weight.dtype)
    width = padded.padded_in_features
    torch.testing.assert_close(padded(x), other(x))
    torch.testing.assert_close(padded(nn.functional.pad(x, (0, width - 51))), other(x))
    assert width * x.element_size() % 128 == 0
    assert torch.equal(padded.weight, other.weight)
    assert torch.equal(padded.plain()(x), other(x))


@torch.no_grad()
def test_an_adapter_merged_into_a_faster_model_is_in_what_it_computes() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(odd("llama"), config).eval()
    expected = model(TOKENS).logits
    assert make_faster(model)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    replaced = [name for name, module in model.named_modules() if isinstance(module, AlignedLinear)]
    assert any(name.endswith("up_proj.base_layer") for name in replaced)
    for safe in (True, False):
        model.base_model.merge_adapter(safe_merge=safe)
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
        model.base_model.unmerge_adapter()
    with model.disable_adapter():
        assert not torch.allclose(model(TOKENS).logits, expected, rtol=1e-3, atol=1e-3)


def test_maps_that_are_aligned_tied_or_hooked_stay_as_they_are() -> None:
    model = nn.ModuleDict({name: nn.Linear(51, 51) for name in ("tied", "hooked", "free")})
    model["twin"] = nn.Embedding(51, 51)
    model["twin"].weight = model["tied"].weight
    model["aligned"] = nn.Linear(64, 32)
    model["hooked"].register_forward_hook(lambda *_: None)
    assert align_linears(model) == 1
    assert {name for name, module in model.items() if isinstance(module, AlignedLinear)} == {"free"}
