"""What paired differences between context lengths allow to be said about one model.

Two rules, both on documents whose scored tokens are the same at every length:

- *More context lowers NLL up to L.* L is the shortest length from which no longer one is lower. A longer length is
  lower where the whole band of its paired difference is below zero and no length between is above by the same test.
  The band is simultaneous over all pairs of lengths. Where L would be the shortest length, there is none. The training
  length plays no part.
- *It raises NLL above its value at the training length from M on.* M is the shortest length beyond the training length
  whose whole band is above zero; the band is simultaneous over the differences of all other lengths to the training
  length (or to the longest length below it that was evaluated).
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sbeval.reports.analyse.statistics import simultaneous_band
from sbeval.reports.read.results import Results
from sbeval.reports.read.samples import DOCUMENT_SUMS, SumsByDocument
from sbeval.results.intervals import MINIMUM_CLUSTERS

ClaimKey = tuple[str, str, str]
"""A model's label, a corpus and a protocol."""
TOO_FEW = "there are too few documents for an interval"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LengthDifference:
    """NLL at one length minus NLL at the reference length, in nats per token, on the same targets."""

    context_length_tokens: int
    estimate: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LengthClaims:
    """What one model does with more context, on one corpus under one protocol.

    Attributes:
        lengths: context lengths compared, ascending.
        training_length_tokens: None where not recorded.
        reference_tokens: the training length, or the longest length below it that was evaluated.
        lowers_to_tokens: the shortest length from which more context lowers NLL no further; None where more context
            never lowers it measurably.
        raises_from_tokens: shortest length beyond the reference with a higher NLL than there; None where none.
        differences: against the reference, one for each other length; the band is simultaneous over them, NaN where
            there are too few documents.
        clusters: documents compared.
        obstacle: why nothing can be said; empty where something can.
    """

    lengths: tuple[int, ...] = ()
    training_length_tokens: int | None = None
    reference_tokens: int | None = None
    lowers_to_tokens: int | None = None
    raises_from_tokens: int | None = None
    differences: tuple[LengthDifference, ...] = ()
    clusters: int = 0
    obstacle: str = ""


def all_claims(results: Results) -> dict[ClaimKey, LengthClaims]:
    """Returns what the lengths show for every (model label, corpus, protocol)."""
    claims: dict[ClaimKey, LengthClaims] = {}
    rows = results.measurements[results.measurements["family"] == "perplexity"]
    for label, task, corpus, protocol in dict.fromkeys(
        rows[["setting", "task", "corpus", "protocol"]].itertuples(index=False, name=None)
    ):
        if protocol == "position":
            continue
        sums = results[DOCUMENT_SUMS].get((label, task))
        trained = results.model(label).record.training_length_tokens
        claims[label, corpus, protocol] = length_claims(sums, trained)
    return claims


def length_claims(sums: SumsByDocument | None, training_length_tokens: int | None) -> LengthClaims:
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
    nll, tokens = sums.nll_nats[same], sums.tokens[same, 0]
    reference = _reference(lengths, training_length_tokens)
    differences: tuple[LengthDifference, ...] = ()
    raises_from = None
    if reference is not None:
        differences = _against(nll, tokens, lengths, reference)
        longer = [item for item in differences if item.context_length_tokens > reference]
        raises_from = next((item.context_length_tokens for item in longer if item.low > 0), None)
    return LengthClaims(
        lengths=lengths,
        training_length_tokens=training_length_tokens,
        reference_tokens=reference,
        lowers_to_tokens=None if few else _lowers_to(nll, tokens, lengths),
        raises_from_tokens=raises_from,
        differences=differences,
        clusters=clusters,
        obstacle=TOO_FEW if few else "",
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
    pairs = list(itertools.combinations(range(len(lengths)), 2))
    band = simultaneous_band(np.stack([nll[:, later] - nll[:, earlier] for earlier, later in pairs], axis=1), tokens)
    signs = {
        pair: -1 if high < 0 else 1 if low > 0 else 0
        for pair, low, high in zip(pairs, band.lows, band.highs, strict=True)
    }
    for start in range(len(lengths)):
        onwards = (signs[start, later] for later in range(start + 1, len(lengths)))
        first_certain = next((sign for sign in onwards if sign), 0)
        if first_certain >= 0:
            return lengths[start] if start else None
    raise AssertionError("the longest length has none beyond it")
