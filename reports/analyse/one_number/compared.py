"""How far more context lowers NLL, of two models on the same texts."""

import dataclasses
from collections.abc import Iterable

from sbeval.reports.analyse.claims import length_claims
from sbeval.reports.analyse.compare_lengths import Measured
from sbeval.reports.analyse.one_number.effective import EffectiveNllLength, effective_nll_length
from sbeval.reports.analyse.statistics import CONFIDENCE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComparedEffective:
    """How far more context lowers NLL for both models; the two intervals hold at once.

    Attributes:
        corpus: name of the text.
        reference: the reference's effective length.
        candidate: the candidate's; only a step that loses more than the least effect ends it.
    """

    corpus: str
    reference: EffectiveNllLength
    candidate: EffectiveNllLength

    @property
    def worse(self) -> bool:
        """Whether the candidate's effective length is certainly shorter."""
        return (self.candidate.high or 0) < (self.reference.low or 0)


def compare_effective(
    first: Iterable[Measured], second: Iterable[Measured], *, least_effect: float, confidence: float = CONFIDENCE
) -> list[ComparedEffective]:
    """Compares effective lengths on texts with identical targets that both models were scored on."""
    known = {one.corpus_sha256 or one.corpus: one for one in first if one.protocol == "fixed_target"}
    found = []
    for other in second:
        own = known.get(other.corpus_sha256 or other.corpus) if other.protocol == "fixed_target" else None
        if own is None:
            continue
        each = 1 - (1 - confidence) / 2
        # steps need no training length, and without one there is no second band to compute
        claims = [length_claims(one.sums, None, confidence=each) for one in (own, other)]
        reference, candidate = (
            effective_nll_length(claim, least_loss=least)
            for claim, least in zip(claims, (0.0, least_effect), strict=True)
        )
        if reference is not None and candidate is not None and claims[0].lengths == claims[1].lengths:
            found.append(ComparedEffective(corpus=own.corpus, reference=reference, candidate=candidate))
    return found
