"""Generators of common-words and frequent-words extraction: which words of a text are the most frequent?

Common words: a numbered list in which ten words occur more often than all others. Frequent words: a text of meaningless
words in which the word of rank k occurs in proportion to a power of k (a Zipf distribution).
"""

import dataclasses
import functools
import logging
import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import zeta

from sbeval.errors import UserError
from sbeval.tasks.draws import distinct, seeded_order, seeded_random, seeded_ranks, word_lists
from sbeval.tasks.ruler.drafts import Draft, Generator, ListDraft, Steps
from sbeval.tasks.ruler.haystacks import running_totals
from sbeval.tasks.ruler.options import CweOptions, FweOptions
from sbeval.tasks.ruler.wording import task_wording
from sbeval.tasks.tokens import LINE_START, WORDS

log = logging.getLogger(__name__)

SHORT_BELOW = 4096
EXTRA_WORDS = 16384
_LONG_FORM_MARGIN = 1.05
POOL_WORDS = 4096
NOISE = "..."
ASKED = 3
_TOKENS_PER_VOCABULARY_WORD = 50
_OCCURRENCES = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordListDraft(ListDraft):
    """A sample with a numbered list of words in random order; a unit is one uncommon word with all its repetitions.

    Attributes:
        pool: all words.
        order: indices into the pool, int64: the common words, then the uncommon ones in the order in which they are
            added to the prompt.
        common_repeats: occurrences of each common word.
        uncommon_repeats: occurrences of each uncommon word.
        common: number of common words.
    """

    pool: Sequence[str]
    order: NDArray[np.int64]
    common_repeats: int
    uncommon_repeats: int
    common: int

    def body_ends(self) -> tuple[str, str]:
        """Returns short texts that stand for the start (the first number) and the end (a word) of the list."""
        return "1", "a"

    def body(self, units: int) -> str:
        """Returns the numbered list."""
        common = np.repeat(np.arange(self.common), self.common_repeats)
        uncommon = self.common + np.repeat(np.arange(units), self.uncommon_repeats)
        words = self.order[np.concatenate((common, uncommon))]
        shuffled = np.argsort(seeded_ranks(np.arange(len(words)), *self.name, "order"), kind="stable")
        return number_words([self.pool[i] for i in words[shuffled].tolist()])


def number_words(words: Sequence[str]) -> str:
    """Returns the words as one numbered text: "1. first 2. second ..."."""
    return " ".join([f"{i}. {word}" for i, word in enumerate(words, start=1)])


class CweGenerator(Generator):
    """Makes the samples of common-words extraction.

    Below 4,096 tokens RULER uses a short form, with a shorter example and fewer repetitions. This generator also uses
    the short form if the long form does not fit the context length, a case for which RULER has no rule. If a prompt
    needs more words than wonderwords has, pairs of an adjective and a noun are added.
    """

    options: CweOptions

    def __init__(self, options: CweOptions, **setting: Any) -> None:
        super().__init__(options, **setting)
        self._short_at: dict[int, bool] = {}

    def steps(self, length: int) -> Steps:
        """Returns NVIDIA's rule for filling prompts, which removes ten words at a time."""
        return Steps(10)

    @functools.cached_property
    def _pool(self) -> tuple[list[str], int, NDArray[np.int64]]:
        """All words, how many of them (the first ones) are wonderwords' words, and the words' token counts.

        A word is counted as it is tokenised after a number.
        """
        simple = sorted({word for words in word_lists() for word in words})
        nouns, adjectives, _ = word_lists()
        rng = seeded_random(*self._name, "extra words")
        extra = sorted({f"{rng.choice(adjectives)}-{rng.choice(nouns)}" for _ in range(EXTRA_WORDS)} - set(simple))
        words = simple + extra
        return words, len(simple), self.counter.count_pool([" " + word for word in words], ("1.", " 1"))

    @functools.cached_property
    def _number_tokens(self) -> NDArray[np.int64]:
        most = self.options.num_cw * self.options.freq_cw + len(self._pool[0]) * self.options.freq_ucw
        tokens = self.counter.count_pool([f" {i}." for i in range(1, most + 1)], WORDS)
        tokens[:1] = self.counter.count_segments(["1."], LINE_START)
        return running_totals(tokens)

    def draft(self, index: int, context_length: int) -> WordListDraft:
        """Makes sample `index`; its words are the same at every length, their number of repetitions may differ."""
        return self._make(index, context_length, short=self._is_short(context_length))

    def _is_short(self, context_length: int) -> bool:
        """Whether the short form is used: below 4,096 tokens, or if the long form does not fit the context length."""
        if context_length not in self._short_at:
            self._short_at[context_length] = context_length < SHORT_BELOW
            if not self._short_at[context_length]:
                long = self._make(0, context_length, short=False)
                text = "".join([*long.opening, long.body(1), long.closing, long.answer_prefix])
                needed = round(_LONG_FORM_MARGIN * int(self.counter.count([text])[0])) + self.generated_tokens
                if needed > context_length:
                    message = "%s uses its short form at %d tokens: the long form needs about %d with this tokenizer"
                    log.warning(message, self._name[0], context_length, needed)
                    self._short_at[context_length] = True
        return self._short_at[context_length]

    def _make(self, index: int, context_length: int, *, short: bool) -> WordListDraft:
        common_repeats, uncommon_repeats = (6, 1) if short else (self.options.freq_cw, self.options.freq_ucw)
        common = self.options.num_cw
        words, simple, pool_tokens = self._pool
        extra = simple + seeded_order(len(words) - simple, *self._name, index, "extra words")
        order = np.concatenate((seeded_order(simple, *self._name, index, "words"), extra))
        # a word with its number has at least two tokens, which bounds the number of words that fit
        order = order[: common + context_length // (2 * uncommon_repeats) + 1]
        tokens = pool_tokens[order]
        entries = common * common_repeats + uncommon_repeats * np.arange(len(order) - common + 1)
        word_tokens = common_repeats * int(tokens[:common].sum()) + uncommon_repeats * running_totals(tokens[common:])
        # RULER's wording speaks of 10 common words
        opening, question, prefix = (text.replace("10", str(common)) for text in task_wording("cwe"))
        return WordListDraft(
            references=[words[i] for i in order[:common].tolist()],
            answer_prefix=prefix,
            opening=[*self._examples(index, short, opening, f"{question} {prefix}"), opening],
            closing=question,
            least_units=1,
            most_units=len(order) - common,
            pool=words,
            order=order,
            totals=word_tokens + self._number_tokens[entries],
            common_repeats=common_repeats,
            uncommon_repeats=uncommon_repeats,
            common=common,
            name=(*self._name, index),
        )

    def _examples(self, index: int, short: bool, opening: str, question: str) -> list[str]:
        """Returns the worked examples.

        In the short form an example has 20 words: common ones occur 3 times, uncommon ones once. In the long form it
        has 40 words, which occur 10 and 3 times.
        """
        count, common_repeats, uncommon_repeats = (20, 3, 1) if short else (40, 10, 3)
        words, simple, _ = self._pool
        examples = []
        for shot in range(self.options.num_fewshot):
            rng = seeded_random(*self._name, index, "example", shot, short)
            picked = [words[i] for i in rng.sample(range(simple), max(count, self.options.num_cw + 1))]
            common = picked[: self.options.num_cw]
            uncommon = picked[self.options.num_cw :]
            listed = common * common_repeats + uncommon * uncommon_repeats
            rng.shuffle(listed)
            examples.append(f"{opening}{number_words(listed)}{question} {number_words(common)}\n")
        return examples


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrequencyDraft(Draft):
    """A sample of coded words in random order; the word of rank k occurs floor(units * k^-alpha / zeta(alpha)) times.

    Attributes:
        words: the noise (rank 1), then the words by falling frequency.
        tokens: token count of each word when it follows a space, int64.
        shares: k^-alpha / zeta(alpha) for every rank k, float64.
        name: the seed of the order.
    """

    words: Sequence[str]
    tokens: NDArray[np.int64]
    shares: NDArray[np.float64]
    name: tuple[object, ...]

    def body_ends(self) -> tuple[str, str]:
        """Returns short texts that stand for the start (a space and a word) and the end (a word) of the text."""
        return " a", "a"

    def counts(self, units: int) -> NDArray[np.int64]:
        """Returns the number of occurrences of each word, int64 [words]."""
        return (units * self.shares).astype(np.int64)

    def body_tokens(self, units: int) -> int:
        """Returns the token count of all words."""
        return int(self.counts(units) @ self.tokens)

    def units_within(self, tokens: int) -> int:
        """Returns the largest number of units whose words fit."""
        low, high = 0, max(1, 2 * tokens)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.body_tokens(middle) <= tokens else (low, middle)
        return low

    def body(self, units: int) -> str:
        """Returns all occurrences of the words in random order, each after a space."""
        counts = self.counts(units)
        ranks = np.repeat(np.arange(len(counts)), counts)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        occurrences = ranks * _OCCURRENCES + (np.arange(len(ranks)) - starts)
        order = np.argsort(seeded_ranks(occurrences, *self.name, "order"), kind="stable")
        words = [" " + word for word in self.words]
        return "".join([words[i] for i in ranks[order].tolist()])


class FweGenerator(Generator):
    """Makes the samples of frequent-words extraction.

    Raises:
        UserError: the vocabulary is too small for the words that the question asks for.
    """

    options: FweOptions

    def __init__(self, options: FweOptions, *, task: str, **setting: Any) -> None:
        super().__init__(options, task=task, **setting)
        if 0 < options.vocab_size <= ASKED + 1:
            raise UserError(f"{task} asks for {ASKED} coded words, so vocab_size has to be at least {ASKED + 2}.")

    def steps(self, length: int) -> Steps:
        """Returns NVIDIA's rule for filling prompts of at most B tokens.

        A step has B / 32 words, and the first sample has B / `coded_wordlen` words plus or minus whole steps.
        """
        budget = length - self.generated_tokens
        return Steps(max(1, budget // 32), origin=budget // self.options.coded_wordlen)

    @functools.cached_property
    def _pool(self) -> tuple[list[str], NDArray[np.int64]]:
        """The noise word and all coded words, and the token counts that they have after a space."""
        letters = self.options.coded_wordlen
        rng = seeded_random(*self._name, "coded words", letters)
        pool = [NOISE, *distinct(POOL_WORDS, lambda: "".join(rng.choices(string.ascii_lowercase, k=letters)))]
        return pool, self.counter.count_pool([" " + word for word in pool], WORDS)

    def draft(self, index: int, context_length: int) -> FrequencyDraft:
        """Makes sample `index`; its words and their ranks are the same at every context length."""
        pool, tokens = self._pool
        size = self.options.vocab_size or (context_length - self.generated_tokens) // _TOKENS_PER_VOCABULARY_WORD
        first = np.arange(1, POOL_WORDS + 1) ** -self.options.alpha / zeta(self.options.alpha)
        # with at least this many units, the words that the question asks for are more frequent than all others
        least_units = math.ceil(1 / float(-np.diff(first[1 : ASKED + 2]).min())) + 1
        size = min(POOL_WORDS, max(size, ASKED + 2, int(np.count_nonzero(least_units * first >= 1))))
        order = np.concatenate(([0], 1 + seeded_order(POOL_WORDS, *self._name, index, "vocabulary")[: size - 1]))
        wording = task_wording("fwe")
        words = [pool[i] for i in order.tolist()]
        return FrequencyDraft(
            references=words[1 : 1 + ASKED],
            answer_prefix=wording.answer_prefix,
            opening=[wording.opening.removesuffix(" ")],
            closing=wording.closing,
            least_units=least_units,
            words=words,
            tokens=tokens[order],
            shares=first[:size],
            name=(*self._name, index),
        )
