"""Common-words extraction: a numbered list in which ten words come more often than the others."""

import dataclasses
import functools
import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sbeval.tasks.draws import seeded_order, seeded_random, seeded_ranks, word_lists
from sbeval.tasks.ruler.drafts import Draft
from sbeval.tasks.ruler.options import CweOptions
from sbeval.tasks.ruler.wording import cwe_wording
from sbeval.tasks.tokens import LINE_START, WORDS, TokenCounter

log = logging.getLogger(__name__)

SHORT_BELOW = 4096
EXTRA_WORDS = 16384
_LONG_FORM_MARGIN = 1.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordListDraft(Draft):
    """A numbered list of words in random order; a unit is one uncommon word with all its repetitions.

    Attributes:
        pool: all words.
        order: common words, then uncommon ones, in the order they come in, int64.
        word_tokens: tokens of all repetitions of the common words and the first n uncommon ones, int64, from n = 0.
        number_tokens: tokens of the first n numbers, int64, from n = 0.
        common_repeats: occurrences of each common word.
        uncommon_repeats: occurrences of each uncommon word.
        common: number of common words.
        name: seeds the order.
    """

    pool: Sequence[str]
    order: NDArray[np.int64]
    word_tokens: NDArray[np.int64]
    number_tokens: NDArray[np.int64]
    common_repeats: int
    uncommon_repeats: int
    common: int
    name: tuple[object, ...]

    @property
    def after_opening(self) -> str:
        """The first number."""
        return "1"

    @property
    def before_closing(self) -> str:
        """A word."""
        return "a"

    def _entries(self, units: int) -> int:
        return self.common * self.common_repeats + units * self.uncommon_repeats

    def body_tokens(self, units: int) -> int:
        """Returns the tokens of words and numbers."""
        return int(self.word_tokens[units] + self.number_tokens[self._entries(units)])

    def units_within(self, tokens: int) -> int:
        """Returns how many uncommon words fit."""
        units = len(self.word_tokens) - 1
        entries = self.common * self.common_repeats + np.arange(units + 1) * self.uncommon_repeats
        return max(0, int(np.searchsorted(self.word_tokens + self.number_tokens[entries], tokens, side="right")) - 1)

    def body(self, units: int) -> str:
        """Returns the list."""
        return number_words(self._shuffled(units))

    def _shuffled(self, units: int) -> list[str]:
        common = np.repeat(np.arange(self.common), self.common_repeats)
        uncommon = self.common + np.repeat(np.arange(units), self.uncommon_repeats)
        occurrences = np.arange(self._entries(units))
        shuffled = np.argsort(seeded_ranks(occurrences, *self.name, "order"), kind="stable")
        pool = self.pool
        return [pool[i] for i in self.order[np.concatenate((common, uncommon))[shuffled]].tolist()]


def number_words(words: Sequence[str]) -> str:
    """Returns "1. first 2. second ..."."""
    return " ".join([f"{i}. {word}" for i, word in enumerate(words, start=1)])


class CweGenerator:
    """Makes the samples of common-words extraction.

    Below 4,096 tokens RULER uses a shorter example and fewer repetitions; so does this where the long form has no room,
    for which RULER has no rule. If a prompt needs more words than wonderwords has, pairs of an adjective and a noun
    follow.

    Args:
        options: what is asked.
        task: its name, part of every seed.
        generated_tokens: tokens kept free for the answer.
        counter: the model's tokenizer.
    """

    def __init__(self, options: CweOptions, *, task: str, generated_tokens: int, counter: TokenCounter) -> None:
        self._repeats = (options.freq_cw, options.freq_ucw)
        self._common = options.num_cw
        self._shots = options.num_fewshot
        self._generated_tokens = generated_tokens
        self._short_at: dict[int, bool] = {}
        self._name = (task, options.seed)
        self._counter = counter
        self._wording = cwe_wording()

    @functools.cached_property
    def _pool(self) -> tuple[list[str], int, NDArray[np.int64]]:
        """All words, how many of them are wonderwords' own, and their token counts behind a number."""
        own = sorted({word for words in word_lists() for word in words})
        nouns, adjectives, _ = word_lists()
        rng = seeded_random(*self._name, "extra words")
        extra = sorted({f"{rng.choice(adjectives)}-{rng.choice(nouns)}" for _ in range(EXTRA_WORDS)} - set(own))
        words = own + extra
        return words, len(own), self._counter.count_pool([" " + word for word in words], ("1.", " 1"))

    @functools.cached_property
    def _number_tokens(self) -> NDArray[np.int64]:
        most = self._common * self._repeats[0] + len(self._pool[0]) * max(self._repeats[1], 1)
        tokens = self._counter.count_pool([f" {i}." for i in range(1, most + 1)], WORDS)
        tokens[:1] = self._counter.count_pieces(["1."], LINE_START)
        return np.concatenate(([0], np.cumsum(tokens)))

    def draft(self, index: int, context_length: int) -> WordListDraft:
        """Makes sample `index`; its words are the same at every length, their repetitions RULER's for the length."""
        return self._make(index, context_length, short=self._is_short(context_length))

    def _is_short(self, context_length: int) -> bool:
        """Whether a length gets the short form: below 4,096 tokens, or where RULER's long form has no room."""
        if context_length not in self._short_at:
            self._short_at[context_length] = context_length < SHORT_BELOW
            if not self._short_at[context_length]:
                long = self._make(0, context_length, short=False)
                text = "".join([*long.opening, long.body(1), long.closing, long.answer_prefix])
                needed = round(_LONG_FORM_MARGIN * int(self._counter.count([text])[0])) + self._generated_tokens
                if needed > context_length:
                    log.warning(
                        "%s takes its short form at %d tokens: the long one needs about %d with this tokenizer",
                        self._name[0],
                        context_length,
                        needed,
                    )
                    self._short_at[context_length] = True
        return self._short_at[context_length]

    def _make(self, index: int, context_length: int, *, short: bool) -> WordListDraft:
        common_repeats, uncommon_repeats = (6, 1) if short else self._repeats
        words, own, pool_tokens = self._pool
        extra = own + seeded_order(len(words) - own, *self._name, index, "extra words")
        order = np.concatenate((seeded_order(own, *self._name, index, "words"), extra))
        # a word with its number has at least two tokens, so no more words than this can fit
        order = order[: self._common + context_length // (2 * uncommon_repeats) + 1]
        tokens = pool_tokens[order]
        common_tokens = int(tokens[: self._common].sum()) * common_repeats
        template, question = self._counted(self._wording.template).split("{context}")
        return WordListDraft(
            references=[words[i] for i in order[: self._common].tolist()],
            answer_prefix=self._counted(self._wording.answer_prefix),
            opening=[*self._examples(index, short, template, question), template],
            closing=question,
            least_units=1,
            most_units=len(order) - self._common,
            pool=words,
            order=order,
            word_tokens=common_tokens + uncommon_repeats * np.concatenate(([0], np.cumsum(tokens[self._common :]))),
            number_tokens=self._number_tokens,
            common_repeats=common_repeats,
            uncommon_repeats=uncommon_repeats,
            common=self._common,
            name=(*self._name, index),
        )

    def _counted(self, text: str) -> str:
        """Returns the wording with the number of words asked for; RULER's says 10."""
        return text.replace("10", str(self._common))

    def _examples(self, index: int, short: bool, template: str, question: str) -> list[str]:
        """Returns the worked examples: 20 words repeated 3 and 1 times where short, else 40 words 10 and 3 times."""
        count, common_repeats, uncommon_repeats = (20, 3, 1) if short else (40, 10, 3)
        words, own, _ = self._pool
        examples = []
        for shot in range(self._shots):
            rng = seeded_random(*self._name, index, "example", shot, short)
            picked = [words[i] for i in rng.sample(range(own), max(count, self._common + 1))]
            common, uncommon = picked[: self._common], picked[self._common :]
            listed = common * common_repeats + uncommon * uncommon_repeats
            rng.shuffle(listed)
            answer = f"{self._counted(self._wording.answer_prefix)} {number_words(common)}"
            examples.append(f"{template}{number_words(listed)}{question} {answer}\n")
        return examples
