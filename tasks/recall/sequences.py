"""Multi-query repeated associative recall (MQRAR) at the level of tokens: its definition, and the task's sequences.

A sequence is key, value, key, value, ... Every key is first given a value; from then on keys come back at random, each
followed by a new value. At a key that comes back the target is the value it had *before* the one that follows it, so
targets are not the next tokens: a sequence names its (position, target) pairs. After section 5.1 of Tan et al.,
*Scaling Stick-Breaking Attention* (arXiv 2410.17980), which extends the MQAR of Arora et al., *Zoology* (arXiv
2312.04927); the split of the vocabulary into keys and values is Zoology's, as is its size, which the former leaves
unstated. Asking for the value n assignments ago follows Yang et al., *PaTH Attention* (arXiv 2505.16381).

Shape suffixes: L sequence length, T targets.
"""

import dataclasses

import numpy as np

from sbeval.errors import UserError
from sbeval.scoring.requests import TargetSequence
from sbeval.tasks.draws import seed_of

LENGTH_TOKENS = 768
PAIRS = (32, 64, 96, 128, 160, 192)
VOCABULARY = 8192


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mqrar:
    """One setting of the task: `length_tokens` is even; `n_back` 1 asks for a key's last value, 2 for the one before.

    The lower half of the vocabulary are keys (0 is left out), the upper half values.
    """

    length_tokens: int = LENGTH_TOKENS
    pairs: int = PAIRS[0]
    vocabulary: int = VOCABULARY
    n_back: int = 1

    def __post_init__(self) -> None:
        """Refuses settings in which nothing could be asked."""
        if self.length_tokens % 2 or self.pairs < 1 or self.n_back < 1:
            raise UserError(
                "Expected an even length and at least one pair and one step back, found "
                f"length_tokens={self.length_tokens}, pairs={self.pairs}, n_back={self.n_back}."
            )
        if self.length_tokens < 2 * (self.pairs * self.n_back + 1):
            raise UserError(
                f"{self.pairs} pairs asked for {self.n_back} back need at least {2 * (self.pairs * self.n_back + 1)} "
                f"tokens, found length_tokens={self.length_tokens}; use fewer pairs or a longer sequence."
            )
        if self.vocabulary // 2 <= max(self.pairs, 2):
            raise UserError(
                f"{self.pairs} keys need a vocabulary of more than {2 * max(self.pairs, 2)}, found {self.vocabulary}."
            )

    @property
    def chance(self) -> float:
        """Accuracy of a guess among all values."""
        return 1 / (self.vocabulary - self.vocabulary // 2)

    def sequence(self, seed: int, index: int) -> TargetSequence:
        """Makes sequence `index`, which depends on the setting, seed and index alone.

        The keys come once each `n_back` times in random order before any is asked for, so that every later key has an
        answer.
        """
        rng = np.random.Generator(np.random.PCG64(seed_of("mqrar", *dataclasses.astuple(self), seed, index)))
        slots = self.length_tokens // 2
        half = self.vocabulary // 2
        names = 1 + rng.permutation(half - 1)[: self.pairs]
        first = np.concatenate([rng.permutation(self.pairs) for _ in range(self.n_back)])
        keys = np.concatenate([first, rng.integers(self.pairs, size=slots - len(first))])
        values = rng.integers(half, self.vocabulary, size=slots)
        positions, targets = [], []
        history: list[list[int]] = [[] for _ in range(self.pairs)]
        for slot, key in enumerate(keys.tolist()):
            past = history[key]
            if past and values[slot] == past[-1]:
                values[slot] = half + (int(values[slot]) - half + 1) % (self.vocabulary - half)
            if slot >= len(first):
                positions.append(2 * slot)
                targets.append(past[-self.n_back])
            past.append(int(values[slot]))
        inputs = np.empty(self.length_tokens, dtype=np.int64)
        inputs[0::2] = names[keys]
        inputs[1::2] = values
        return TargetSequence(inputs, np.array(positions, dtype=np.int64), np.array(targets, dtype=np.int64))


def with_other_values(setting: Mqrar, sequence: TargetSequence, seed: int, index: int) -> TargetSequence:
    """Returns a sequence with the same keys, questions and targets in which every value is another one.

    What a target's log-probability loses between the two is what having its value in the sequence was worth.
    """
    half = setting.vocabulary // 2
    values = setting.vocabulary - half
    rng = np.random.Generator(np.random.PCG64(seed_of("mqrar other values", seed, index)))
    inputs = sequence.inputs_L.copy()
    inputs[1::2] = half + (inputs[1::2] - half + rng.integers(1, values)) % values
    return sequence._replace(inputs_L=inputs)
