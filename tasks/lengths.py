"""Which context lengths a task scores: those asked for, or the defaults that text and model can take."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import TokenizedCorpus
from sbeval.errors import UserError
from sbeval.results.intervals import MINIMUM_CLUSTERS


class Limit(NamedTuple):
    """A longest context length in tokens, what sets it ("the text has 4,000 tokens"), and what a user can do."""

    tokens: int
    because: str
    remedy: str


Limits = Sequence[Limit]


class SettledLengths(NamedTuple):
    """Context lengths of a run in tokens, ascending; default ones that were left out, and why, None where none were."""

    scored: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    reason: str | None = None


def settle_lengths(
    task: str, asked: Sequence[int] | None, defaults: tuple[int, ...], *, hard: Limits, by_default: Limits = ()
) -> SettledLengths:
    """Refuses lengths that were asked for and do not fit; else takes the default lengths that do.

    No length may exceed a hard limit; default lengths stay within the others too, which may be exceeded on request.
    """
    if asked is not None:
        for limit in hard:
            if asked[-1] > limit.tokens:
                expected = f"{task}: expected room for a context length of {asked[-1]} tokens"
                raise UserError(f"{expected}, found room for {limit.tokens}, since {limit.because}: {limit.remedy}.")
        return SettledLengths(scored=tuple(asked))
    limits = [*hard, *by_default]
    least = min(limits, key=lambda limit: limit.tokens, default=None)
    if least is None or defaults[-1] <= least.tokens:
        return SettledLengths(scored=defaults)
    if defaults[0] > least.tokens:
        raise UserError(
            f"{task}: expected room for the shortest default context length, {defaults[0]} tokens, found room "
            f"for {least.tokens}, since {least.because}: {least.remedy}, or set shorter lengths with "
            "--metadata '{\"context_lengths\": [...]}'."
        )
    scored = tuple(length for length in defaults if length <= least.tokens)
    dropped = tuple(length for length in defaults if length > least.tokens)
    reason = least.because if least in hard else f"{least.because}; context_lengths asks for them all the same"
    return SettledLengths(scored=scored, dropped=dropped, reason=reason)


def text_limit(corpus: TokenizedCorpus, context: str, *, targets: int) -> Limit:
    """Returns how long a context the joined text, or the longest document, can fill beside `targets` more tokens."""
    if context == "stream":
        longest = corpus.total_tokens
        because = f"the whole text has {corpus.total_tokens} tokens"
        remedy = "ask for shorter context_lengths or give a longer text"
    else:
        longest = int(corpus.document_tokens.max(initial=0))
        beside = f", {targets} of them targets" if targets else ""
        because = f"the longest document has {longest} tokens{beside}"
        remedy = 'ask for shorter context_lengths, give longer documents, or set "context": "stream"'
    return Limit(max(longest - targets, 0), because, remedy)


def interval_limits(room: NDArray[np.int64], *, shortest: int) -> list[Limit]:
    """Returns the length for which just enough documents for an interval have room; nothing if below the shortest."""
    enough = int(np.sort(room)[-MINIMUM_CLUSTERS]) if len(room) >= MINIMUM_CLUSTERS else 0
    because = f"fewer than {MINIMUM_CLUSTERS} documents are as long, too few for an interval"
    return [Limit(enough, because, "give more long documents")] if enough >= shortest else []


def model_limits(max_length: int | None, learned_positions: int | None) -> list[Limit]:
    """Returns what the model sets: `max_length` of its arguments, and its learned positions."""
    shorter = "ask for shorter context_lengths"
    limits = [
        (max_length, f"the model was given max_length={max_length}", f"raise max_length in --model_args, or {shorter}"),
        (learned_positions, f"the model has {learned_positions} learned positions", shorter),
    ]
    return [Limit(tokens, because, remedy) for tokens, because, remedy in limits if tokens is not None]
