"""Runs a model in batches, with padding, with KV caches, and measures how far its logits are from the reference.

The reference logits come from a forward pass over the whole text in a batch of one, without padding and without a
cache. The difference at a position is relative: the norm of the difference, divided by the norm of the reference logits
minus their mean. Two numbers are compared with limits: the mean over positions, and the maximum, which shows a fault at
a single position. Both limits are measured on the model: it reads the same texts while random errors, up to four times
as large as rounding to its dtype makes, are added to the output of each module without submodules. If a difference
exceeds a limit, errors are drawn again, because rounding may send a single token to another expert.

Shape suffixes: B rows, L tokens, V vocabulary.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sbeval.attn_implementation import NAME as STICKBREAKING
from sbeval.errors import first_line
from sbeval.model_adapters.batching import out_of_memory
from sbeval.model_adapters.generate.call import call_generate, without_cache
from sbeval.model_adapters.generate.growing_cache import growing_cache
from sbeval.model_adapters.open.opened import Opened
from sbeval.model_adapters.self_test.outcome import Check
from sbeval.scoring.body import cache_argument, no_cache
from sbeval.scoring.rounding import least, rounded_anew, shares_apart

TOKENS = 48
ROWS = 8
"""The number of rows in the test's batches."""
EAGER = "eager"
_LONG, _SHORT, _CHANGED, _AT_ONCE, _NEW = 24, 13, 9, 5, 4
TIMES_ROUNDING = 4.0
"""The size of the random errors that are added to outputs, as a multiple of the dtype's rounding error.

It is not the same to add errors of the dtype's own size and to multiply their effect by four: in a mixture of experts,
only the larger errors change which expert a token selects.
"""
MOST_DRAWS = 8
TIMES_LARGEST = 2.0
"""The limit for the maximum over positions, as a multiple of the maximum that random errors cause.

It is above 1 because a maximum varies more than a mean.
"""
_CACHES = ("past_key_values", "cache", "cache_params", "state")


class Nothing(Exception):
    """Raised by a check that does not apply to the model, such as one of the KV cache of a model without a cache."""


class Apart(NamedTuple):
    """The relative difference between logits and the reference: its mean over positions and its maximum."""

    mean: float
    largest: float

    @classmethod
    def of(cls, shares_L: Tensor) -> Self:
        """Returns the mean and the maximum of the relative differences at L positions, float64 [L]."""
        return cls(float(shares_L.mean()), float(shares_L.max()))

    def or_more(self, other: Self) -> Self:
        """Returns the larger of the two means with the larger of the two maxima."""
        return type(self)(max(self.mean, other.mean), max(self.largest, other.largest))

    def within(self, allowed: Self) -> bool:
        """Whether the mean is at most the allowed mean, and the maximum at most the allowed maximum."""
        return self.mean <= allowed.mean and self.largest <= allowed.largest


NO_DIFFERENCE = Apart(0.0, 0.0)


class Measured:
    """A loaded model with short test texts, made of `TOKENS` tokens, and a method for each way to read them.

    Each method that returns an `Apart` reads the texts in one way, such as in a padded batch, and compares the logits
    with the reference: those of the whole text in a batch of one, without a cache.

    Attributes:
        allowed: the largest difference that rounding explains.
        least: the largest mean difference that is allowed between two passes over the same text. It is fixed for the
            dtype and device, because a limit measured by such repeated passes would explain any difference.
    """

    def __init__(self, opened: Opened, tokens: Sequence[int]) -> None:
        self._opened, self._model = opened, opened.model
        first_L, second_L = torch.tensor(tokens[:TOKENS], device=opened.device).chunk(2)
        self._long_L, self._other_L, self._short_L = first_L, second_L, second_L[:_SHORT]
        self._changed_L = torch.cat([first_L[:-_CHANGED], second_L[-_CHANGED:]])
        self._kept: dict[tuple[int, ...], Tensor] = {}
        whole_LV = self._whole(self._long_L)
        if not whole_LV.isfinite().any(-1).all() or whole_LV.isnan().any():
            raise Nothing("the model's logits are NaN or infinite")
        self.least = least(whole_LV.dtype, whole_LV.device)
        self.allowed = Apart(self.least, TIMES_LARGEST * self.least)
        self._draws = 0
        self._draw()

    def check(self, differences: Callable[[], Apart], least: float | None = None) -> Check:
        """Calls `differences`, and returns whether rounding explains the result. The check fails if the model raises.

        If `least` is passed, the mean difference is compared with `least` only, and no random errors are drawn.
        """
        try:
            difference = differences()
        except Nothing as nothing:
            return Check(passed=True, reason=str(nothing))
        except Exception as error:  # the code of a model can raise anything
            if out_of_memory(error):
                raise
            return Check(passed=False, reason=first_line(error))
        if not math.isfinite(difference.mean):
            return Check(passed=False, reason="its logits are NaN or infinite")
        passed = difference.mean <= least if least is not None else self._explained(difference)
        at_one_position = not passed and least is None and difference.mean <= self.allowed.mean
        return Check(passed=passed, difference=difference.largest if at_one_position else difference.mean)

    def _explained(self, difference: Apart) -> bool:
        """Whether a difference is within the limit; before it says no, it draws errors until there are `MOST_DRAWS`."""
        with contextlib.suppress(Nothing):  # a draw whose logits are not finite leaves the limit as it is
            while not difference.within(self.allowed) and self._draws < MOST_DRAWS:
                self._draw()
        return difference.within(self.allowed)

    def _draw(self) -> None:
        """Reads all texts with random rounding errors, and raises the limit to the difference that the errors cause."""
        texts = (self._long_L, self._changed_L, self._short_L)
        whole = [self._whole(text) for text in texts]
        with rounded_anew(self._model, seed=self._draws, times=TIMES_ROUNDING):
            rounded = [self._logits(text[None])[0] for text in texts]
        self._draws += 1
        moved = most(map(apart, rounded, whole))
        if not math.isfinite(moved.mean):
            raise Nothing("the model's logits are NaN or infinite if its outputs are rounded once more")
        self.allowed = self.allowed.or_more(Apart(moved.mean, TIMES_LARGEST * moved.largest))

    def later_tokens(self) -> Apart:
        """Measures whether logits depend on later tokens: changes or removes the tokens after each position.

        The mean is over all positions of the text; positions that are changed or removed themselves count as 0.
        """
        length = len(self._long_L)
        before = length - _CHANGED
        long_LV = self._whole(self._long_L)
        changed = (self._changed_L, self._long_L[:before])
        early = most(apart(self._whole(other)[:before], long_LV[:before]) for other in changed)
        difference = Apart(early.mean * before / length, early.largest).or_more(self._at_every_end(in_batches=True))
        if not self._explained(difference):  # rows of a batch may differ for reasons other than later tokens
            return self._at_every_end(in_batches=False).or_more(Apart(early.mean * before / length, early.largest))
        return difference

    def _at_every_end(self, *, in_batches: bool) -> Apart:
        """Measures each position once, with the text cut after it or, if `in_batches`, continued by other tokens."""
        long_LV, length = self._whole(self._long_L), len(self._long_L)
        shares = []
        for first in range(1, length, ROWS if in_batches else 1):
            ends = range(first, min(first + ROWS, length)) if in_batches else range(first, first + 1)
            texts = [torch.cat([self._long_L[:end], self._other_L[end:]]) for end in ends] if in_batches else None
            found_BLV = self._logits(torch.stack(texts) if texts else self._long_L[None, :first])
            places = torch.tensor([end - 1 for end in ends])
            shares.append(shares_apart(found_BLV[range(len(ends)), places], long_LV[places]))
        return Apart.of(torch.cat(shares))

    def attention(self) -> Apart:
        """Compares the attention implementation in use with eager attention, which is the model's definition."""
        before = getattr(self._model.config, "_attn_implementation", None)
        if before in (None, EAGER, STICKBREAKING):
            raise Nothing("there is no attention implementation to compare with eager attention")
        try:
            self._model.set_attn_implementation(EAGER)
            eager_LV = self._logits(self._long_L[None])[0]
        except Exception as error:  # the code of a model can raise anything
            if out_of_memory(error):
                raise
            raise Nothing("eager attention does not run") from error
        finally:
            self._model.set_attn_implementation(before)
        with torch.compiler.set_stance("default"):  # compiled, as in the run
            attended_LV = self._logits(self._long_L[None])[0]
        difference = apart(eager_LV, attended_LV)
        if not math.isfinite(difference.mean):
            raise Nothing("eager attention gives NaN or infinite logits")
        return difference

    def again(self) -> Apart:
        """Measures the difference between two passes over the same text."""
        return apart(self._logits(self._long_L[None])[0], self._whole(self._long_L))

    def rows(self, *, padded: bool) -> Apart:
        """Measures every row of a batch in which texts repeat; if `padded`, some rows are padded on the right."""
        shorter = [self._short_L, self._long_L[:-1]] if padded else []
        texts = [*_repeated([self._long_L, self._changed_L, *shorter], ROWS - 1), self._long_L]
        batch_BLV = self._logits(pad_sequence(texts, batch_first=True))
        return most(apart(row[: len(text)], self._whole(text)) for row, text in zip(batch_BLV, texts, strict=True))

    def continued(self) -> Apart:
        """Measures several tokens that follow a cached prefix, in every row of a batch."""
        texts_BL = torch.stack(_repeated([self._long_L, self._changed_L], ROWS))
        cache = self._after_prefix(texts_BL)
        found_BLV = self._model_logits(texts_BL[:, -_AT_ONCE:], **cache)
        whole = (self._whole(text)[-_AT_ONCE:] for text in texts_BL)
        return most(apart(*pair) for pair in zip(found_BLV, whole, strict=True))

    def length(self) -> Check:
        """Whether a cache counts the tokens that it holds."""
        try:
            (cache,) = self._after_prefix(self._long_L[None]).values()
            counted = int(cache.get_seq_length())
        except Nothing as nothing:
            return Check(passed=True, reason=str(nothing))
        except Exception:  # caches of recurrent models count no tokens, and the code of a model can raise anything
            return Check(passed=True, reason="the model's cache counts no tokens")
        read = len(self._long_L) - _AT_ONCE
        return Check(passed=counted == read, reason=f"counts {counted} of {read} tokens")

    def generated(self, *, padded: bool, rows: int = ROWS, cached: bool = True) -> Apart:
        """Measures the logits that choose the first tokens of answers to a batch of prompts.

        If `padded`, some prompts are shorter than others and therefore left-padded.
        """
        return self.generated_after(
            _repeated([self._long_L, *([self._short_L] if padded else []), self._changed_L], rows), cached=cached
        )

    def generated_after(self, texts: Sequence[Tensor], *, cached: bool = True, compared: Sequence[int] = ()) -> Apart:
        """Measures the logits that choose the first tokens after each of `texts`, int64 [L], in a left-padded batch.

        `compared` are the rows to compare with the reference, by default all rows.
        """
        ids_BL = pad_sequence([*texts], batch_first=True, padding_side="left")
        mask_BL = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True, padding_side="left")
        cache = growing_cache(self._model, None) if cached else None
        with contextlib.nullcontext() if cached else without_cache(self._model):
            output = call_generate(
                self._opened,
                ids_BL,
                mask_BL=mask_BL,
                stop=[],
                max_length=ids_BL.shape[1] + _NEW,
                max_new_tokens=_NEW,  # overrides the model's own generation config, as the next lines do
                min_new_tokens=_NEW,
                max_time=None,
                stop_strings=None,
                num_beams=1,
                num_return_sequences=1,
                output_logits=True,
                return_dict_in_generate=True,
                **({} if cache is None else {cache_argument(self._model): cache}),
            )
        found_BLV = torch.stack(output.logits, dim=1)
        new_BL = output.sequences[:, ids_BL.shape[1] :]
        rows = compared or range(len(texts))
        read = [torch.cat([texts[row], new_BL[row]])[:-1] for row in rows]
        if cached:
            whole = [self._whole(text)[-_NEW:] for text in read]
        else:  # so that a model whose tokens see later ones is compared with the text up to the token before
            ends = range(1 - _NEW, 1)
            whole = [torch.stack([self._whole(text[: len(text) + end])[-1] for end in ends]) for text in read]
        return most(map(apart, [found_BLV[row] for row in rows], whole))

    def _whole(self, text_L: Tensor) -> Tensor:
        key = tuple(text_L.tolist())
        if key not in self._kept:
            self._kept[key] = self._logits(text_L[None])[0]
        return self._kept[key]

    def _logits(self, texts_BL: Tensor) -> Tensor:
        return self._model_logits(texts_BL, **no_cache(self._model))

    def _model_logits(self, texts_BL: Tensor, **options: Any) -> Tensor:
        logits_BLV: Tensor = self._model(input_ids=texts_BL, **options).logits
        return logits_BLV[:, -texts_BL.shape[1] :]  # PEFT may have put a learned prompt before the input

    def _after_prefix(self, texts_BL: Tensor) -> dict[str, Any]:
        output = self._model(input_ids=texts_BL[:, :-_AT_ONCE], use_cache=True)
        for name in _CACHES:
            if (cache := getattr(output, name, None)) is not None:
                return {name: cache}
        raise Nothing("the model keeps no cache")


def apart(found_LV: Tensor, expected_LV: Tensor) -> Apart:
    """Returns the mean and the maximum of the relative differences of logits; infinity if `found_LV` holds NaN."""
    return Apart.of(shares_apart(found_LV, expected_LV))


def most(differences: Iterable[Apart]) -> Apart:
    """Returns the largest mean of several differences with their largest maximum."""
    return functools.reduce(Apart.or_more, differences, NO_DIFFERENCE)


def _repeated(texts: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Returns a list with `rows` entries that repeats `texts` in turn."""
    return [texts[row % len(texts)] for row in range(rows)]
