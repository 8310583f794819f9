"""Copying from a distance: a passage, words marked among others, and phrases by how long ago they were read.

Everything is made of words drawn alike from one list, so nothing but the text tells the next one. No word's tokens are
the beginning of another's: a model that knows no more than the list gives each of its n words a probability of 1/n, and
is right as often. The selective form follows Gu and Dao, *Mamba* (arXiv 2312.00752), with marks in place of other
tokens.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.scoring.requests import TargetSequence
from sbeval.tasks.draws import seed_of, short_nouns
from sbeval.tasks.recall.options import CUE_WORDS, SHORTEST_DISTANCE, PassageOptions, PhraseOptions, SelectiveOptions
from sbeval.tasks.recall.task import Asked, Condition, Scored, TokenizedRecallTask, WithRetrievalGain
from sbeval.tasks.tokens import TokenCounter

_MARK = "\nmarked:"
_END_OF_MARK = "\n"
_QUESTION = "\nall that was marked:"

Tokens = NDArray[np.int64]


class Copied(NamedTuple):
    """A word, by its number in the list, its two places in the text in tokens, and whether its return is scored."""

    word: int
    source: int
    target: int
    asked: bool


class WordList:
    """Words with their tokens behind a space."""

    def __init__(self, counter: TokenCounter, task: str) -> None:
        self._counter = counter
        words = sorted({tuple(self.inside(f" {noun}")) for noun in short_nouns()} - {()})
        words = [word for word, after in zip(words, [*words[1:], ()], strict=True) if after[: len(word)] != word]
        alike = Counter(map(len, words))
        self.tokens: list[Tokens] = [np.array(word, dtype=np.int64) for word in words if alike[len(word)] > 1]
        if len(self.tokens) < 2:
            raise UserError(f"{task} found no two words of as many tokens: give a tokenizer that knows English words.")
        self.counts = np.array([len(word) for word in self.tokens])
        self._starts = np.cumsum(self.counts) - self.counts
        self._flat = np.concatenate(self.tokens)

    def inside(self, text: str) -> list[int]:
        """Returns the tokens of a text behind a word."""
        alone, together = self._counter.encode(["a", "a" + text], special_tokens=False)
        return list(together[len(alone) :]) if together[: len(alone)] == alone else []

    def draw(self, count: int, *name: object) -> NDArray[np.int64]:
        """Draws words with repetition, int64 [count]."""
        return (np.random.PCG64(seed_of(*name)).random_raw(count) % np.uint64(len(self.tokens))).astype(np.int64)

    def text(self, tokens: int, *name: object) -> Tokens:
        """Returns the first `tokens` tokens of words drawn by a name; fewer of them are the beginning of more."""
        words = self.draw(tokens, *name)
        words = words[: 1 + int(np.searchsorted(np.cumsum(self.counts[words]), tokens))]
        counts = self.counts[words]
        ends = np.cumsum(counts)
        places = np.repeat(self._starts[words] - (ends - counts), counts) + np.arange(ends[-1])
        text: Tokens = self._flat[places[:tokens]]
        return text

    def other(self, word: int, *name: object) -> int:
        """Draws another word of as many tokens."""
        alike = np.flatnonzero((self.counts == self.counts[word]) & (np.arange(len(self.counts)) != word))
        return int(alike[int(self.draw(1, *name)[0]) % len(alike)])


class CopyTask(WithRetrievalGain, TokenizedRecallTask):
    """A text of random words in which some come back; each of these is asked for, behind those before it.

    Every sequence has exactly as many tokens as its context length; the last answer's last token is predicted from all
    of them.
    """

    def use_tokenizer(self, name: str) -> None:
        """Finds the words, and what the tokenizer puts before a text."""
        self.words = WordList(self.counter, name)
        (self.prefix,) = self.counter.encode([""], special_tokens=True)
        self.first_place = max(1, len(self.prefix))

    @abstractmethod
    def copied(self, length: int, *name: object) -> list[Copied]:
        """Places words, drawn by a name, in a text of `length` tokens and one more, in the order of their return."""

    def fixed_text(self, copied: Sequence[Copied]) -> list[tuple[int, list[int]]]:
        """Returns what else stands in the text: place and tokens."""
        return []

    def asked(self, index: int, condition: Condition) -> list[Asked]:
        """Makes the text, and the same with other words in place of those that are asked for."""
        name = (self.config.task, self.options.seed, index)
        length = condition.context_length
        copied = self.copied(length, *name)
        shown = self.words.text(length + 1, *name, "text")
        shown[: len(self.prefix)] = self.prefix
        for place, tokens in self.fixed_text(copied):
            shown[place : place + len(tokens)] = tokens
        for copy in copied:
            for place in (copy.source, copy.target):
                self._put(shown, copy.word, place)
        replaced = shown.copy()
        answers = [copy for copy in copied if copy.asked]
        for number, copy in enumerate(answers):
            self._put(replaced, self.words.other(copy.word, *name, number), copy.source)
        counts = self.words.counts[[copy.word for copy in answers]]
        places = np.concatenate([copy.target + np.arange(n) for copy, n in zip(answers, counts, strict=True)])
        return [Asked(TargetSequence(text[:-1], places - 1, shown[places]), counts) for text in (shown, replaced)]

    def _put(self, text: Tokens, word: int, place: int) -> None:
        text[place : place + self.words.counts[word]] = self.words.tokens[word]

    def chance(self, condition: Condition) -> float:
        """Returns the share of one word among all."""
        return 1.0 / len(self.words.tokens)

    def no_room(self, length: int) -> UserError:
        """Returns the error for a length that the words do not fit in."""
        return UserError(
            f"Expected {self.config.task} to have room for its words and their return, found a context of {length} "
            "tokens: give it a longer context length, or ask for fewer words."
        )

    def in_a_row(self, words: NDArray[np.int64], source: int, target: int, *, cue: int) -> list[Copied]:
        """Places words one behind the other; the first `cue` are not asked for."""
        offsets = np.cumsum(self.words.counts[words]) - self.words.counts[words]
        return [
            Copied(int(word), source + int(offset), target + int(offset), number >= cue)
            for number, (word, offset) in enumerate(zip(words, offsets, strict=True))
        ]


class PassageTask(CopyTask):
    """A passage at the very beginning and again at the very end."""

    options_class = PassageOptions
    options: PassageOptions

    def copied(self, length: int, *name: object) -> list[Copied]:
        """Places the passage behind the first token or the tokenizer's prefix, and again up to the last."""
        words = self.words.draw(self.options.passage_words, *name, "passage")
        tokens = int(self.words.counts[words].sum())
        if 2 * tokens > length + 1 - self.first_place:
            raise self.no_room(length)
        return self.in_a_row(words, self.first_place, length + 1 - tokens, cue=CUE_WORDS)


class SelectiveTask(CopyTask):
    """Words marked at random places, all of them asked for at the end in their order."""

    options_class = SelectiveOptions
    options: SelectiveOptions

    def use_tokenizer(self, name: str) -> None:
        """Finds the words, and the tokens around marked ones."""
        super().use_tokenizer(name)
        self._mark, self._end_of_mark, self._question = map(self.words.inside, (_MARK, _END_OF_MARK, _QUESTION))

    def copied(self, length: int, *name: object) -> list[Copied]:
        """Places one word in each of as many parts of the text as there are words."""
        words = self.words.draw(self.options.marked_words, *name, "marked")
        counts = self.words.counts[words]
        target = length + 1 - int(counts.sum())
        stretch = (target - len(self._question) - self.first_place) // len(words)
        room = stretch - counts - len(self._mark) - len(self._end_of_mark)
        if room.min() < 0:
            raise self.no_room(length)
        depths = np.random.PCG64(seed_of(*name, "places")).random_raw(len(words)) % (room + 1).astype(np.uint64)
        sources = self.first_place + stretch * np.arange(len(words)) + depths.astype(np.int64) + len(self._mark)
        targets = target + np.cumsum(counts) - counts
        places = zip(words.tolist(), sources.tolist(), targets.tolist(), strict=True)
        return [Copied(word, source, target, asked=True) for word, source, target in places]

    def fixed_text(self, copied: Sequence[Copied]) -> list[tuple[int, list[int]]]:
        """Returns the marks and the question."""
        marks = [(copy.source - len(self._mark), self._mark) for copy in copied]
        ends = [(copy.source + int(self.words.counts[copy.word]), self._end_of_mark) for copy in copied]
        return [*marks, *ends, (copied[0].target - len(self._question), self._question)]


class PhraseTask(CopyTask):
    """Phrases that come back near the end, each after a number of tokens of its own; metrics by that distance."""

    options_class = PhraseOptions
    options: PhraseOptions

    def distances(self, length: int) -> tuple[int, ...]:
        """Returns the distances at a length, ascending."""
        asked = self.options.distances or tuple(2**power for power in range(length.bit_length()))
        least = 0 if self.options.distances else SHORTEST_DISTANCE
        return tuple(distance for distance in asked if least <= distance <= length // 2)

    def copied(self, length: int, *name: object) -> list[Copied]:
        """Places phrases from the end on, each where neither it nor its return meets another."""
        if not (every := self.distances(length) * self.options.phrases):
            raise self.no_room(length)
        words = self.words.draw(len(every) * self.options.phrase_words, *name, "phrases").reshape(len(every), -1)
        placed: list[Copied] = []
        taken: list[tuple[int, int]] = []
        target = length + 1
        for distance, phrase in zip(every, words, strict=True):
            tokens = int(self.words.counts[phrase].sum())
            target -= tokens
            while any(start - tokens < place < stop for start, stop in taken for place in (target, target - distance)):
                target -= 1
            if target - distance < self.first_place or tokens > distance:
                raise self.no_room(length)
            taken += [(place, place + tokens) for place in (target, target - distance)]
            placed = [*self.in_a_row(phrase, target - distance, target, cue=CUE_WORDS), *placed]
        return placed

    def score(self, condition: Condition, answers: Sequence[Scored]) -> dict[str, float]:
        """Scores the answers of each distance."""
        distances = self.distances(condition.context_length)
        of_answer = np.repeat((distances * self.options.phrases)[::-1], self.options.phrase_words - CUE_WORDS)
        return {
            f"{metric}_{distance}_tokens": value
            for distance in distances
            for metric, value in super(PhraseTask, self)
            .score(condition, [(nll[of_answer == distance], exact[of_answer == distance]) for nll, exact in answers])
            .items()
        }

    def means(self) -> dict[str, bool]:
        """Returns the metrics of every length and distance."""
        return {
            condition.key(f"{metric}_{distance}_tokens"): more
            for condition in self.all_conditions
            for distance in self.distances(condition.context_length)
            for metric, more in self.metrics().items()
        }
