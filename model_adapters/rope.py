"""Where RoPE puts the tokens of a request: frequencies and a method of extrapolation, gone when the request is done.

A method stands in the place of a loaded model's own attention: this family's or transformers'. An attention of
transformers rotates queries and keys by a function of its file, caches the keys, and looks its kernel up in a table. It
gets a copy of its forward in which that function rotates nothing and every entry of the table is ours, which rotates.
Keys are then cached unrotated, so that a cache serves whatever zone they turn out to be in.
"""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sbeval.checkpoints.facts import positive, text_config, training_length_tokens
from sbeval.errors import UserError, first_line
from sbeval.model_adapters.generate.slots.stepper import sliding_windows
from sbeval.model_adapters.prepare.changes.long_attention import with_attention
from sbeval.model_adapters.prepare.changes.rotations import turns_halves
from sbeval.model_adapters.prepare.replacing import Changes, held, with_name
from sbeval.model_adapters.prepare.sample import sample_tokens
from sbeval.model_adapters.prepare.trial import same_logits
from sbeval.models import SbevalModel
from sbeval.models.extrapolation import ExtrapolatedAttention, Extrapolation
from sbeval.models.rope import RopeFrequencies, held_rope_frequencies
from sbeval.rope_parameters import GLOBAL_LAYERS, LENGTH_DEPENDENT, kind_of, rope_entries

_SAMPLE_TOKENS = 8


class RequestRope:
    """The RoPE scaling and the method of extrapolation of a run, from `parse_rope_scaling` and `parse_extrapolation`.

    Raises:
        UserError: a scaling or a method is given and the model has no rotary embeddings it could be applied to, or the
            method's numbers do not suit the training length.

    Attributes:
        in_force: the RoPE scaling in force, given by the user or by the checkpoint; None where there is none. Where
            sliding-window layers are scaled too, a mapping from the type of layer to its scaling.
        by_length: frequencies of some layers depend on the request's length, so that a batch holds one length only.
    """

    def __init__(
        self,
        model: nn.Module,
        scaling: Mapping[str, Any] | None,
        original_length_tokens: int | None,
        extrapolation: Extrapolation | Mapping[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        if isinstance(extrapolation, Mapping):  # LongRoPE's factors
            if scaling is not None:
                expected = "Expected extrapolation=longrope without rope_scaling, which it is"
                raise UserError(f"{expected}, found both: remove one of them from --model_args.")
            scaling, extrapolation = extrapolation, None
        self._scaling = scaling
        given: dict[str, Any] = {"scaling": scaling, "original_length_tokens": original_length_tokens}
        self._held = functools.partial(held_rope_frequencies, model, **given)
        self.in_force = _in_force(model, scaling)
        self.by_length = any(kind_of(entry) in LENGTH_DEPENDENT for entry in rope_entries(self.in_force).values())
        self._changes: Changes = []
        if scaling is not None:
            self._check_reached(model, tokenizer)
        self.extrapolation: Extrapolation | None = None
        if extrapolation is not None:
            length_tokens = original_length_tokens or training_length_tokens(getattr(model, "config", None))
            self.extrapolation = extrapolation.trained_at(length_tokens)
            self._changes = extrapolating(model, self.extrapolation, tokenizer)

    def frequencies(self, length_tokens: int) -> Hashable:
        """Returns what is the same for requests of two lengths where their frequencies are."""
        if not self.by_length:
            return None
        with self._held(length_tokens=length_tokens) as frequencies:
            return tuple((each.inv_freq.cpu().numpy().tobytes(), each.attention_factor) for each in frequencies)

    @contextlib.contextmanager
    def hold(self, length_tokens: int) -> Iterator[None]:
        """Applies, until the block ends, what a request of this length needs; tokens it may generate count."""
        with contextlib.ExitStack() as stack:
            if self._scaling is not None or self.by_length:
                stack.enter_context(self._held(length_tokens=length_tokens))
            stack.enter_context(held(self._changes))
            yield

    @torch.no_grad()
    def _check_reached(self, model: Any, tokenizer: Any) -> None:
        """Checks that scaled frequencies change what a model computes: some compute their own whenever they are read.

        Raises:
            UserError: they do not, or its own code fails with them.
        """
        try:
            with self.hold(1):
                pass
            tokens = _sample(model, tokenizer, _SAMPLE_TOKENS)
            expected = model(input_ids=tokens, use_cache=False).logits
            with held_rope_frequencies(model, 1, {"rope_type": "linear", "factor": 3.7}):
                same = torch.equal(model(input_ids=tokens, use_cache=False).logits, expected)
            fault = "not changed by it" if same else ""
        except UserError:
            raise
        except Exception as error:  # models' code raises anything
            fault = f"which fails ({first_line(error)})"
        if fault:
            words = f"Expected a model whose logits rope_scaling changes, found {type(model).__name__}, {fault}"
            raise UserError(f"{words}: remove rope_scaling from --model_args.")


def _in_force(model: nn.Module, scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns the scaling of the layers that see the whole text, or scalings by type of layer where others have one."""
    own = rope_entries(getattr(text_config(getattr(model, "config", None)), "rope_parameters", None))
    scaled = {name: dict(entry) for name, entry in own.items() if kind_of(entry) != "default"}
    if scaling is not None:
        scaled[GLOBAL_LAYERS if GLOBAL_LAYERS in own else ""] = dict(scaling)
    if not scaled:
        return None
    return next(iter(scaled.values())) if scaled.keys() <= {"", GLOBAL_LAYERS} else scaled


def extrapolating(model: nn.Module, method: Extrapolation, tokenizer: Any = None) -> Changes:
    """Returns what makes a model attend by a method.

    Raises:
        UserError: it has no rotary embeddings, windows of its own, or an attention that is not known here.
    """
    name = type(model).__name__
    config = text_config(getattr(model, "config", None))
    if positive(getattr(config, "sliding_window", None)) or set(sliding_windows(model) or [0]) != {None}:
        expected = f"Expected a model whose layers all see the whole text for extrapolation={method}"
        remedy = "remove extrapolation from --model_args"
        raise UserError(f"{expected}, found {name} with windows or other caches: {remedy}.")
    changes: Changes = [
        (module, {"held_extrapolation": method})
        for module in model.modules()
        if isinstance(module, SbevalModel) and module.config.rope_parameters is not None
    ]
    changes = changes or _in_transformers(model, method)
    if not changes:
        expected = f"Expected a model with rotary embeddings for extrapolation={method}"
        remedy = "remove extrapolation from --model_args"
        raise UserError(f"{expected}, found {name}, which has none that are known here: {remedy}.")
    _check_short_text(model, changes, method, tokenizer)
    return changes


def _in_transformers(model: nn.Module, method: Extrapolation) -> Changes:
    rotaries = [module for module in model.modules() if hasattr(module, "rope_type") and hasattr(module, "inv_freq")]
    if len(rotaries) != 1:  # none, or one for every kind of layer
        return []
    rotary: Any = rotaries[0]

    def attend(
        module: nn.Module,
        query_BHQD: Tensor,
        key_BGKD: Tensor,
        value_BGKD: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Returns [B, Q, H, D] and no weights."""
        frequencies = RopeFrequencies(rotary.inv_freq, float(rotary.attention_scaling))
        attention = ExtrapolatedAttention(method, frequencies, angle_dtype=query_BHQD.dtype)  # as rotary embeddings do
        scale = query_BHQD.shape[-1] ** -0.5 if scaling is None else scaling
        start_B = None if attention_mask is None else _starts(attention_mask)
        output_BHQD = attention(query_BHQD, key_BGKD, value_BGKD, scale=scale, seq_start_B=start_B)
        return output_BHQD.transpose(1, 2).contiguous(), None

    changes: Changes = []
    for module in model.modules():
        if _is_hooked(module):
            return []
        if (copied := _copied(type(module).forward, attend)) is not None:
            changes.append((module, {"forward": types.MethodType(copied, module)}))
    return changes


def _is_hooked(module: nn.Module) -> bool:
    """Whether a module has a forward of accelerate's or a caller's; copies of its class's own are the adapter's."""
    of_class, own = type(module).forward, vars(module).get("forward")
    if own is None:
        return False
    return inspect.unwrap(getattr(own, "__func__", own), stop=lambda function: function is of_class) is not of_class


def _copied(forward: Any, attend: Callable[..., Any]) -> Any:
    """Returns an attention's forward that leaves rotation and attention to `attend`; None for any other forward."""
    unrotated = with_name(forward, "apply_rotary_pos_emb", lambda rotate: _leave if turns_halves(rotate) else None)
    return with_attention(unrotated, lambda function: attend)


def _leave(query: Tensor, key: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return query, key


def _starts(mask_B1QK: Any) -> Tensor | None:
    """Returns the first key [B] that the newest query sees, None if it is the first of all everywhere.

    Raises:
        UserError: the mask is another attention's than eager's or sdpa's, or the newest key is not the newest query's.
    """
    if not isinstance(mask_B1QK, Tensor) or mask_B1QK.dim() != 4:
        expected = "Expected attention of transformers that takes a mask of queries by keys for extrapolation"
        raise UserError(f"{expected}, found another: give attn_implementation=sdpa.")
    newest_BK = mask_B1QK[:, 0, -1]
    seen_BK = newest_BK if newest_BK.dtype == torch.bool else newest_BK == 0
    if not bool(seen_BK[:, -1].all()):
        expected = "Expected a cache that holds the text alone for extrapolation"
        raise UserError(f"{expected}, found room behind it: leave cache_implementation out.")
    start_B = seen_BK.to(torch.int8).argmax(-1)
    return start_B if bool(start_B.any()) else None


@torch.no_grad()
def _check_short_text(model: Any, changes: Changes, method: Extrapolation, tokenizer: Any) -> None:
    """Checks that texts for which the method changes nothing have the logits of the model as it is.

    Raises:
        UserError: they differ, so the attention does more than is known here.
    """
    tokens = _sample(model, tokenizer, min(_SAMPLE_TOKENS, method.unchanged_tokens))

    def read() -> Tensor:
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits[0]

    with held(changes):
        found = read()
    if not same_logits(model, read, found):
        raise UserError(
            f"Expected an attention that is known here for extrapolation={method}, found {type(model).__name__}, whose "
            "attention does more: remove extrapolation from --model_args."
        )


def _sample(model: Any, tokenizer: Any, count: int) -> Tensor:
    """Returns the first tokens [1, count] of a text."""
    tokens = sample_tokens(tokenizer, model.get_input_embeddings().weight.shape[0], count)
    return torch.tensor(tokens, device=model.device)[None]
