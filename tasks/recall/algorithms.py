"""Sequences of token ids whose ends follow from their beginnings by an algorithm: copy, reverse, sort and others.

They are the synthetic tasks of Vasylenko et al., *Long-Context Generalization with Sparse Attention* (arXiv 2506.16640)
as one causal sequence each: a start token that names the algorithm, a random source, and the target.

- `copy`, `reverse`, `sort`: source, separator, the source in that order, end
- `two_back`: pairs of a random symbol and the symbol two pairs before
- `flipflop`: instructions and bits; the bit after a read is the one written last; the last instruction is a read
- `association`: keys of two symbols with values of two symbols, among spaces; then four keys; then their values, end

Flip-flops follow Liu et al. (arXiv 2306.00946): an instruction writes or reads with a probability of 0.1 each and is
ignored otherwise. In the paper only the last instruction reads.

Shape suffixes: T tokens of a sequence, one more than the model's inputs.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.tasks.draws import seed_of

Algorithm = Literal["copy", "reverse", "sort", "two_back", "flipflop", "association"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
END, SEPARATOR, SPACE, VALUE, QUERY, WRITE, IGNORE, READ = range(8)
FIRST_SYMBOL = 16
SYMBOLS = {"copy": 32, "reverse": 32, "sort": 32, "two_back": 16, "flipflop": 2, "association": 256}
VOCABULARY = FIRST_SYMBOL + max(SYMBOLS.values())
QUERIES = 4
_PARTS = 2  # symbols of a key, and of a value
_SHARE_OF_PAIRS = 0.8
_SHARE_OF_READS = _SHARE_OF_WRITES = 0.1
_TOKENS_OF_QUERIES = 2 * QUERIES * (1 + _PARTS) + 2  # keys, values, separator and end
_TOKENS_OF_A_PAIR = 2 * _PARTS + 2  # key, mark, value, space

Tokens = NDArray[np.int64]


class Solved(NamedTuple):
    """A sequence and the positions of its tokens that follow from earlier ones.

    Attributes:
        tokens_T: int64 [T], the model's inputs and one more token, which is only a target.
        answer_N: int64 [N], positions in `tokens_T` that the algorithm determines, ascending.
        last_tokens: number of tokens at the end that are the answer as a whole: all of them, or a flip-flop's last bit.
    """

    tokens_T: Tokens
    answer_N: Tokens
    last_tokens: int


def start_token(algorithm: Algorithm) -> int:
    """Returns the token with which the sequences of an algorithm begin."""
    return READ + 1 + ALGORITHMS.index(algorithm)


def least_tokens(algorithm: Algorithm) -> int:
    """Returns the smallest T for which a sequence has a target."""
    pairs = -(-QUERIES * _TOKENS_OF_A_PAIR // _SHARE_OF_PAIRS)
    return int(pairs) + 1 + _TOKENS_OF_QUERIES if algorithm == "association" else 7


def solved(algorithm: Algorithm, tokens: int, *name: object) -> Solved:
    """Makes a sequence of exactly `tokens` tokens (T), drawn by a name such as a seed and an index.

    Raises:
        UserError: the sequence would be too short, or T is even, which only `association` allows.
    """
    least = least_tokens(algorithm)
    if tokens < least or (algorithm != "association" and tokens % 2 == 0):
        raise UserError(
            f"The algorithm {algorithm} needs an even context length of at least {least - 1 + (least - 1) % 2} tokens, "
            f"got {tokens - 1}."
        )
    rng = np.random.Generator(np.random.PCG64(seed_of("algorithms", algorithm, tokens, *name)))
    return _MAKERS[algorithm](rng, tokens)


def _after_a_source(algorithm: Algorithm, order: Callable[[Tokens], Tokens]) -> Callable[[Any, int], Solved]:
    def make(rng: np.random.Generator, tokens: int) -> Solved:
        source = FIRST_SYMBOL + rng.integers(SYMBOLS[algorithm], size=(tokens - 3) // 2)
        sequence = _joined(start_token(algorithm), source, SEPARATOR, order(source), END)
        return _with_last(sequence, len(source) + 1)

    return make


def _joined(*parts: int | Tokens) -> Tokens:
    return np.concatenate([np.atleast_1d(np.asarray(part, dtype=np.int64)) for part in parts])


def _with_last(tokens_T: Tokens, last: int) -> Solved:
    return Solved(tokens_T, np.arange(len(tokens_T) - last, len(tokens_T)), last)


def _two_back(rng: np.random.Generator, tokens: int) -> Solved:
    symbols = FIRST_SYMBOL + rng.integers(SYMBOLS["two_back"], size=tokens // 2)
    sequence = np.empty(tokens, dtype=np.int64)
    sequence[0] = start_token("two_back")
    sequence[1::2] = symbols
    sequence[2::2] = np.concatenate([[SPACE, SPACE], symbols[:-2]])
    answers = np.arange(2, tokens, 2)
    return Solved(sequence, answers, len(answers))


def _flipflop(rng: np.random.Generator, tokens: int) -> Solved:
    count = tokens // 2
    drawn = rng.random(count)
    reads, writes = drawn < _SHARE_OF_READS, drawn >= 1 - _SHARE_OF_WRITES
    reads[0], writes[0] = False, True
    reads[-1], writes[-1] = True, False
    bits = rng.integers(2, size=count)
    newest = np.maximum.accumulate(np.where(writes, np.arange(count), 0))
    sequence = np.empty(tokens, dtype=np.int64)
    sequence[0] = start_token("flipflop")
    sequence[1::2] = np.select([reads, writes], [READ, WRITE], IGNORE)
    sequence[2::2] = FIRST_SYMBOL + np.where(reads, bits[newest], bits)
    return Solved(sequence, 2 + 2 * np.flatnonzero(reads), 1)


def _association(rng: np.random.Generator, tokens: int) -> Solved:
    room = tokens - 1 - _TOKENS_OF_QUERIES
    symbols = SYMBOLS["association"]
    pairs = min(int(room * _SHARE_OF_PAIRS) // _TOKENS_OF_A_PAIR, symbols**_PARTS)
    keys, values = (
        FIRST_SYMBOL + np.stack(np.divmod(rng.choice(symbols**_PARTS, size=pairs, replace=False), symbols), axis=1)
        for _ in range(2)
    )
    column = np.ones((pairs, 1), dtype=np.int64)
    pair_rows = np.concatenate([keys, VALUE * column, values, SPACE * column], axis=1)
    source = np.full(room, SPACE, dtype=np.int64)
    # the spaces that are left lie before the pairs, in random numbers
    left = room - pair_rows.size
    before = np.sort(rng.integers(left + 1, size=pairs))
    places = (before + _TOKENS_OF_A_PAIR * np.arange(pairs))[:, None] + np.arange(_TOKENS_OF_A_PAIR)
    source[places] = pair_rows
    asked = rng.choice(pairs, size=QUERIES, replace=False)
    mark = np.full((QUERIES, 1), QUERY, dtype=np.int64)
    questions, answers = (np.concatenate([mark, rows[asked]], axis=1).flatten() for rows in (keys, values))
    sequence = _joined(start_token("association"), source, questions, SEPARATOR, answers, END)
    return _with_last(sequence, len(answers) + 1)


_MAKERS: dict[Algorithm, Callable[[np.random.Generator, int], Solved]] = {
    "copy": _after_a_source("copy", lambda source: source),
    "reverse": _after_a_source("reverse", lambda source: source[::-1]),
    "sort": _after_a_source("sort", np.sort),
    "two_back": _two_back,
    "flipflop": _flipflop,
    "association": _association,
}


def guessed(algorithm: Algorithm, tokens: int) -> float:
    """Returns the probability that random symbols are the whole answer of a sequence with `tokens` tokens (T)."""
    answers = {"two_back": tokens // 2 - 2, "flipflop": 1, "association": QUERIES * _PARTS}
    return float(SYMBOLS[algorithm]) ** -answers.get(algorithm, (tokens - 3) // 2)
