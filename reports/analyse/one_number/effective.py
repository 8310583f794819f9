"""The effective length of perplexity: how far more context lowers NLL, with what the band over the steps leaves open.

The length named is that of the summary, `LengthClaims.lowers_to_tokens`. The true one is the last length whose own step
lowers NLL before any step raises it. The band holds all true steps at once in 95 % of cases, and then the true length
lies between two ends: a step that the band does not decide may be a loss, which gives the shortest, or a gain, which
gives the longest.
"""

import dataclasses

from sbeval.reports.analyse.claims import LengthClaims
from sbeval.reports.read.fields import length_text


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EffectiveNllLength:
    """How far more context lowers NLL, in tokens; None for no length, where not even the first step is a gain.

    Attributes:
        tokens: the longest length whose own step is measurably a gain, before any measurable loss.
        low: lower end of the 95% interval.
        high: upper end; where it is the longest length evaluated, nothing is known beyond.
    """

    tokens: int | None
    low: int | None
    high: int | None

    @property
    def text(self) -> str:
        """Such as "16K [4K, 64K]"."""
        return f"{_text(self.tokens)} [{_text(self.low)}, {_text(self.high)}]"


def effective_nll_length(claim: LengthClaims, *, least_loss: float = 0.0) -> EffectiveNllLength | None:
    """Returns the effective length with its interval, None where nothing is claimed.

    Args:
        claim: what the lengths show.
        least_loss: nats per token by which a step has to raise NLL for certain to count as a loss.
    """
    if claim.obstacle or not claim.steps:
        return None
    gains = [step.high < 0 for step in claim.steps]
    losses = [step.low > least_loss for step in claim.steps]
    sure = gains.index(False) if False in gains else len(gains)
    open_to = losses.index(True) if True in losses else len(losses)
    return EffectiveNllLength(
        tokens=claim.lowers_to_tokens,
        low=claim.lengths[sure] if sure else None,
        high=claim.lengths[open_to] if open_to else None,
    )


def _text(tokens: int | None) -> str:
    return "none" if tokens is None else length_text(tokens)
