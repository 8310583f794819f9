"""Maps of one row, and heads placed in slots: what PyTorch's own parts compute."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, rms_norm, silu

from sbeval.models.kernels.one_row import MapParameters, Slot, map_row
from sbeval.models.rope import rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = MapParameters(block_outputs=16, block_inputs=32, num_warps=4, num_stages=2)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_a_norm_before_three_maps_and_biases_behind() -> None:
    x, norm = normal(1, 80, seed=0), normal(80, seed=1)
    weights = [normal(count, 80, seed=2 + count) for count in (48, 16, 16)]
    biases = [normal(len(weight), seed=len(weight)) for weight in weights]
    out = torch.full((1, 80), torch.nan, device=DEVICE)
    found = map_row(x, weights, biases, out=out, norm_E=norm, eps=1e-5, parameters=SMALL)
    normed = rms_norm(x, (80,), norm, 1e-5)
    expected = torch.cat([linear(normed, weight, bias) for weight, bias in zip(weights, biases, strict=True)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("activation", "apply"), [("silu", silu), ("gelu", gelu)])
def test_a_gated_map_writes_zeros_up_to_the_width_of_its_output(activation: str, apply: object) -> None:
    x, gate, up = normal(1, 40, seed=0), normal(50, 40, seed=1), normal(50, 40, seed=2)
    out = torch.full((1, 64), torch.nan, device=DEVICE)
    found = map_row(x, [gate, up], out=out, activation=activation, parameters=SMALL)
    torch.testing.assert_close(found[:, :50], apply(linear(x, gate)) * linear(x, up), rtol=1e-4, atol=1e-4)  # type: ignore[operator]
    assert not found[:, 50:].any()


def test_a_map_is_scaled_and_added_to_the_residual_stream() -> None:
    x, weight, hidden = normal(1, 70, seed=0), normal(33, 96, seed=1)[:, :70], normal(1, 33, seed=2)
    expected = hidden + 0.5 * linear(x, weight)
    map_row(x, [weight], out=hidden, scale=0.5, add=True, parameters=SMALL)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pairs", [0, 4, 6])
@pytest.mark.parametrize("position", [0, 9, 24])
def test_queries_and_keys_are_turned_and_keys_and_values_placed(pairs: int, position: int) -> None:
    x, norm = normal(1, 40, seed=0), normal(40, seed=1)
    weights = [normal(count * 12, 40, seed=2 + count) for count in (8, 4, 4)]  # heads of 12 numbers
    biases = [normal(len(weight), seed=len(weight)) for weight in weights]
    k, v = (torch.zeros(4, 10, 12, device=DEVICE) for _ in range(2))
    angle = normal(pairs, seed=1).cpu()
    angles = {"cos_F": angle.cos().to(DEVICE), "sin_F": angle.sin().to(DEVICE)} if pairs else {}
    slot = Slot(k_GKD=k, v_GKD=v, position_1=torch.tensor([position], dtype=torch.int32, device=DEVICE), **angles)
    found = map_row(x, weights, biases, out=x.new_empty(1, 16 * 12), norm_E=norm, eps=1e-5, slot=slot, parameters=SMALL)
    normed = rms_norm(x, (40,), norm, 1e-5)
    q_HD, k_GD, v_GD = (linear(normed, weight, bias).view(-1, 12) for weight, bias in zip(weights, biases, strict=True))
    if pairs:
        q_HD, k_GD = (
            rotate(y[None, :, None].cpu(), angle.cos(), angle.sin())[0, :, 0].to(DEVICE) for y in (q_HD, k_GD)
        )
    torch.testing.assert_close(found.view(16, 12), torch.cat([q_HD, k_GD, v_GD]), rtol=1e-4, atol=1e-4)
    for room, new in ((k, k_GD), (v, v_GD)):
        torch.testing.assert_close(room[:, position % 10], new, rtol=1e-4, atol=1e-4)
        assert int(room.any(-1).sum()) == 4
