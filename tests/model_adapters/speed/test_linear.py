"""Padded linear maps compute what plain ones do, also when their weights are exchanged later."""

import copy

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sbeval.model_adapters.speed.faster import make_faster
from sbeval.model_adapters.speed.linear import AlignedLinear, align_linears
from tests.model_adapters.small import odd

TOKENS = torch.arange(40)[None]


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
    zeros = nn.functional.pad(x, (0, padded.padded_in_features - inputs))
    assert torch.equal(padded(zeros), padded(x))
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
