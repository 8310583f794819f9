"""Graded words: which words of a list occur most often?

- basic: one word, 32 times, and all others twice
- easy: three words, 24 times, and all others 4 times
- medium: five words, 16 times, and all others 6 times
- hard: ten words, 12 times, and all others 8 times
"""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.tasks.draws import distinct, seeded_order, seeded_random, short_nouns
from sbeval.tasks.graded.forms import Question, ending, two_by_two
from sbeval.tasks.graded.options import GradedWordsOptions
from sbeval.tasks.graded.texts import short_adjectives
from sbeval.tasks.ruler.drafts import Generator
from sbeval.tasks.ruler.haystacks import running_totals
from sbeval.tasks.ruler.words import WordListDraft
from sbeval.tasks.tokens import LINE_START, WORDS

OPENING = "This is a numbered list of words.\n"
PAIRS = 32768
"""Pairs of an adjective and a noun that continue the list where all nouns are used."""
_WRONG = 3


class GradedWordsGenerator(Generator):
    """Makes the samples of graded words.

    Raises:
        UserError: the frequent words are not more frequent than the others, or there are not so many words.
    """

    options: GradedWordsOptions

    def __init__(self, options: GradedWordsOptions, *, task: str, **setting: Any) -> None:
        super().__init__(options, task=task, **setting)
        if options.frequent_repeats <= options.other_repeats:
            raise UserError(
                f"frequent_repeats is {options.frequent_repeats} and other_repeats {options.other_repeats}: "
                "set a larger frequent_repeats."
            )
        most = len(short_nouns()) + PAIRS - _WRONG
        if options.asked > most:
            raise UserError(f"asked is {options.asked}, and a sample has at most {most} frequent words: lower it.")

    @functools.cached_property
    def _pool(self) -> tuple[list[str], NDArray[np.int64]]:
        """All words, nouns first, and their token counts behind a number."""
        rng = seeded_random(*self._name, "pairs")
        nouns, adjectives = short_nouns(), short_adjectives()
        words = [*nouns, *distinct(PAIRS, lambda: f"{rng.choice(adjectives)}-{rng.choice(nouns)}")]
        return words, self.counter.count_pool([" " + word for word in words], ("1.", " 1"))

    def _number_tokens(self, entries: int) -> NDArray[np.int64]:
        """Returns the token counts of the first n numbers, int64 [at least entries + 1]."""
        return self._numbers_up_to(1 << max(10, entries.bit_length()))

    @functools.lru_cache(maxsize=4)  # noqa: B019 - the cache and the generator live as long as the task
    def _numbers_up_to(self, most: int) -> NDArray[np.int64]:
        tokens = self.counter.count_pool([f" {i}." for i in range(1, most + 1)], WORDS)
        tokens[:1] = self.counter.count_segments(["1."], LINE_START)
        return running_totals(tokens)

    def order(self, index: int, most: int) -> NDArray[np.int64]:
        """Returns the first `most` words of a sample as indices into the pool, the frequent ones first, int64 [most].

        They are the same at every level. The first words are nouns.
        """
        nouns = len(short_nouns())
        pairs = nouns + seeded_order(PAIRS, *self._name, index, "pairs")
        return np.concatenate((seeded_order(nouns, *self._name, index, "nouns"), pairs))[:most]

    def draft(self, index: int, context_length: int) -> WordListDraft:
        """Makes sample `index`; its words are the same at every length and level."""
        options = self.options
        words, pool_tokens = self._pool
        # a word with its number has at least two tokens, which bounds the number of words that fit
        order = self.order(index, options.asked + context_length // (2 * options.other_repeats) + 1)
        tokens = pool_tokens[order]
        others = np.arange(len(order) - options.asked + 1)
        entries = options.asked * options.frequent_repeats + options.other_repeats * others
        frequent_tokens = options.frequent_repeats * int(tokens[: options.asked].sum())
        word_tokens = frequent_tokens + options.other_repeats * running_totals(tokens[options.asked :])
        end = ending(self.question(index), options.form, *self._name, index)
        return WordListDraft(
            references=end.references,
            answer_prefix=end.answer_prefix,
            opening=[OPENING],
            closing=f"\n{end.closing}",
            least_units=_WRONG,
            most_units=len(order) - options.asked,
            pool=words,
            order=order,
            totals=word_tokens + self._number_tokens(int(entries[-1]))[entries],
            common_repeats=options.frequent_repeats,
            uncommon_repeats=options.other_repeats,
            common=options.asked,
            name=(*self._name, index),
        )

    def question(self, index: int) -> Question:
        """Returns the question of a sample; its answer is as many of the first words as the level asks for."""
        asked = self.options.asked
        words, _ = self._pool
        first = [words[i] for i in self.order(index, asked + _WRONG).tolist()]
        right = sorted(first[:asked])
        text, wrong = "Which word occurs most often in the list?", first[asked:]
        if asked > 1:
            text = (
                f"Which {asked} words occur most often in the list? Name them in alphabetical order, with commas "
                "between them."
            )
            places = [(first[0], first[asked]), (first[1], first[asked + 1])]
            wrong = two_by_two(places, lambda pair: ", ".join(sorted([*pair, *first[2:asked]])))
        return Question(
            text=text,
            answers=[", ".join(right)],
            evidence=", ".join(f"{word} {self.options.frequent_repeats}" for word in right),
            first_step="gives each of these words with the number of its occurrences, in the same order",
            wrong=wrong,
        )
