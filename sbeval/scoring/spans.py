"""Where attention looks: what every layer and head does with its weight on real text.

For a query, weights are added up from the newest key backwards; its span at 90 % is how many keys that takes to reach
90 % of all its weight. Beside it stand the weight on the very first token, the entropy of the weights (in nats, divided
by their sum first), and the stick that nothing took. The definitions are the same for softmax, whose weights add up to
one, and for stick-breaking. Weights are computed for the last queries of a window, block by block.

Shape suffixes: H query heads, G key/value heads, R queries of a block, K keys, D head dimension.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sbeval.attention.impl.reference import log_weights
from sbeval.errors import UserError
from sbeval.models.attention import SoftmaxMixer, StickBreakingMixer
from sbeval.scoring.non_finite import NonFiniteError
from sbeval.scoring.requests import NonFinite

SHARES = (0.5, 0.9, 0.99)
_BLOCK_WEIGHTS = 2**24


def spans(weights_HRK: Tensor, newest_R: Tensor) -> Tensor:
    """Returns keys from the newest backwards until each of `SHARES` of a query's weight is reached.

    float64 [H, R, shares], NaN for a query without weight. Weights are 0 where a key is not seen; `newest_R` are the
    newest keys that queries see.
    """
    cumulative_HRK = weights_HRK.double().flip(-1).cumsum(-1)
    total_HR1 = cumulative_HRK[..., -1:]
    unseen_R = weights_HRK.shape[-1] - 1 - newest_R
    found = []
    for share in SHARES:
        first_HR1 = torch.searchsorted(cumulative_HRK, share * total_HR1 * (1 - 1e-12))
        found.append((first_HR1[..., 0] + 1 - unseen_R).double())
    return torch.where(total_HR1 > 0, torch.stack(found, dim=-1), torch.nan)


def entropy(weights_HRK: Tensor) -> Tensor:
    """Returns the entropy of each query's weights over their sum, in nats; float64 [H, R], NaN without weight."""
    total_HR = weights_HRK.sum(-1, dtype=torch.float64)
    entropy_HR: Tensor = torch.special.entr(weights_HRK).sum(-1, dtype=torch.float64) / total_HR + total_HR.log()
    return entropy_HR


@torch.no_grad()
def attention_spans(
    model: nn.Module, input_ids: Tensor, queries: int, *, non_finite: NonFinite = "error"
) -> list[list[float | int | None]]:
    """Runs a text [1, L] through a model and returns the rows described at `AttentionSpanRequest`.

    The model is this project's, or a Hugging Face model with PyTorch's attention ("sdpa"). Attention or last logits
    that are not finite are an error, or NaN in every row.

    Raises:
        NonFiniteError: attention or the last logits are not finite.
        UserError: the model's attention cannot be looked into.
    """
    layers: list[Layer] = []
    with _recorded(model, queries, layers):
        logits_V = model(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    if not layers:
        raise UserError(
            f"Expected attention that can be looked into, found {type(model).__name__} with another one; load it with "
            "attn_implementation=sdpa."
        )
    where = _not_finite(layers, logits_V)
    if where is not None and non_finite == "error":
        raise NonFiniteError(f"Expected finite {where} of an input of {input_ids.shape[1]} tokens, found none")
    rows: list[list[float | int | None]] = []
    for number, layer in enumerate(layers):
        for head, own in enumerate(layer.means_HM.tolist()):
            known = [None if value != value else value for value in own]
            rows.append([number, head, *([math.nan] * len(own) if where is not None else known)])
    return rows


class Layer(NamedTuple):
    """Means of one layer over the queries, float64 [H, measures], and bool [K], positions with non-finite values.

    Means are on the CPU, in the order of a response's row; positions on the device.
    """

    means_HM: Tensor
    not_finite_K: Tensor


def _not_finite(layers: list[Layer], logits_V: Tensor) -> str | None:
    """Says what was not finite first, None where all was."""
    for number, layer in enumerate(layers):
        if positions := layer.not_finite_K.nonzero().flatten().tolist():
            return f"attention of layer {number} at position {positions[0]}"
    return None if bool(logits_V.amax().isfinite()) else "logits at the last position"


@contextmanager
def _recorded(model: nn.Module, queries: int, layers: list[Layer]) -> Iterator[None]:
    """Records every attention layer's spans and remaining sticks, in the order they are computed."""
    mixers = [module for module in model.modules() if isinstance(module, StickBreakingMixer | SoftmaxMixer)]
    if not mixers:
        with _recorded_interface(model, queries, layers):
            yield
        return

    def look(mixer: nn.Module, args: tuple[Any, ...]) -> None:
        weights = functools.partial(_softmax if isinstance(mixer, SoftmaxMixer) else _stick_breaking, mixer)
        layers.append(_summary(args[0], args[1], queries, weights))

    handles = [mixer.register_forward_pre_hook(look) for mixer in mixers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


Weights = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, int]]
"""From queries [1, H, R, D], keys [1, G, K, D] up to the last query, and the first query's position, to weights
[H, R, K], remaining sticks [H, R], and how many keys back from itself a query's newest key is."""


def _stick_breaking(mixer: Any, q_1HRD: Tensor, k_1GKD: Tensor, first: int) -> tuple[Tensor, Tensor, int]:
    logs, log_rest = log_weights(q_1HRD, k_1GKD, mixer.scale, mixer.attend_current, None, None)
    return logs[0].exp(), log_rest[0].exp(), 0 if mixer.attend_current else 1


def _distances(q_1HRD: Tensor, k_1GKD: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Returns the queries' positions [R], and how far back from each every key is, [R, K]."""
    position_R = torch.arange(first, first + q_1HRD.shape[2], device=q_1HRD.device)
    return position_R, position_R[:, None] - torch.arange(k_1GKD.shape[2], device=q_1HRD.device)


def _softmax(mixer: Any, q_1HRD: Tensor, k_1GKD: Tensor, first: int) -> tuple[Tensor, Tensor, int]:
    position_R, distance_RK = _distances(q_1HRD, k_1GKD, first)
    seen_RK = distance_RK >= 0
    if mixer.sliding_window is not None:
        seen_RK &= distance_RK < mixer.sliding_window
    added = 0.0 if mixer.bias is None else mixer.bias(position_R[None], distance_RK)[0]
    return _softmax_weights(q_1HRD, k_1GKD, mixer.scale, seen_RK, added)


def _softmax_weights(
    q_1HRD: Tensor, k_1GKD: Tensor, scale: float, seen_RK: Tensor, added: Tensor | float
) -> tuple[Tensor, Tensor, int]:
    k_HKD = k_1GKD[0].repeat_interleave(q_1HRD.shape[1] // k_1GKD.shape[1], dim=0)
    logits_HRK = (scale * (q_1HRD[0] @ k_HKD.mT) + added).masked_fill(~seen_RK, -torch.inf)
    weights_HRK = logits_HRK.softmax(-1)
    return weights_HRK, 0.0 * weights_HRK[..., 0], 0  # NaN where the weights are


def _summary(q_1HQD: Tensor, k_1GKD: Tensor, queries: int, weights: Weights) -> Layer:
    """Returns what the last queries do, block by block."""
    length, heads = q_1HQD.shape[2], q_1HQD.shape[1]
    rows = max(1, _BLOCK_WEIGHTS // (heads * length))
    found = []
    for start in range(max(1, length - queries), length, rows):
        stop = min(length, start + rows)
        own_HRK, rest_HR, back = weights(q_1HQD[:, :, start:stop].float(), k_1GKD[:, :, :stop].float(), start)
        newest_R = torch.arange(start, stop, device=own_HRK.device) - back
        others = [rest_HR.double(), own_HRK[..., 0].double(), entropy(own_HRK)]
        found.append(torch.cat([spans(own_HRK, newest_R), torch.stack(others, dim=-1)], dim=-1))
    measures_HRM = torch.cat(found, dim=1)
    finite_K = torch.cat([q_1HQD[0], k_1GKD[0]]).isfinite().all(-1).all(0)
    finite_K[-measures_HRM.shape[1] :] &= measures_HRM[..., len(SHARES)].isfinite().all(0)  # remaining sticks
    return Layer(measures_HRM.nanmean(dim=1).cpu(), ~finite_K)


def _implementations(model: nn.Module) -> list[str]:
    """Returns the names by which a model calls PyTorch's attention, also through a function registered around it."""
    configs = (getattr(module, "config", None) for module in model.modules())
    names = {str(getattr(config, "_attn_implementation", None)) for config in configs}
    return sorted(name for name in names if name == "sdpa" or name.endswith("_sdpa"))


@contextmanager
def _recorded_interface(model: nn.Module, queries: int, layers: list[Layer]) -> Iterator[None]:
    """Looks into models that call PyTorch's attention through transformers' registry."""
    originals = {name: ALL_ATTENTION_FUNCTIONS[name] for name in _implementations(model)}
    inside: list[nn.Module] = []

    def look(
        original: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        **options: Any,
    ) -> Any:
        if module in inside:  # a function that calls the one it was registered around
            return original(module, query, key, value, mask, **options)
        scale = options.get("scaling") or query.shape[-1] ** -0.5

        def weights(q_1HRD: Tensor, k_1GKD: Tensor, first: int) -> tuple[Tensor, Tensor, int]:
            position_R, distance_RK = _distances(q_1HRD, k_1GKD, first)
            if mask is None:
                seen_RK = distance_RK >= 0
            elif isinstance(mask, Tensor):
                own_RK = mask[0, 0, first : first + q_1HRD.shape[2], : k_1GKD.shape[2]]
                seen_RK = own_RK if own_RK.dtype == torch.bool else own_RK == 0
            else:  # a description of the keys that are seen, from the first one of a window or a chunk on
                back_R = position_R - mask.first(position_R)
                seen_RK = (distance_RK >= 0) & (distance_RK <= back_R[:, None])
            return _softmax_weights(q_1HRD, k_1GKD, scale, seen_RK, 0.0)

        layers.append(_summary(query, key, queries, weights))
        inside.append(module)
        try:
            return original(module, query, key, value, mask, **options)
        finally:
            inside.remove(module)

    for name, original in originals.items():
        ALL_ATTENTION_FUNCTIONS[name] = functools.partial(look, original)
    try:
        yield
    finally:
        for name, original in originals.items():
            ALL_ATTENTION_FUNCTIONS[name] = original
