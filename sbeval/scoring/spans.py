"""How far back each layer and head of a model attends on real text: spans, entropy and weight on the first token.

A query's span at 90 % is the number of keys, counted from the newest, that together hold 90 % of its weight. Also
measured are the weight on the first token, the entropy of the weights (in nats, after dividing by their sum), and the
remaining stick, the weight that no key received. The definitions are the same for softmax and entmax, whose weights add
up to one, and for stick-breaking. Weights are computed for the last queries of a window, block by block.

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
from sbeval.models.entmax.weights import entmax15
from sbeval.scoring.non_finite import NonFiniteError
from sbeval.scoring.requests import NonFinite

SHARES = (0.5, 0.9, 0.99)
_BLOCK_WEIGHTS = 2**24


def spans(weights_HRK: Tensor, newest_R: Tensor) -> Tensor:
    """Returns the number of newest keys that hold each of `SHARES` of a query's weight, float64 [H, R, shares].

    NaN for a query without weight. Weights must be 0 for masked keys; `newest_R` is the index of the newest key that
    each query sees.
    """
    cumulative_HRK = weights_HRK.double().flip(-1).cumsum(-1)
    total_HR1 = cumulative_HRK[..., -1:]
    unseen_R = weights_HRK.shape[-1] - 1 - newest_R
    spans_of_shares = []
    for share in SHARES:
        first_HR1 = torch.searchsorted(cumulative_HRK, share * total_HR1 * (1 - 1e-12))
        spans_of_shares.append((first_HR1[..., 0] + 1 - unseen_R).double())
    return torch.where(total_HR1 > 0, torch.stack(spans_of_shares, dim=-1), torch.nan)


def entropy(weights_HRK: Tensor) -> Tensor:
    """Returns the entropy of each query's normalised weights in nats: float64 [H, R], NaN if a query has no weight."""
    total_HR = weights_HRK.sum(-1, dtype=torch.float64)
    entropy_HR: Tensor = torch.special.entr(weights_HRK).sum(-1, dtype=torch.float64) / total_HR + total_HR.log()
    return entropy_HR


@torch.no_grad()
def attention_spans(
    model: nn.Module, input_ids: Tensor, queries: int, *, non_finite: NonFinite = "error"
) -> list[list[float | int | None]]:
    """Runs a text [1, L] through a model and returns the rows that `AttentionSpanRequest` describes.

    The model is this project's, or a Hugging Face model with `attn_implementation="sdpa"`. With `non_finite="null"`,
    all measures are NaN if the attention or the last logits are not finite.

    Raises:
        NonFiniteError: the attention or the last logits are not finite, and `non_finite` is "error".
        UserError: the model's attention weights cannot be computed.
    """
    layers: list[Layer] = []
    with _recorded(model, queries, layers):
        logits_V = model(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    if not layers:
        raise UserError(
            f"Attention spans need a model with PyTorch's attention, which {type(model).__name__} was not loaded with: "
            "load it with attn_implementation=sdpa."
        )
    where = _not_finite(layers, logits_V)
    if where is not None and non_finite == "error":
        raise NonFiniteError(f"Found NaN or infinity in the {where} of an input of {input_ids.shape[1]} tokens")
    rows: list[list[float | int | None]] = []
    for number, layer in enumerate(layers):
        for head, means in enumerate(layer.means_HM.tolist()):
            known_means = [None if value != value else value for value in means]
            rows.append([number, head, *([math.nan] * len(means) if where is not None else known_means)])
    return rows


class Layer(NamedTuple):
    """The measures of one layer.

    Attributes:
        means_HM: float64 [H, measures] on the CPU, means over the queries, in the order of the columns that
            `AttentionSpanRequest` describes.
        not_finite_K: bool [K] on the model's device, whether a position has NaN or infinite values.
    """

    means_HM: Tensor
    not_finite_K: Tensor


def _not_finite(layers: list[Layer], logits_V: Tensor) -> str | None:
    """Returns a description of the first non-finite values, None if all are finite."""
    for number, layer in enumerate(layers):
        if positions := layer.not_finite_K.nonzero().flatten().tolist():
            return f"attention of layer {number} at position {positions[0]}"
    return None if bool(logits_V.amax().isfinite()) else "logits at the last position"


@contextmanager
def _recorded(model: nn.Module, queries: int, layers: list[Layer]) -> Iterator[None]:
    """Inside this context, every attention layer that runs appends its measures to `layers`."""
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
"""A function that computes attention weights.

Its arguments are queries [1, H, R, D], keys [1, G, K, D] up to the last query, and the first query's position. It
returns weights [H, R, K], remaining sticks [H, R], and the distance from a query to the newest key that it sees (0 or
1).
"""


def _stick_breaking(mixer: Any, q_1HRD: Tensor, k_1GKD: Tensor, first: int) -> tuple[Tensor, Tensor, int]:
    logs, log_rest = log_weights(q_1HRD, k_1GKD, mixer.scale, mixer.attend_current, None, None)
    return logs[0].exp(), log_rest[0].exp(), 0 if mixer.attend_current else 1


def _distances(q_1HRD: Tensor, k_1GKD: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Returns the queries' positions [R], and the distance of every key from each query, [R, K] (negative if later)."""
    position_R = torch.arange(first, first + q_1HRD.shape[2], device=q_1HRD.device)
    return position_R, position_R[:, None] - torch.arange(k_1GKD.shape[2], device=q_1HRD.device)


def _softmax(mixer: Any, q_1HRD: Tensor, k_1GKD: Tensor, first: int) -> tuple[Tensor, Tensor, int]:
    position_R, distance_RK = _distances(q_1HRD, k_1GKD, first)
    visible_RK = distance_RK >= 0
    if mixer.sliding_window is not None:
        visible_RK &= distance_RK < mixer.sliding_window
    added = 0.0 if mixer.bias is None else mixer.bias(position_R[None], distance_RK)[0]
    return _softmax_weights(q_1HRD, k_1GKD, mixer.scale, visible_RK, added, entmax=mixer.entmax)


def _softmax_weights(
    q_1HRD: Tensor, k_1GKD: Tensor, scale: float, visible_RK: Tensor, added: Tensor | float, *, entmax: bool = False
) -> tuple[Tensor, Tensor, int]:
    k_HKD = k_1GKD[0].repeat_interleave(q_1HRD.shape[1] // k_1GKD.shape[1], dim=0)
    logits_HRK = (scale * (q_1HRD[0] @ k_HKD.mT) + added).masked_fill(~visible_RK, -torch.inf)
    weights_HRK = entmax15(logits_HRK) if entmax else logits_HRK.softmax(-1)
    return weights_HRK, 0.0 * weights_HRK[..., 0], 0  # the product with 0 keeps NaN


def _summary(q_1HQD: Tensor, k_1GKD: Tensor, queries: int, weights: Weights) -> Layer:
    """Computes the measures of one layer for the last queries, block by block."""
    length, heads = q_1HQD.shape[2], q_1HQD.shape[1]
    rows = max(1, _BLOCK_WEIGHTS // (heads * length))
    blocks = []
    for start in range(max(1, length - queries), length, rows):
        stop = min(length, start + rows)
        weights_HRK, rest_HR, back = weights(q_1HQD[:, :, start:stop].float(), k_1GKD[:, :, :stop].float(), start)
        newest_R = torch.arange(start, stop, device=weights_HRK.device) - back
        after_spans = [rest_HR.double(), weights_HRK[..., 0].double(), entropy(weights_HRK)]
        blocks.append(torch.cat([spans(weights_HRK, newest_R), torch.stack(after_spans, dim=-1)], dim=-1))
    measures_HRM = torch.cat(blocks, dim=1)
    finite_K = torch.cat([q_1HQD[0], k_1GKD[0]]).isfinite().all(-1).all(0)
    finite_K[-measures_HRM.shape[1] :] &= measures_HRM[..., len(SHARES)].isfinite().all(0)  # remaining sticks
    return Layer(measures_HRM.nanmean(dim=1).cpu(), ~finite_K)


def _implementations(model: nn.Module) -> list[str]:
    """Returns the registry names of a model's PyTorch attention: "sdpa", and functions that wrap it ("..._sdpa")."""
    configs = (getattr(module, "config", None) for module in model.modules())
    names = {str(getattr(config, "_attn_implementation", None)) for config in configs}
    return sorted(name for name in names if name == "sdpa" or name.endswith("_sdpa"))


@contextmanager
def _recorded_interface(model: nn.Module, queries: int, layers: list[Layer]) -> Iterator[None]:
    """Measures attention in models that call PyTorch's attention, by monkey-patching transformers' registry."""
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
        if module in inside:  # the function around "sdpa" calls it: measure each layer once
            return original(module, query, key, value, mask, **options)
        scale = options.get("scaling") or query.shape[-1] ** -0.5

        def weights(q_1HRD: Tensor, k_1GKD: Tensor, first: int) -> tuple[Tensor, Tensor, int]:
            position_R, distance_RK = _distances(q_1HRD, k_1GKD, first)
            if mask is None:
                visible_RK = distance_RK >= 0
            elif isinstance(mask, Tensor):
                mask_RK = mask[0, 0, first : first + q_1HRD.shape[2], : k_1GKD.shape[2]]
                visible_RK = mask_RK if mask_RK.dtype == torch.bool else mask_RK == 0
            else:  # an object that describes a window or chunk mask by each query's first visible key
                back_R = position_R - mask.first(position_R)
                visible_RK = (distance_RK >= 0) & (distance_RK <= back_R[:, None])
            return _softmax_weights(q_1HRD, k_1GKD, scale, visible_RK, 0.0)

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
