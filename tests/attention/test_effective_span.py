"""Effective spans against the weights themselves."""

import pytest
import torch
from attention_problems import DEVICE, problem
from torch import Tensor

from sbeval.attention import effective_span
from sbeval.attention.impl.reference import log_weights

LEVELS = (0.25, 0.5, 0.9, 0.99)
SHAPES = [
    pytest.param({"queries": 1}, id="1"),
    pytest.param({"queries": 65, "batch": 2, "heads": 4, "groups": 2}, id="65-grouped"),
    pytest.param({"queries": 5, "keys": 200}, id="5of200"),
    pytest.param({"queries": 129, "keys": 140, "logit_scale": 3.0}, id="129of140-large-logits"),
    pytest.param({"queries": 70, "logit_scale": 1e-3, "shift": -30.0}, id="70-hardly-any-weight"),
]


def by_hand(weights_K: Tensor, newest: int, level: float) -> float:
    """Adds weights from the newest key a query sees until the share of their sum is reached."""
    total, reached = float(weights_K.sum()), 0.0
    for keys, key in enumerate(range(newest, -1, -1), 1):
        reached += float(weights_K[key])
        if reached >= level * total * (1 - 1e-12):
            return keys
    return float("nan")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attend_current", [False, True], ids=["strict", "current"])
def test_spans_are_those_of_the_weights(shape: dict, attend_current: bool, small_tiles: None) -> None:
    p = problem(**{name: value for name, value in shape.items() if name != "shift"})
    p.q[..., 0], p.k[..., 0] = 1.0, shape.get("shift", 0.0)
    log_A, log_rest = log_weights(p.q, p.k, 1.0, attend_current, None)
    found = effective_span(p.q, p.k, scale=1.0, attend_current=attend_current, levels=LEVELS)
    torch.testing.assert_close(found.remainder, log_rest.exp())
    batch, heads, queries, keys = log_A.shape
    for where in torch.cartesian_prod(*(torch.arange(size) for size in (batch, heads, queries))).tolist():
        newest = keys - queries + where[2] - (0 if attend_current else 1)
        weights = log_A[tuple(where)].exp().cpu()
        expected = [by_hand(weights, newest, level) if weights.sum() > 0 else float("nan") for level in LEVELS]
        spans = found.spans[tuple(where)].cpu()
        torch.testing.assert_close(spans, torch.tensor(expected, dtype=torch.float32), equal_nan=True, rtol=0, atol=0)


def test_padding_and_packing_leave_spans_as_they_are_alone() -> None:
    p = problem(heads=4, groups=2, queries=90, logit_scale=0.5)
    alone = [effective_span(p.q[:, :, own], p.k[:, :, own]) for own in (slice(0, 37), slice(37, 90))]
    bounds = torch.tensor([0, 37, 90], dtype=torch.int32, device=DEVICE)
    packed = effective_span(p.q, p.k, cu_seqlens=bounds)
    padded = effective_span(p.q, p.k, seq_start=bounds[1:2])
    for found, expected in zip(packed, map(torch.cat, zip(*alone, strict=True), [2, 2]), strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)
    assert padded.spans[:, :, :37].isnan().all()
    torch.testing.assert_close(padded.spans[:, :, 37:], alone[1].spans, equal_nan=True)


@pytest.mark.parametrize("levels", [(), (0.0,), (0.5, 1.0)])
def test_shares_outside_zero_to_one_are_refused(levels: tuple[float, ...]) -> None:
    p = problem(queries=3)
    with pytest.raises(ValueError, match="shares between 0 and 1"):
        effective_span(p.q, p.k, levels=levels)
