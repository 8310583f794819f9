"""RoPE scaling and extrapolation for one request at a time: both are set before the request and restored after it.

An extrapolation method, such as self-extend, changes the positions by which keys and queries are rotated, so that a
model reads texts beyond its training length. It replaces the attention of this project's models and of transformers'.
The forward of a transformers attention module calls `apply_rotary_pos_emb`, caches the keys, and looks its attention
function up in `ALL_ATTENTION_FUNCTIONS`. During a request, the module has a copy of its forward in which
`apply_rotary_pos_emb` does nothing, and in which the table returns our function, which rotates and attends. So the KV
cache holds unrotated keys, and in every step a key can be rotated by another position.
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
from sbeval.model_adapters.prepare.replacing import Changes, temporary_attributes, with_name
from sbeval.model_adapters.prepare.sample import sample_tokens
from sbeval.model_adapters.prepare.trial import same_logits
from sbeval.models import SbevalModel
from sbeval.models.extrapolation import ExtrapolatedAttention, Extrapolation
from sbeval.models.rope import RopeFrequencies, setting_rope_frequencies
from sbeval.rope_parameters import GLOBAL_LAYERS, LENGTH_DEPENDENT, kind_of, rope_entries

_SAMPLE_TOKENS = 8


class RequestRope:
    """A run's RoPE scaling and extrapolation method, from `parse_rope_scaling` and `parse_extrapolation`.

    Raises:
        UserError: the model has no rotary embeddings to which the scaling or the method can be applied, or the method's
            numbers do not suit the training length.

    Attributes:
        in_force: the RoPE scaling that the user passed, else that of the checkpoint; None if there is none. If
            sliding-window layers are scaled as well, a mapping from the type of layer to its scaling.
        by_length: whether the frequencies of some layers depend on the length of a request, as in dynamic NTK scaling.
            All rows of a batch then have the same length.
    """

    def __init__(
        self,
        model: nn.Module,
        scaling: Mapping[str, Any] | None,
        original_length_tokens: int | None,
        extrapolation: Extrapolation | Mapping[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        if isinstance(extrapolation, Mapping):  # the factors of LongRoPE, which is a RoPE scaling
            if scaling is not None:
                raise UserError(
                    "extrapolation=longrope sets a RoPE scaling itself and does not work with rope_scaling: remove one "
                    "of them from --model_args."
                )
            scaling, extrapolation = extrapolation, None
        self._scaling = scaling
        self._held = functools.partial(
            setting_rope_frequencies, model, scaling=scaling, original_length_tokens=original_length_tokens
        )
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
        """Returns a key that is equal for two lengths if their RoPE frequencies are, so that they can share a batch."""
        if not self.by_length:
            return None
        with self._held(length_tokens=length_tokens) as frequencies:
            return tuple((each.inv_freq.cpu().numpy().tobytes(), each.attention_factor) for each in frequencies)

    @contextlib.contextmanager
    def hold(self, length_tokens: int) -> Iterator[None]:
        """Inside this context, the model has the scaling and extrapolation for a request of this length.

        `length_tokens` includes the tokens to generate.
        """
        with contextlib.ExitStack() as stack:
            if self._scaling is not None or self.by_length:
                stack.enter_context(self._held(length_tokens=length_tokens))
            stack.enter_context(temporary_attributes(self._changes))
            yield

    @torch.no_grad()
    def _check_reached(self, model: Any, tokenizer: Any) -> None:
        """Checks that a change of the RoPE frequencies changes the logits: some models ignore the replaced frequencies.

        Raises:
            UserError: the logits do not change, or the model's code fails.
        """
        try:
            with self.hold(1):
                pass
            tokens = _sample(model, tokenizer, _SAMPLE_TOKENS)
            expected = model(input_ids=tokens, use_cache=False).logits
            with setting_rope_frequencies(model, 1, {"rope_type": "linear", "factor": 3.7}):
                same = torch.equal(model(input_ids=tokens, use_cache=False).logits, expected)
            fault = f"rope_scaling does not change the logits of {type(model).__name__}" if same else ""
        except UserError:
            raise
        except Exception as error:  # the code of a model can raise anything
            fault = f"{type(model).__name__} fails with rope_scaling ({first_line(error)})"
        if fault:
            raise UserError(f"{fault}: remove rope_scaling from --model_args.")


def _in_force(model: nn.Module, scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns the RoPE scaling of the full-attention layers; a mapping by type of layer if others have one, too."""
    entries = rope_entries(getattr(text_config(getattr(model, "config", None)), "rope_parameters", None))
    scaled = {name: dict(entry) for name, entry in entries.items() if kind_of(entry) != "default"}
    if scaling is not None:
        scaled[GLOBAL_LAYERS if GLOBAL_LAYERS in entries else ""] = dict(scaling)
    if not scaled:
        return None
    return next(iter(scaled.values())) if scaled.keys() <= {"", GLOBAL_LAYERS} else scaled


def extrapolating(model: nn.Module, method: Extrapolation, tokenizer: Any = None) -> Changes:
    """Returns the changes, for `temporary_attributes`, with which a model's attention extrapolates by a method.

    Raises:
        UserError: the model has no rotary embeddings, has sliding windows, or has an attention of an unknown kind.
    """
    name = type(model).__name__
    config = text_config(getattr(model, "config", None))
    if positive(getattr(config, "sliding_window", None)) or set(sliding_windows(model) or [0]) != {None}:
        raise UserError(
            f"extrapolation={method} needs a model whose layers all see the whole text, and {name} has sliding windows "
            "or other caches: remove extrapolation from --model_args."
        )
    changes: Changes = [
        (module, {"current_extrapolation": method})
        for module in model.modules()
        if isinstance(module, SbevalModel) and module.config.rope_parameters is not None
    ]
    changes = changes or _in_transformers(model, method)
    if not changes:
        raise UserError(
            f"extrapolation={method} needs rotary embeddings of a known kind, and {name} has none: remove "
            "extrapolation from --model_args."
        )
    _check_short_text(model, changes, method, tokenizer)
    return changes


def _in_transformers(model: nn.Module, method: Extrapolation) -> Changes:
    rotaries = [module for module in model.modules() if hasattr(module, "rope_type") and hasattr(module, "inv_freq")]
    if len(rotaries) != 1:  # no rotary embedding, or one for each type of layer
        return []
    rotary: Any = rotaries[0]

    def attend(
        module: nn.Module,
        query_BHQD: Tensor,
        key_BGKD: Tensor,
        value_BGKD: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Returns [B, Q, H, D] and, in place of attention weights, None."""
        frequencies = RopeFrequencies(rotary.inv_freq, float(rotary.attention_scaling))
        # in the dtype that the model's own rotary embedding uses
        attention = ExtrapolatedAttention(method, frequencies, angle_dtype=query_BHQD.dtype)
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
    """Whether accelerate or a caller has replaced a module's forward; copies made by this project do not count."""
    of_class, replaced = type(module).forward, vars(module).get("forward")
    if replaced is None:
        return False
    forward = getattr(replaced, "__func__", replaced)
    return inspect.unwrap(forward, stop=lambda function: function is of_class) is not of_class


def _copied(forward: Any, attend: Callable[..., Any]) -> Any:
    """Returns a copy of an attention module's forward that calls `attend` with unrotated queries and keys.

    Returns None for a forward of another kind.
    """
    unrotated = with_name(forward, "apply_rotary_pos_emb", lambda rotate: _leave if turns_halves(rotate) else None)
    return with_attention(unrotated, lambda function: attend)


def _leave(query: Tensor, key: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return query, key


def _starts(mask_B1QK: Any) -> Tensor | None:
    """Returns the index [B] of the first key that the newest query of each text sees, None if it is 0 for all texts.

    Raises:
        UserError: the mask is not one of eager attention or SDPA, or the cache has room after the newest key.
    """
    if not isinstance(mask_B1QK, Tensor) or mask_B1QK.dim() != 4:
        raise UserError(
            "extrapolation needs an attention implementation with a mask of queries by keys, and this model has "
            "another: pass attn_implementation=sdpa in --model_args."
        )
    newest_BK = mask_B1QK[:, 0, -1]
    visible_BK = newest_BK if newest_BK.dtype == torch.bool else newest_BK == 0
    if not bool(visible_BK[:, -1].all()):
        raise UserError(
            "extrapolation needs a KV cache that holds only the text, and this one has room behind the text: leave "
            "cache_implementation out."
        )
    start_B = visible_BK.to(torch.int8).argmax(-1)
    return start_B if bool(start_B.any()) else None


@torch.no_grad()
def _check_short_text(model: Any, changes: Changes, method: Extrapolation, tokenizer: Any) -> None:
    """Checks that the extrapolation method leaves the logits of a text that is too short for it to change.

    Raises:
        UserError: the logits differ, so the model's attention does something that this module does not know.
    """
    tokens = _sample(model, tokenizer, min(_SAMPLE_TOKENS, method.unchanged_tokens))

    def read() -> Tensor:
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits[0]

    with temporary_attributes(changes):
        extrapolated = read()
    if not same_logits(model, read, extrapolated):
        raise UserError(
            f"extrapolation={method} does not fit {type(model).__name__}, whose attention computes more than softmax "
            "attention with rotary embeddings: remove extrapolation from --model_args."
        )


def _sample(model: Any, tokenizer: Any, count: int) -> Tensor:
    """Returns token ids [1, count] of ordinary text."""
    tokens = sample_tokens(tokenizer, model.get_input_embeddings().weight.shape[0], count)
    return torch.tensor(tokens, device=model.device)[None]
