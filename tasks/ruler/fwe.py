"""Frequent-words extraction: coded words whose counts fall off as a power of their rank."""

import dataclasses
import functools
import math
import string
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import zeta

from sbeval.errors import UserError
from sbeval.tasks.draws import seeded_order, seeded_random, seeded_ranks
from sbeval.tasks.ruler.drafts import Draft
from sbeval.tasks.ruler.options import FweOptions
from sbeval.tasks.ruler.wording import fwe_wording
from sbeval.tasks.tokens import WORDS, TokenCounter

POOL_WORDS = 4096
NOISE = "..."
ASKED = 3
_TOKENS_PER_VOCABULARY_WORD = 50
_OCCURRENCES = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrequencyDraft(Draft):
    """Coded words in random order; the word of rank k comes floor(units * k^-alpha / zeta(alpha)) times.

    Attributes:
        words: the noise, then the words by falling frequency.
        tokens: tokens of each behind a space, int64.
        shares: k^-alpha / zeta(alpha), float64.
        name: seeds the order.
    """

    words: Sequence[str]
    tokens: NDArray[np.int64]
    shares: NDArray[np.float64]
    name: tuple[object, ...]

    @property
    def after_opening(self) -> str:
        """A word behind a space."""
        return " a"

    @property
    def before_closing(self) -> str:
        """A word."""
        return "a"

    def counts(self, units: int) -> NDArray[np.int64]:
        """Returns how often each word comes, int64."""
        return (units * self.shares).astype(np.int64)

    def body_tokens(self, units: int) -> int:
        """Returns the tokens of all words."""
        return int(self.counts(units) @ self.tokens)

    def units_within(self, tokens: int) -> int:
        """Returns the most units whose words fit."""
        low, high = 0, max(1, 2 * tokens)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.body_tokens(middle) <= tokens else (low, middle)
        return low

    def body(self, units: int) -> str:
        """Returns the words, each behind a space."""
        counts = self.counts(units)
        ranks = np.repeat(np.arange(len(counts)), counts)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        occurrences = ranks * _OCCURRENCES + (np.arange(len(ranks)) - starts)
        order = np.argsort(seeded_ranks(occurrences, *self.name, "order"), kind="stable")
        words = [" " + word for word in self.words]
        return "".join([words[i] for i in ranks[order].tolist()])


class FweGenerator:
    """Makes the samples of frequent-words extraction.

    Args:
        options: what is asked.
        task: its name, part of every seed.
        generated_tokens: tokens kept free for the answer.
        counter: the model's tokenizer.
    """

    def __init__(self, options: FweOptions, *, task: str, generated_tokens: int, counter: TokenCounter) -> None:
        self._alpha = options.alpha
        self._letters = options.coded_wordlen
        self._vocabulary = options.vocab_size
        if 0 < self._vocabulary <= ASKED + 1:
            raise UserError(f"{task} asks for {ASKED} of the coded words, so vocab_size is at least {ASKED + 2}.")
        self._generated_tokens = generated_tokens
        self._name = (task, options.seed)
        self._counter = counter
        self._wording = fwe_wording()

    @functools.cached_property
    def _pool(self) -> tuple[list[str], NDArray[np.int64]]:
        """Coded words, and token counts behind a space of the noise and each of them."""
        rng = seeded_random(*self._name, "coded words", self._letters)
        words: dict[str, None] = {}
        while len(words) < POOL_WORDS:
            words["".join(rng.choices(string.ascii_lowercase, k=self._letters))] = None
        pool = [NOISE, *words]
        return pool, self._counter.count_pool([" " + word for word in pool], WORDS)

    def draft(self, index: int, context_length: int) -> FrequencyDraft:
        """Makes sample `index`; its words and their ranks are the same at every length."""
        pool, tokens = self._pool
        size = self._vocabulary or (context_length - self._generated_tokens) // _TOKENS_PER_VOCABULARY_WORD
        first = np.arange(1, POOL_WORDS + 1) ** -self._alpha / zeta(self._alpha)
        # from here on the words asked for are more frequent than any other
        least_units = math.ceil(1 / float(-np.diff(first[1 : ASKED + 2]).min())) + 1
        size = min(POOL_WORDS, max(size, ASKED + 2, int(np.count_nonzero(least_units * first >= 1))))
        order = np.concatenate(([0], 1 + seeded_order(POOL_WORDS, *self._name, index, "vocabulary")[: size - 1]))
        opening, question = self._wording.template.split("{context}")
        words = [pool[i] for i in order.tolist()]
        return FrequencyDraft(
            references=words[1 : 1 + ASKED],
            answer_prefix=self._wording.answer_prefix,
            opening=[opening.removesuffix(" ")],
            closing=question,
            least_units=least_units,
            words=words,
            tokens=tokens[order],
            shares=first[:size],
            name=(*self._name, index),
        )
