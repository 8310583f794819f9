"""Chooses the context lengths that a task scores: the requested ones, or the defaults that text and model allow."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import TokenizedCorpus
from sbeval.errors import UserError
from sbeval.results.intervals import MINIMUM_CLUSTERS


class Limit(NamedTuple):
    """An upper bound of the context length in tokens, its reason ("the text has 4,000 tokens"), and a remedy."""

    tokens: int
    because: str
    remedy: str


Limits = Sequence[Limit]


class SettledLengths(NamedTuple):
    """The context lengths of a run in tokens, ascending; the dropped default lengths, and the reason for dropping them.

    `reason` is None if no default length was dropped.
    """

    scored: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    reason: str | None = None


def settle_lengths(
    task: str,
    requested: Sequence[int] | None,
    defaults: tuple[int, ...],
    *,
    hard: Limits,
    by_default: Limits = (),
    leave_out: bool = False,
) -> SettledLengths:
    """Returns the requested context lengths or, if the user requested none, the default lengths within all limits.

    Args:
        task: its name, for errors.
        requested: the user's `context_lengths` in tokens, ascending.
        defaults: the task's default lengths in tokens, ascending.
        hard: limits that no length may exceed.
        by_default: limits that only default lengths must respect; a user may request longer ones.
        leave_out: whether requested lengths that exceed a hard limit are left out, unless all do.

    Raises:
        UserError: a requested length exceeds a hard limit, or not even the shortest default length fits.
    """
    if requested is not None:
        tightest = min(hard, key=lambda limit: limit.tokens, default=None)
        if leave_out and tightest is not None and requested[0] <= tightest.tokens < requested[-1]:
            scored = tuple(length for length in requested if length <= tightest.tokens)
            return SettledLengths(scored, tuple(requested[len(scored) :]), tightest.because)
        for limit in hard:
            if requested[-1] > limit.tokens:
                raise UserError(
                    f"{task} cannot use a context length of {requested[-1]} tokens, only up to {limit.tokens}, because "
                    f"{limit.because}: {limit.remedy}."
                )
        return SettledLengths(scored=tuple(requested))
    limits = [*hard, *by_default]
    tightest = min(limits, key=lambda limit: limit.tokens, default=None)
    if tightest is None or defaults[-1] <= tightest.tokens:
        return SettledLengths(scored=defaults)
    if defaults[0] > tightest.tokens:
        raise UserError(
            f"{task} cannot use its shortest default context length, {defaults[0]} tokens, only up to "
            f"{tightest.tokens}, because {tightest.because}: {tightest.remedy}, or set shorter lengths with "
            "--metadata '{\"context_lengths\": [...]}'."
        )
    scored = tuple(length for length in defaults if length <= tightest.tokens)
    dropped = tuple(length for length in defaults if length > tightest.tokens)
    reason = tightest.because
    if tightest not in hard:
        reason += "; list them in context_lengths to score them anyway"
    return SettledLengths(scored=scored, dropped=dropped, reason=reason)


def text_limit(corpus: TokenizedCorpus, context: str, *, targets: int) -> Limit:
    """Returns the longest context for which the text is long enough if `targets` further tokens follow the context.

    With `context` "stream" the text is all documents joined, otherwise it is the longest document.
    """
    if context == "stream":
        longest = corpus.total_tokens
        because = f"the whole text has {corpus.total_tokens} tokens"
        remedy = "set shorter context_lengths or give a longer text"
    else:
        longest = int(corpus.document_tokens.max(initial=0))
        beside = f", {targets} of them targets" if targets else ""
        because = f"the longest document has {longest} tokens{beside}"
        remedy = 'set shorter context_lengths, give longer documents, or set "context": "stream"'
    return Limit(max(longest - targets, 0), because, remedy)


def interval_limits(room: NDArray[np.int64], *, shortest: int) -> list[Limit]:
    """Returns a limit: the longest context length that enough documents can fill to compute a confidence interval.

    `room` holds the longest context that each document can fill, in tokens, int64 [documents]. The list is empty if the
    limit would be below the `shortest` default length.
    """
    enough = int(np.sort(room)[-MINIMUM_CLUSTERS]) if len(room) >= MINIMUM_CLUSTERS else 0
    because = f"fewer than {MINIMUM_CLUSTERS} documents are that long, too few for a confidence interval"
    return [Limit(enough, because, "give more long documents")] if enough >= shortest else []


def model_limits(max_length: int | None, learned_positions: int | None) -> list[Limit]:
    """Returns the limits that the model sets: `max_length` in its arguments, and its learned position embeddings."""
    shorter = "set shorter context_lengths"
    limits = [
        (max_length, f"the model was given max_length={max_length}", f"raise max_length in --model_args, or {shorter}"),
        (learned_positions, f"the model has {learned_positions} learned position embeddings", shorter),
    ]
    return [Limit(tokens, because, remedy) for tokens, because, remedy in limits if tokens is not None]
