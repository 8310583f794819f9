"""Copying from a distance: a repeated passage, marked words, and phrases that are repeated after known distances.

All texts consist of words that are drawn uniformly from one list, so only the text itself can predict a word. No word's
tokens are a prefix of another word's tokens, so a model that knows only the list gives each of its n words a
probability of 1/n, and its most probable word is right in one of n cases. Selective copying follows Gu and Dao, *Mamba*
(arXiv 2312.00752), but words to be copied are marked by text before and after them instead of special tokens.
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
from sbeval.tasks.recall.task import Condition, ProbeSequence, Scored, TokenizedRecallTask, WithRetrievalGain
from sbeval.tasks.tokens import TokenCounter

_MARK = "\nmarked:"
_END_OF_MARK = "\n"
_QUESTION = "\nall that was marked:"

Tokens = NDArray[np.int64]


class Copied(NamedTuple):
    """A word that occurs twice in a text.

    Attributes:
        word: its index in the list of words.
        source: position of its first occurrence, in tokens.
        target: position of its second occurrence, in tokens.
        is_scored: whether the second occurrence is scored.
    """

    word: int
    source: int
    target: int
    is_scored: bool


class WordList:
    """A list of words with the tokens of each word when it follows a space.

    Raises:
        UserError: the tokenizer gives no two words with equally many tokens.
    """

    def __init__(self, counter: TokenCounter, task: str) -> None:
        self._counter = counter
        words = sorted({tuple(self.inside(f" {noun}")) for noun in short_nouns()} - {()})
        words = [word for word, after in zip(words, [*words[1:], ()], strict=True) if after[: len(word)] != word]
        words_by_length = Counter(map(len, words))
        self.tokens: list[Tokens] = [np.array(word, dtype=np.int64) for word in words if words_by_length[len(word)] > 1]
        if len(self.tokens) < 2:
            raise UserError(
                f"{task} needs two words with equally many tokens, and this tokenizer gives none: use a tokenizer for "
                "English text."
            )
        self.counts = np.array([len(word) for word in self.tokens])
        self._starts = np.cumsum(self.counts) - self.counts
        self._flat = np.concatenate(self.tokens)

    def inside(self, text: str) -> list[int]:
        """Returns the tokens that `text` has when it follows a word; empty if it changes the tokens of that word."""
        alone, together = self._counter.encode(["a", "a" + text], special_tokens=False)
        return list(together[len(alone) :]) if together[: len(alone)] == alone else []

    def draw(self, count: int, *name: object) -> NDArray[np.int64]:
        """Draws indices of words with replacement, seeded by a name, int64 [count]."""
        return (np.random.PCG64(seed_of(*name)).random_raw(count) % np.uint64(len(self.tokens))).astype(np.int64)

    def text(self, tokens: int, *name: object) -> Tokens:
        """Returns `tokens` tokens of random words, seeded by a name; shorter texts are beginnings of longer ones."""
        words = self.draw(tokens, *name)
        words = words[: 1 + int(np.searchsorted(np.cumsum(self.counts[words]), tokens))]
        counts = self.counts[words]
        ends = np.cumsum(counts)
        places = np.repeat(self._starts[words] - (ends - counts), counts) + np.arange(ends[-1])
        text: Tokens = self._flat[places[:tokens]]
        return text

    def other(self, word: int, *name: object) -> int:
        """Draws another word with the same number of tokens."""
        same_length = np.flatnonzero((self.counts == self.counts[word]) & (np.arange(len(self.counts)) != word))
        return int(same_length[int(self.draw(1, *name)[0]) % len(same_length)])


class CopyTask(WithRetrievalGain, TokenizedRecallTask):
    """A text of random words in which some words return; their second occurrences are the answers.

    A sequence has exactly as many input tokens as its context length. Its last target, the last token of the last
    answer, is predicted from all of them.
    """

    def use_tokenizer(self, name: str) -> None:
        """Tokenises the words, and finds the special tokens that the tokenizer puts before a text."""
        self.words = WordList(self.counter, name)
        (self.prefix,) = self.counter.encode([""], special_tokens=True)
        self.first_place = max(1, len(self.prefix))

    @abstractmethod
    def copied(self, length: int, *name: object) -> list[Copied]:
        """Draws the words that occur twice, seeded by a name, and their positions in a text of `length` + 1 tokens.

        The result is sorted by the second occurrence. The last token of the text is only a target, never an input.
        """

    def fixed_text(self, copied: Sequence[Copied]) -> list[tuple[int, list[int]]]:
        """Returns parts of the text that are not random words (marks, question), as pairs of position and tokens."""
        return []

    def make_sequences(self, index: int, condition: Condition) -> list[ProbeSequence]:
        """Makes two sequences: the text, and the text with other words at the first occurrences of scored words."""
        name = (self.config.task, self.options.seed, index)
        length = condition.context_length
        copied = self.copied(length, *name)
        original = self.words.text(length + 1, *name, "text")
        original[: len(self.prefix)] = self.prefix
        for place, tokens in self.fixed_text(copied):
            original[place : place + len(tokens)] = tokens
        for copy in copied:
            for place in (copy.source, copy.target):
                self._put(original, copy.word, place)
        replaced = original.copy()
        answers = [copy for copy in copied if copy.is_scored]
        for number, copy in enumerate(answers):
            self._put(replaced, self.words.other(copy.word, *name, number), copy.source)
        counts = self.words.counts[[copy.word for copy in answers]]
        places = np.concatenate([copy.target + np.arange(n) for copy, n in zip(answers, counts, strict=True)])
        return [
            ProbeSequence(TargetSequence(text[:-1], places - 1, original[places]), counts)
            for text in (original, replaced)
        ]

    def _put(self, text: Tokens, word: int, place: int) -> None:
        text[place : place + self.words.counts[word]] = self.words.tokens[word]

    def chance(self, condition: Condition) -> float:
        """Returns the exact match of a random guess among all words."""
        return 1.0 / len(self.words.tokens)

    def no_room(self, length: int) -> UserError:
        """Returns the error for a context length that is too short for the words and their repetitions."""
        return UserError(
            f"{self.config.task} does not fit its words and their repetitions into a context of {length} tokens: use a "
            "longer context length or fewer words."
        )

    def in_a_row(self, words: NDArray[np.int64], source: int, target: int, *, cue: int) -> list[Copied]:
        """Returns consecutive words whose first occurrences start at `source` and whose repetitions start at `target`.

        The first `cue` words are not scored: from them the model can tell which words it has to repeat.
        """
        offsets = np.cumsum(self.words.counts[words]) - self.words.counts[words]
        return [
            Copied(int(word), source + int(offset), target + int(offset), number >= cue)
            for number, (word, offset) in enumerate(zip(words, offsets, strict=True))
        ]


class PassageTask(CopyTask):
    """Copying of a passage that stands at the very beginning and again at the very end."""

    options_class = PassageOptions
    options: PassageOptions

    def copied(self, length: int, *name: object) -> list[Copied]:
        """Places the passage after the first token or after all leading special tokens, and again at the text's end."""
        words = self.words.draw(self.options.passage_words, *name, "passage")
        tokens = int(self.words.counts[words].sum())
        if 2 * tokens > length + 1 - self.first_place:
            raise self.no_room(length)
        return self.in_a_row(words, self.first_place, length + 1 - tokens, cue=CUE_WORDS)


class SelectiveTask(CopyTask):
    """Selective copying: words are marked at random places, and the text ends with all of them in the same order."""

    options_class = SelectiveOptions
    options: SelectiveOptions

    def use_tokenizer(self, name: str) -> None:
        """Tokenises the words, the marks around them, and the question."""
        super().use_tokenizer(name)
        self._mark, self._end_of_mark, self._question = map(self.words.inside, (_MARK, _END_OF_MARK, _QUESTION))

    def copied(self, length: int, *name: object) -> list[Copied]:
        """Divides the text into parts of equal length, and places one marked word at a random position in each part."""
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
        return [Copied(word, source, target, is_scored=True) for word, source, target in places]

    def fixed_text(self, copied: Sequence[Copied]) -> list[tuple[int, list[int]]]:
        """Returns the texts before and after every marked word, and the question, with their positions."""
        marks = [(copy.source - len(self._mark), self._mark) for copy in copied]
        ends = [(copy.source + int(self.words.counts[copy.word]), self._end_of_mark) for copy in copied]
        return [*marks, *ends, (copied[0].target - len(self._question), self._question)]


class PhraseTask(CopyTask):
    """Copying of phrases that return near the end after different distances; metrics are by distance."""

    options_class = PhraseOptions
    options: PhraseOptions

    def distances(self, length: int) -> tuple[int, ...]:
        """Returns the distances, in tokens, between phrases and their repetitions at a context length, ascending."""
        candidates = self.options.distances or tuple(2**power for power in range(length.bit_length()))
        least = 0 if self.options.distances else SHORTEST_DISTANCE
        return tuple(distance for distance in candidates if least <= distance <= length // 2)

    def copied(self, length: int, *name: object) -> list[Copied]:
        """Places phrases from the end of the text backwards, so that no phrase or repetition overlaps another."""
        distances = self.distances(length) * self.options.phrases
        if not distances:
            raise self.no_room(length)
        words = self.words.draw(len(distances) * self.options.phrase_words, *name, "phrases")
        placed: list[Copied] = []
        occupied: list[tuple[int, int]] = []
        target = length + 1
        for distance, phrase in zip(distances, words.reshape(len(distances), -1), strict=True):
            tokens = int(self.words.counts[phrase].sum())
            target -= tokens
            while any(
                start - tokens < place < stop for start, stop in occupied for place in (target, target - distance)
            ):
                target -= 1
            if target - distance < self.first_place or tokens > distance:
                raise self.no_room(length)
            occupied += [(place, place + tokens) for place in (target, target - distance)]
            placed = [*self.in_a_row(phrase, target - distance, target, cue=CUE_WORDS), *placed]
        return placed

    def score(self, condition: Condition, answers: Sequence[Scored]) -> dict[str, float]:
        """Returns the metrics of one condition, separately for each distance."""
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
        """Returns the keys of the metrics of all lengths and distances, mapped to whether higher is better."""
        return {
            condition.key(f"{metric}_{distance}_tokens"): higher_is_better
            for condition in self.all_conditions
            for distance in self.distances(condition.context_length)
            for metric, higher_is_better in self.metrics().items()
        }
