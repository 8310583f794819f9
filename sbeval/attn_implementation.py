"""Stick-breaking attention for transformers' models: `attn_implementation="stickbreaking"`.

transformers looks up two functions by that name. `texts`, the mask function, is called once in a forward pass and
returns the positions at which texts begin in the batch. `attend`, the attention function, computes a layer. Models
apply rotary embeddings before they call `attend`, so layers with position embeddings are refused. No interface tells
whether a layer has them: the attributes `use_rope` and `position_embedding_type` are trusted if a layer has them;
otherwise the names in the code of its `forward` decide.

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
"""Parts of names in the code of an attention layer that has position embeddings."""
_MORE = ("cache", "head_mask", "output_attentions", "position_bias", "s_aux", "sliding_window", "softcap")
"""Keyword arguments of attention features that stick-breaking attention does not support."""
_WITHOUT = "use a configuration without them (SmolLM3: no_rope_layers all 0), or another attn_implementation"
_HOLE = "attention_mask has padding inside a sequence"
Texts = tuple[Tensor | None, Tensor | None]
"""Left padding of each row, [B]; or int32 [n + 1], the bounds of n texts in the concatenated rows (`cu_seqlens`)."""


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
    """The mask function for transformers: returns where texts begin in the batch, None if every row is one text.

    Raises:
        UserError: there is padding inside a text, the mask is not causal, or the cache has a fixed size.
    """
    more = [name for name in ("use_vmap", "local_size") if others.get(name)]
    if more or "allow_is_bidirectional_skip" in others:
        raise _refused("a causal mask over all older keys", more[0] if more else "a bidirectional mask")
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise _refused("a cache that grows with the text", "one with a fixed size", "remove cache_implementation")
    if attention_mask is not None:
        return sequence_starts(attention_mask, keys=kv_length, has_past=q_offset > 0), None
    if allow_is_causal_skip or q_length < 2 or q_offset:
        return None
    # packed texts: a text begins where a token does not see the token before it
    row_B1 = torch.arange(batch_size, device=device)[:, None]
    place_1Q = torch.arange(q_length, device=device)[None]
    begins_BQ = ~mask_function(row_B1, row_B1 * 0, place_1Q, (place_1Q - 1).clamp_min(0))
    begins_T = (begins_BQ.expand(batch_size, -1) | (place_1Q == 0)).flatten()
    place_T = torch.arange(len(begins_T), device=device, dtype=torch.int32)
    # counting the texts would wait for the device and break a graph, so each token that begins no text becomes an empty
    # text at the end
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
    """The attention function for transformers: returns the output [B, Q, H, D] and None in place of weights.

    Raises:
        UserError: the layer has position embeddings, or uses a feature that stick-breaking attention does not support.
    """
    if _has_positions(module):
        layer = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', 'unknown')}"
        raise _refused("layers without position embeddings", f"{layer}, which has them", _WITHOUT)
    more = [name for name in _MORE if others.get(name) is not None and others[name] is not False]
    more += ["dropout"] * (dropout > 0) + ["a mask of its own"] * isinstance(attention_mask, Tensor)
    if False in (others.get("is_causal"), getattr(module, "is_causal", None)):
        more.append("later tokens")
    if more:
        raise _refused("plain causal attention to all older keys", more[0])
    seq_start_B, cu_seqlens = attention_mask or (None, None)
    if (cu_seq_lens_q := others.get("cu_seq_lens_q")) is not None:  # from transformers' collator for packed batches
        if seq_start_B is not None:
            raise _refused("packed or padded texts", "cu_seq_lens_q and attention_mask", "remove attention_mask")
        cu_seqlens = cu_seq_lens_q.int()
    elif attention_mask is None and others.get("use_cache") and not torch.compiler.is_compiling():
        # with a cache, transformers treats packed texts as one text
        position_BQ = others.get("position_ids")
        if position_BQ is not None and position_BQ.dim() == 2 and bool((position_BQ[:, 1:] == 0).any()):
            raise _refused("one text in each row with a cache", "position_ids that restart", "pass use_cache=False")
    heads = (query_BHQD.to(value_BGKD.dtype), key_BGKD.to(value_BGKD.dtype), value_BGKD)
    if cu_seqlens is None:
        output_BHQD = stickbreaking_attention(*heads, scale=scaling, seq_start=seq_start_B).output
        return output_BHQD.transpose(1, 2).contiguous(), None
    rows = [x.transpose(0, 1).flatten(1, 2)[None] for x in heads]
    output_1HTD = stickbreaking_attention(*rows, scale=scaling, cu_seqlens=cu_seqlens).output
    return output_1HTD.transpose(1, 2).reshape(query_BHQD.transpose(1, 2).shape).contiguous(), None


def check_model(model: Any) -> None:
    """Checks, before the weights are read, that a model uses transformers' registry of attention functions.

    Raises:
        UserError: it does not. transformers would accept the name and run the model's own attention without a mask.
    """
    if not model._can_set_attn_implementation() or getattr(model.config, "scheme", NAME) != NAME:
        raise _refused(
            "a model that uses transformers' attention functions",
            f"{type(model).__name__}, which has its own attention",
        )


def _has_positions(module: nn.Module) -> bool:
    names = _names_used(type(module))
    if "use_rope" in names and (rotates := getattr(module, "use_rope", None)) is not None:
        return bool(rotates)
    config: Any = getattr(module, "config", None)
    # any configuration object may have this field, but only models whose configuration class declares it read it
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
    """Returns the left padding of each sequence, [B] integers, or None if nothing is left-padded.

    Right padding needs no mask under causal attention, as long as no tokens follow it.

    Args:
        attention_mask: [B, keys], nonzero for tokens, or None.
        keys: number of cached and new positions.
        has_past: whether there are cached tokens.

    Raises:
        UserError: the mask has another shape, has padding between tokens, or pads cached tokens on the right.
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
    if torch.compiler.is_compiling():  # an `if` on a tensor's value would break the compiled graph
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
