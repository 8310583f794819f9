"""How far a model's logits lie, computed in the ways that a run would use, from those of whole texts read alone.

A difference is a mean over positions, each as a share of how far the logits of that position lie apart: where rounding
sends a single token to another expert, it says little. How much rounding alone changes is learned from the model: the
same texts with the outputs of all its modules rounded once more, four times as far; again where a way seems to differ.

Shape suffixes: B rows, L tokens, V vocabulary.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sbeval.attn_implementation import NAME as STICKBREAKING
from sbeval.errors import first_line
from sbeval.model_adapters.batching import out_of_memory
from sbeval.model_adapters.decoding.growing_cache import growing_cache
from sbeval.model_adapters.self_test.outcome import Check
from sbeval.scoring.body import no_cache

TOKENS = 48
EAGER = "eager"
_LONG, _SHORT, _CHANGED, _AT_ONCE, _NEW = 24, 13, 9, 5, 4
_TIMES_SPREAD = 4.0
_MOST_DRAWS = 8
_EPS_OF_TF32 = 2.0**-10
_CACHES = ("past_key_values", "cache_params", "state")


class Nothing(Exception):
    """There is nothing to test, and why."""


class Measured:
    """A loaded model of lm-eval, `hf`, and texts of `TOKENS` tokens that are read in different ways.

    Attributes:
        allowed: the largest difference that rounding explains.
        least: what is allowed of the same text read again, where a difference would count as rounding's otherwise.
    """

    def __init__(self, hf: Any, tokens: Sequence[int]) -> None:
        self._hf, self._model = hf, hf.model
        first_L, second_L = torch.tensor(tokens[:TOKENS], device=hf.device).chunk(2)
        self._long_L, self._short_L = first_L, second_L[:_SHORT]
        self._changed_L = torch.cat([first_L[:-_CHANGED], second_L[-_CHANGED:]])
        self._kept: dict[tuple[int, ...], Tensor] = {}
        whole_LV = self._whole(self._long_L)
        if not whole_LV.isfinite().any(-1).all() or whole_LV.isnan().any():
            raise Nothing("the model's logits are no numbers")
        self.least = self.allowed = _least(whole_LV)
        self._draws = 0
        self._draw()

    def check(self, differences: Callable[[], float], allowed: float | None = None) -> Check:
        """Returns what a difference says; a model that raises does not run in this way."""
        try:
            difference = differences()
        except Nothing as nothing:
            return Check(passed=True, reason=str(nothing))
        except Exception as error:  # models' code raises anything
            if out_of_memory(error):
                raise
            return Check(passed=False, reason=first_line(error))
        if not math.isfinite(difference):
            return Check(passed=False, reason="its logits are no numbers")
        with contextlib.suppress(Nothing):  # which says of a way that differs nothing better
            while allowed is None and difference > self.allowed and self._draws < _MOST_DRAWS:
                self._draw()
        return Check(passed=difference <= (self.allowed if allowed is None else allowed), difference=difference)

    def _draw(self) -> None:
        """Rounds all texts anew, and allows what that changes."""
        texts = (self._long_L, self._changed_L, self._short_L)
        whole = [self._whole(text) for text in texts]
        with _rounded_anew(self._model, seed=self._draws):
            rounded = [self._logits(text[None])[0] for text in texts]
        self._draws += 1
        moved = max(map(apart, rounded, whole))
        if not math.isfinite(moved):
            raise Nothing("the model's logits are no numbers where they are rounded once more")
        self.allowed = max(self.allowed, moved)

    def later_tokens(self) -> float:
        """Of tokens before those that another text changes, or that a shorter one lacks; those count as equal."""
        before = len(self._long_L) - _CHANGED
        long_LV = self._whole(self._long_L)[:before]
        others = (self._changed_L, self._long_L[:before])
        return max(apart(self._whole(other)[:before], long_LV) for other in others) * before / len(self._long_L)

    def attention(self) -> float:
        """Of the attention in force to eager attention, which is the model's definition."""
        before = getattr(self._model.config, "_attn_implementation", None)
        if before in (None, EAGER, STICKBREAKING):
            raise Nothing("attention is eager, or of no other kind")
        try:
            self._model.set_attn_implementation(EAGER)
            eager_LV = self._logits(self._long_L[None])[0]
        except Exception as error:  # models' code raises anything
            if out_of_memory(error):
                raise
            raise Nothing("eager attention does not run") from error
        finally:
            self._model.set_attn_implementation(before)
        with torch.compiler.set_stance("default"):  # the kernel that a run uses, not its definition
            attended_LV = self._logits(self._long_L[None])[0]
        difference = apart(eager_LV, attended_LV)
        if not math.isfinite(difference):
            raise Nothing("eager attention gives no numbers")
        return difference

    def again(self) -> float:
        """Of the same text read once more."""
        return apart(self._logits(self._long_L[None])[0], self._whole(self._long_L))

    def rows(self, *, padded: bool) -> float:
        """Of rows of a batch, two of them equal, if `padded` two shorter, one by a token, padded on the right."""
        shorter = [self._short_L, self._long_L[:-1]] if padded else []
        texts = [self._long_L, self._changed_L, *shorter, self._long_L]
        batch_BLV = self._logits(pad_sequence(texts, batch_first=True))
        return max(apart(row[: len(text)], self._whole(text)) for row, text in zip(batch_BLV, texts, strict=True))

    def continued(self) -> float:
        """Of several tokens that follow a prefix, in two rows."""
        texts_BL = torch.stack([self._long_L, self._changed_L])
        cache = self._after_prefix(texts_BL)
        found_BLV = self._model_logits(texts_BL[:, -_AT_ONCE:], **cache)
        whole = (self._whole(text)[-_AT_ONCE:] for text in texts_BL)
        return max(apart(*pair) for pair in zip(found_BLV, whole, strict=True))

    def length(self) -> Check:
        """Whether a cache counts the tokens it holds."""
        try:
            (cache,) = self._after_prefix(self._long_L[None]).values()
            counted = int(cache.get_seq_length())
        except Nothing as nothing:
            return Check(passed=True, reason=str(nothing))
        except Exception:  # caches of other kinds, and models' code raises anything
            return Check(passed=True, reason="the model's cache counts no tokens")
        read = len(self._long_L) - _AT_ONCE
        return Check(passed=counted == read, reason=f"counts {counted} of {read} tokens")

    def generated(self, *, padded: bool, rows: int = 3, cached: bool = True) -> float:
        """Of the logits with which the first tokens of some answers are chosen; if `padded`, one text is shorter."""
        texts = [self._long_L, self._short_L if padded else self._changed_L, self._changed_L][:rows]
        ids_BL = pad_sequence(texts, batch_first=True, padding_side="left")
        mask_BL = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True, padding_side="left")
        cache = growing_cache(self._model, None) if cached else None
        with contextlib.nullcontext() if cached else without_cache(self._model):
            output = self._hf._model_generate(
                context=ids_BL,
                attention_mask=mask_BL,
                stop=[],
                max_length=ids_BL.shape[1] + _NEW,
                max_new_tokens=_NEW,  # before what the model's own generation config says
                min_new_tokens=_NEW,
                max_time=None,
                stop_strings=None,
                num_beams=1,
                num_return_sequences=1,
                output_logits=True,
                return_dict_in_generate=True,
                **({} if cache is None else {"past_key_values": cache}),
            )
        found_BLV = torch.stack(output.logits, dim=1)
        new_BL = output.sequences[:, ids_BL.shape[1] :]
        read = [torch.cat(pair)[:-1] for pair in zip(texts, new_BL, strict=True)]
        if cached:
            whole = [self._whole(text)[-_NEW:] for text in read]
        else:  # as even a model that sees later tokens is asked
            ends = range(1 - _NEW, 1)
            whole = [torch.stack([self._whole(text[: len(text) + end])[-1] for end in ends]) for text in read]
        return max(apart(*pair) for pair in zip(found_BLV, whole, strict=True))

    def _whole(self, text_L: Tensor) -> Tensor:
        key = tuple(text_L.tolist())
        if key not in self._kept:
            self._kept[key] = self._logits(text_L[None])[0]
        return self._kept[key]

    def _logits(self, texts_BL: Tensor) -> Tensor:
        return self._model_logits(texts_BL, **no_cache(self._model))

    def _model_logits(self, texts_BL: Tensor, **options: Any) -> Tensor:
        logits_BLV: Tensor = self._model(input_ids=texts_BL, **options).logits
        return logits_BLV[:, -texts_BL.shape[1] :]  # a learned prompt stands before the input

    def _after_prefix(self, texts_BL: Tensor) -> dict[str, Any]:
        output = self._model(input_ids=texts_BL[:, :-_AT_ONCE], use_cache=True)
        for name in _CACHES:
            if (cache := getattr(output, name, None)) is not None:
                return {name: cache}
        raise Nothing("the model keeps no cache")


def apart(found_LV: Tensor, expected_LV: Tensor) -> float:
    """Returns the difference of logits, as the module says; infinity where NaN is found."""
    expected_LV, found_LV = expected_LV.double(), found_LV.double().to(expected_LV.device)
    numbers_LV = expected_LV.isfinite()  # minus infinity stands for tokens that are masked

    def size(x_LV: Tensor) -> Tensor:
        return torch.where(numbers_LV, x_LV, 0.0).square().sum(-1).sqrt()

    mean_L1 = torch.where(numbers_LV, expected_LV, 0.0).sum(-1, keepdim=True) / numbers_LV.sum(-1, keepdim=True)
    shares_L = size(found_LV - expected_LV) / size(expected_LV - mean_L1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(shares_L.nan_to_num(nan=torch.inf).mean())


def _least(logits: Tensor) -> float:
    """What is allowed of a model that hardly shows its rounding: a scan in chunks and one in steps add differently."""
    eps = torch.finfo(logits.dtype).eps
    if logits.is_cuda and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
        eps = max(eps, _EPS_OF_TF32)
    return _TIMES_SPREAD * eps if eps >= _EPS_OF_TF32 else 8 * eps**0.75


@contextlib.contextmanager
def without_cache(model: Any) -> Iterator[None]:
    """Within it `generate` reads a whole text for each of its tokens, whatever lm-eval asks for."""
    generate = model.generate
    vars(model)["generate"] = lambda **options: generate(**{**options, "use_cache": False})
    try:
        yield
    finally:
        del vars(model)["generate"]


@contextlib.contextmanager
def _rounded_anew(model: nn.Module, *, seed: int) -> Iterator[None]:
    """Within it whatever a module without parts returns is rounded once more, up or down, a few times as far."""
    device: Any = model.device
    generator = torch.Generator(device).manual_seed(seed)

    def moved(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        far = _TIMES_SPREAD * torch.finfo(output.dtype).eps / 2
        share = torch.empty(output.shape, dtype=torch.float32, device=device)
        share.uniform_(1 - far, 1 + far, generator=generator)
        return (output * share.to(output.device)).to(output.dtype)

    leaves = (module for module in model.modules() if not list(module.children()))
    hooks = [module.register_forward_hook(moved) for module in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
