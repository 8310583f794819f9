"""The reference against the definition written out, and what the definition implies."""

import dataclasses
from typing import Any

import pytest
import torch
from attention_problems import DEVICE, Problem, problem
from torch import Tensor
from torch.autograd import forward_ad
from written_out import stick_breaking

from sbeval.attention import stickbreaking_attention


@pytest.mark.parametrize("attend_current", [False, True], ids=["strict", "current"])
def test_reference_is_the_definition_written_as_loops(attend_current: bool) -> None:
    p = problem(heads=2, groups=1, queries=4, keys=6, head_dim=3)
    found = stickbreaking_attention(p.q, p.k, p.v, scale=0.7, attend_current=attend_current, impl="reference")
    q_LHD = torch.cat([torch.zeros_like(p.q[0, :, :2]), p.q[0]], dim=1).transpose(0, 1)  # two older rows
    k_LHD, v_LHD = (x[0].expand(2, -1, -1).transpose(0, 1) for x in (p.k, p.v))
    heads_LHD, stick_LH1 = stick_breaking(q_LHD, k_LHD, v_LHD, 0.7, attend_current=attend_current)
    torch.testing.assert_close(found.output[0], heads_LHD[2:].transpose(0, 1))
    torch.testing.assert_close(found.remainder[0], stick_LH1[2:, :, 0].T)


CALLS: dict[str, dict[str, Any]] = {
    "strict": {},
    "current": {"attend_current": True},
    "padded": {"seq_start": torch.tensor([2], device=DEVICE)},
    "packed": {"cu_seqlens": torch.tensor([0, 3, 7], dtype=torch.int32, device=DEVICE)},
}


@pytest.mark.parametrize("impl", ["reference", "blockwise"])
@pytest.mark.parametrize("call", CALLS)
def test_gradients_pass_gradcheck(impl: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbeval.attention.impl.tiles.TILE_ROWS", 4)
    monkeypatch.setattr("sbeval.attention.impl.tiles.TILE_LOGITS", 12)
    p = problem(heads=2, groups=1, queries=7 if call == "packed" else 5, keys=7, head_dim=3)
    inputs = [tensor.clone().requires_grad_() for tensor in (p.q, p.k, p.v)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return stickbreaking_attention(q, k, v, impl=impl, **CALLS[call])

    assert torch.autograd.gradcheck(attend, inputs)


def test_the_definition_has_forward_mode_derivatives() -> None:
    p = problem(queries=9)
    tangents = (p.d_output, torch.ones_like(p.k), p.v.flip(0))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stickbreaking_attention(q, k, v, impl="reference").output

    _, found = torch.func.jvp(attend, (p.q, p.k, p.v), tangents)
    step = 1e-6
    ahead, behind = (
        attend(*(x + side * dx for x, dx in zip((p.q, p.k, p.v), tangents, strict=True))) for side in (step, -step)
    )
    torch.testing.assert_close(found, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_forward_mode_derivative_that_does_not_exist_is_refused_and_not_zero(impl: str, which: str) -> None:
    p = problem(queries=9, dtype=torch.float32)
    inputs = {name: getattr(p, name) for name in "qkv"}

    def attend(changed: Tensor) -> Tensor:
        return stickbreaking_attention(**{**inputs, which: changed}, impl=impl).output

    with pytest.raises(ValueError, match="no forward-mode tangents"):
        torch.func.jvp(attend, (inputs[which],), (torch.ones_like(inputs[which]),))
    with forward_ad.dual_level():
        assert torch.equal(attend(inputs[which]), attend(inputs[which]))
        with pytest.raises(ValueError, match="no forward-mode tangents"):
            attend(forward_ad.make_dual(inputs[which], torch.ones_like(inputs[which])))


# a single query without a gradient takes the decode kernels, whatever its dtype
WAYS = [
    pytest.param("reference", torch.float32, False, id="reference"),
    pytest.param("blockwise", torch.float32, False, id="blockwise"),
    pytest.param("triton", torch.float32, False, id="decode"),
    pytest.param("triton", torch.float32, True, id="triton-fp32"),
    pytest.param("triton", torch.float16, True, id="triton-fp16"),
]


def weights_of(p: Problem, impl: str, differentiable: bool) -> Tensor:
    """The weights themselves [keys], for one query: each value is a unit vector of its own."""
    keys = p.k.shape[2]
    one_hot = torch.eye(keys, dtype=p.q.dtype, device=DEVICE)[None, None]
    assert p.q.shape[3] == keys
    q = p.q.clone().requires_grad_(differentiable)
    return stickbreaking_attention(q, p.k, one_hot, attend_current=True, impl=impl).output[0, 0, 0].detach()


@pytest.mark.parametrize(("impl", "dtype", "differentiable"), WAYS)
@pytest.mark.parametrize("logit", [-9.0, -0.3, 0.0, 2.0, 40.0])
def test_equal_logits_give_the_newer_key_at_least_the_older_ones_weight(
    impl: str, dtype: torch.dtype, differentiable: bool, logit: float
) -> None:
    p = problem(heads=1, queries=1, keys=70, head_dim=70, dtype=dtype)
    p.q.fill_(logit / 70**0.5)
    weights = weights_of(dataclasses.replace(p, k=torch.ones_like(p.k)), impl, differentiable)
    # fewer factors make the newer weight, rounded another way
    slack = weights[1:] * torch.finfo(dtype).eps if differentiable else 0
    assert (weights.diff() >= -slack).all()
    assert weights[-1] > 0
