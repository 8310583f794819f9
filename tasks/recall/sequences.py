"""Multi-query repeated associative recall (MQRAR) as sequences of token ids.

A sequence is key, value, key, value, ... It first assigns a value to every key. From then on keys recur in random
order, each time followed by a new value. When a key recurs, the target at its position is the value that the key had
*before* the new one. Targets are therefore not the next tokens, and a sequence lists its pairs of position and target.

After section 5.1 of Tan et al., *Scaling Stick-Breaking Attention* (arXiv 2410.17980), which extends the MQAR of Arora
et al., *Zoology* (arXiv 2312.04927). The size of the vocabulary and its split into keys and values are Zoology's, since
the former paper does not state them. Asking for the value n assignments ago follows Yang et al., *PaTH Attention*
(arXiv 2505.16381).

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
    """The settings of one kind of sequence.

    The lower half of the vocabulary holds keys (token 0 is not used), the upper half values.

    Attributes:
        length_tokens: length of a sequence; an even number.
        pairs: number of different keys.
        vocabulary: number of token ids.
        n_back: which earlier value of a key is the target: 1 for its latest value, 2 for the value before that.
    """

    length_tokens: int = LENGTH_TOKENS
    pairs: int = PAIRS[0]
    vocabulary: int = VOCABULARY
    n_back: int = 1

    def __post_init__(self) -> None:
        """Checks that a sequence with these settings has targets.

        Raises:
            UserError: it would have none; the message says which setting to change.
        """
        if self.length_tokens % 2 or self.pairs < 1 or self.n_back < 1:
            raise UserError(
                "Expected an even length_tokens, and pairs and n_back of at least 1, found "
                f"length_tokens={self.length_tokens}, pairs={self.pairs}, n_back={self.n_back}."
            )
        if self.length_tokens < 2 * (self.pairs * self.n_back + 1):
            raise UserError(
                f"{self.pairs} pairs with n_back={self.n_back} need at least {2 * (self.pairs * self.n_back + 1)} "
                f"tokens, found length_tokens={self.length_tokens}; use fewer pairs or a longer sequence."
            )
        if self.vocabulary // 2 <= max(self.pairs, 2):
            raise UserError(
                f"{self.pairs} keys need a vocabulary of more than {2 * max(self.pairs, 2)} token ids, found "
                f"{self.vocabulary}."
            )

    @property
    def chance(self) -> float:
        """Accuracy of a random guess among all values."""
        return 1 / (self.vocabulary - self.vocabulary // 2)

    def sequence(self, seed: int, index: int) -> TargetSequence:
        """Makes sequence `index`, which depends only on the setting, the seed and the index.

        All keys first occur `n_back` times, in random order. Every later occurrence of a key has a target.
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
    """Returns a sequence with the same keys, positions and targets, in which every value is replaced by another one.

    A target's log-probability in the original minus that in this sequence measures how much the model took from the
    value's earlier occurrence in the text.
    """
    half = setting.vocabulary // 2
    values = setting.vocabulary - half
    rng = np.random.Generator(np.random.PCG64(seed_of("mqrar other values", seed, index)))
    inputs = sequence.inputs_L.copy()
    inputs[1::2] = half + (inputs[1::2] - half + rng.integers(1, values)) % values
    return sequence._replace(inputs_L=inputs)
