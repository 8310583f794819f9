"""What paired differences between context lengths allow to be said about one setting."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sbeval.intervals import MINIMUM_CLUSTERS
from sbeval.reports.samples import DocumentSums
from sbeval.reports.statistics import simultaneous_band


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LengthDifference:
    """NLL at one length minus NLL at the reference length, in nats per token, on the same targets."""

    context_length_tokens: int
    estimate: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LengthClaims:
    """What one setting does with more context, on one corpus under one protocol.

    Attributes:
        lengths: context lengths compared, ascending.
        reference_tokens: the training length, or the longest length below it that was evaluated.
        lowers_to_tokens: longest context beyond the reference whose NLL is below the reference's, with none above it
            before; where there is none, the longest whose NLL is below that of every shorter one; None where none is.
        raises_from_tokens: shortest context beyond the reference with a higher NLL than there; None where none.
        differences: against the reference, one for each other length; the band is simultaneous over them, NaN where
            there are too few documents.
        clusters: documents compared.
        obstacle: why nothing can be said; empty where something can.
    """

    lengths: tuple[int, ...] = ()
    reference_tokens: int | None = None
    lowers_to_tokens: int | None = None
    raises_from_tokens: int | None = None
    differences: tuple[LengthDifference, ...] = ()
    clusters: int = 0
    obstacle: str = ""


def length_claims(sums: DocumentSums | None, training_length_tokens: int | None) -> LengthClaims:
    """Compares all lengths on the documents whose scored tokens are the same at each of them."""
    if sums is None:
        return LengthClaims(obstacle="samples were not logged (--log_samples), so lengths cannot be compared in pairs")
    lengths = tuple(sums.lengths)
    if len(lengths) < 2:
        return LengthClaims(lengths=lengths, obstacle="only one context length was evaluated")
    same = (sums.tokens == sums.tokens[:, :1]).all(axis=1) & (sums.tokens[:, 0] > 0)
    clusters = int(same.sum())
    if clusters == 0:
        return LengthClaims(lengths=lengths, obstacle="the lengths were not scored on the same targets")
    few = clusters < MINIMUM_CLUSTERS
    documents = f"{clusters} document was" if clusters == 1 else f"{clusters} documents were"
    nll, tokens = sums.nll_nats[same], sums.tokens[same, 0]
    reference = _reference(lengths, training_length_tokens)
    differences: tuple[LengthDifference, ...] = ()
    raises_from = lowers_to = None
    if reference is not None:
        differences = _against(nll, tokens, lengths, reference)
        longer = [item for item in differences if item.context_length_tokens > reference]
        raises_from = next((item.context_length_tokens for item in longer if item.low > 0), None)
        below = [item.context_length_tokens for item in longer if item.high < 0]
        lowers_to = max((length for length in below if raises_from is None or length < raises_from), default=None)
    if lowers_to is None and not few:
        within = [index for index, length in enumerate(lengths) if reference is None or length <= reference]
        lowers_to = _lowers_to(nll[:, within], tokens, [lengths[index] for index in within])
    return LengthClaims(
        lengths=lengths,
        reference_tokens=reference,
        lowers_to_tokens=None if few else lowers_to,
        raises_from_tokens=raises_from,
        differences=differences,
        clusters=clusters,
        obstacle=f"only {documents} scored at every length; intervals need {MINIMUM_CLUSTERS}" if few else "",
    )


def _reference(lengths: Sequence[int], training_length_tokens: int | None) -> int | None:
    within = [length for length in lengths if training_length_tokens is not None and length <= training_length_tokens]
    return max(within) if within else None


def _against(
    nll: NDArray[np.float64], tokens: NDArray[np.float64], lengths: Sequence[int], reference: int
) -> tuple[LengthDifference, ...]:
    others = [index for index, length in enumerate(lengths) if length != reference]
    band = simultaneous_band(nll[:, others] - nll[:, [lengths.index(reference)]], tokens)
    return tuple(
        LengthDifference(
            context_length_tokens=lengths[index],
            estimate=float(band.estimates[row]),
            low=float(band.lows[row]),
            high=float(band.highs[row]),
        )
        for row, index in enumerate(others)
    )


def _lowers_to(nll: NDArray[np.float64], tokens: NDArray[np.float64], lengths: Sequence[int]) -> int | None:
    if len(lengths) < 2:
        return None
    pairs = list(itertools.combinations(range(len(lengths)), 2))
    band = simultaneous_band(np.stack([nll[:, later] - nll[:, earlier] for earlier, later in pairs], axis=1), tokens)
    lower = {pair: bool(high < 0) for pair, high in zip(pairs, band.highs, strict=True)}
    for later in range(len(lengths) - 1, 0, -1):
        if all(lower[earlier, later] for earlier in range(later)):
            return lengths[later]
    return None
