"""Stick-breaking attention under a name that transformers looks up: `attn_implementation="stickbreaking"`.

transformers asks for two functions of a name: `texts` says once a forward pass where texts begin in the batch, `attend`
computes a layer. A model rotates queries and keys before it calls either, so a layer that does is refused.

Shape suffixes: B batch, H query heads, G key/value heads, Q queries, K keys, D head_dim, T tokens of all rows.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sbeval.attention import stickbreaking_attention
from sbeval.errors import UserError

NAME = "stickbreaking"
_ROTATING = ("rotary", "rope", "cos", "position_embeddings", "alibi", "freqs")
"""What stands in the names that an attention layer uses, where it tells positions apart by itself."""
_MORE = ("cache", "head_mask", "output_attentions", "position_bias", "s_aux", "sliding_window", "softcap")
"""Keyword arguments that ask for more than stick-breaking over all older keys."""
_WITHOUT = "take a configuration without (of SmolLM3: no_rope_layers all 0), or another attn_implementation"
_HOLE = "attention_mask has padding inside a sequence"
Texts = tuple[Tensor | None, Tensor | None]
"""Padding positions on the left of each row, or int32 [n + 1], where each of n texts begins in all rows one by one."""


def texts(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Texts | None:
    """Returns where texts begin, as transformers' mask functions are called; None where every row is one text.

    Raises:
        UserError: padding inside a text, a mask that is not causal, or room in the cache that is not filled yet.
    """
    more = [name for name in ("use_vmap", "local_size") if others.get(name)]
    if more or "allow_is_bidirectional_skip" in others:
        raise _refused("a causal mask over all older keys", more[0] if more else "one for both directions")
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise _refused("a cache that grows with the text", "one of a fixed size", "leave cache_implementation out")
    if attention_mask is not None:
        return sequence_starts(attention_mask, keys=kv_length, has_past=q_offset > 0), None
    if allow_is_causal_skip or q_length < 2 or q_offset:
        return None
    # several texts in a row: there a token does not see the one before it
    row_B1 = torch.arange(batch_size, device=device)[:, None]
    place_1Q = torch.arange(q_length, device=device)[None]
    begins_BQ = ~mask_function(row_B1, row_B1 * 0, place_1Q, (place_1Q - 1).clamp_min(0))
    begins_T = (begins_BQ.expand(batch_size, -1) | (place_1Q == 0)).flatten()
    place_T = torch.arange(len(begins_T), device=device, dtype=torch.int32)
    # tokens that begin nothing become empty texts at the end: counting texts would wait for the device
    starts_T = torch.where(begins_T, place_T, len(begins_T)).sort().values
    return None, torch.cat([starts_T, starts_T.new_full((1,), len(begins_T))]).int()


def attend(
    module: nn.Module,
    query_BHQD: Tensor,
    key_BGKD: Tensor,
    value_BGKD: Tensor,
    attention_mask: Texts | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Returns [B, Q, H, D] and no weights, as transformers' attention functions do.

    Raises:
        UserError: the layer has positions, or asks for more than stick-breaking over all older keys.
    """
    if _has_positions(module):
        layer = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', 'unknown')}"
        raise _refused("layers without positions", f"{layer}, which tells them apart by itself", _WITHOUT)
    more = [name for name in _MORE if others.get(name) is not None and others[name] is not False]
    more += ["dropout"] * (dropout > 0) + ["a mask of its own"] * isinstance(attention_mask, Tensor)
    if False in (others.get("is_causal"), getattr(module, "is_causal", None)):
        more.append("later tokens")
    if more:
        raise _refused("attention to all older keys and nothing else", more[0])
    seq_start_B, cu_seqlens = attention_mask or (None, None)
    if (given := others.get("cu_seq_lens_q")) is not None:  # from transformers' collator for packed batches
        if seq_start_B is not None:
            raise _refused("packed or padded texts", "cu_seq_lens_q and attention_mask", "leave attention_mask out")
        cu_seqlens = given.int()
    elif attention_mask is None and others.get("use_cache") and not torch.compiler.is_compiling():
        # where there is a cache, transformers takes packed texts for one
        place_BQ = others.get("position_ids")
        if place_BQ is not None and place_BQ.dim() == 2 and bool((place_BQ[:, 1:] == 0).any()):
            raise _refused("one text a row beside a cache", "position_ids that begin again", "pass use_cache=False")
    heads = (query_BHQD.to(value_BGKD.dtype), key_BGKD.to(value_BGKD.dtype), value_BGKD)
    if cu_seqlens is None:
        output_BHQD = stickbreaking_attention(*heads, scale=scaling, seq_start=seq_start_B).output
        return output_BHQD.transpose(1, 2).contiguous(), None
    rows = [x.transpose(0, 1).flatten(1, 2)[None] for x in heads]
    output_1HTD = stickbreaking_attention(*rows, scale=scaling, cu_seqlens=cu_seqlens).output
    return output_1HTD.transpose(1, 2).reshape(query_BHQD.transpose(1, 2).shape).contiguous(), None


def check_model(model: Any) -> None:
    """Refuses a model, before its weights are read, whose code looks no attention function up.

    Raises:
        UserError: naming its class.
    """
    if not model._can_set_attn_implementation() or getattr(model.config, "scheme", NAME) != NAME:
        raise _refused("a model that looks its attention up", f"{type(model).__name__}, which has another of its own")


def _has_positions(module: nn.Module) -> bool:
    names = _names_used(type(module))
    if "use_rope" in names and (rotates := getattr(module, "use_rope", None)) is not None:
        return bool(rotates)
    config: Any = getattr(module, "config", None)
    # any configuration may hold the field, and only models whose configuration declares it read it
    declares = hasattr(type(config), "position_embedding_type")
    if declares and getattr(config, "position_embedding_type", "") in (None, "nope"):
        return False
    return any(word in name for name in names for word in _ROTATING)


def _names_used(kind: type[nn.Module]) -> frozenset[str]:
    forwards = [inspect.unwrap(vars(of)["forward"]) for of in kind.__mro__ if "forward" in vars(of)]
    codes = [forward.__code__ for forward in forwards if inspect.isfunction(forward)]
    return frozenset(name for code in codes for name in (*code.co_names, *code.co_varnames))


def _refused(expected: str, instead: str, remedy: str = "choose another attn_implementation") -> UserError:
    return UserError(f"Expected {expected} for attn_implementation={NAME!r}, found {instead}: {remedy}.")


def sequence_starts(attention_mask: Tensor | None, *, keys: int, has_past: bool) -> Tensor | None:
    """Returns how many padding positions precede each sequence, [B] integers, or None where nothing is padded.

    Positions of padding after a sequence need no mask under causal attention, so long as nothing follows them. The mask
    is [B, keys], nonzero for tokens; `keys` are the cached and new positions.

    Raises:
        UserError: the mask has another shape, has a hole, or pads on the right where more tokens follow.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] != keys:
        raise UserError(
            f"attention_mask must have the shape [batch, cached and new tokens = {keys}], "
            f"got {list(attention_mask.shape)}"
        )
    token = attention_mask.bool()
    position = torch.arange(keys, device=token.device)
    start = torch.where(token, position, keys).amin(-1)
    stop = torch.where(token, position + 1, 0).amax(-1)
    has_hole = token.sum(-1) != (stop - start).clamp_min(0)
    ends_early = stop != keys
    if torch.compiler.is_compiling():  # a value that decided something would break the graph
        torch._assert_async(~(has_hole | ends_early if has_past else has_hole).any(), f"{_HOLE} or pads on the right")
        return start.clamp_max(keys - 1)
    if bool(token.all()):
        return None
    if bool(has_hole.any()):
        raise UserError(f"{_HOLE}; pad on the left (padding_side='left')")
    if has_past and bool(ends_early.any()):
        raise UserError("attention_mask pads on the right of cached tokens; pad on the left (padding_side='left')")
    start = start.clamp_max(keys - 1)
    return start if bool(start.any()) else None
