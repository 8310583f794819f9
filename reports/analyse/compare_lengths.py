"""Differences of two models on identical targets, length by length."""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from sbeval.reports.analyse.one_number.areas import change_weights
from sbeval.reports.analyse.statistics import CONFIDENCE, simultaneous_band
from sbeval.reports.read.samples import SumsByDocument

NATS = "nats per token"
RISE_SHARE = 0.2
"""Seeds of one recipe break at the same length by unequal amounts; less than this share of them does not count. It was
chosen on the twelve pairs of seeds of docs/results/extrapolation, so those do not test it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComparedLength:
    """The candidate minus the reference at one context length; above zero is worse.

    Attributes:
        corpus: name of the text.
        protocol: how it was scored.
        unit: "nats per token", or "bits per byte" where the tokenizers differ.
        context_length_tokens: the context length; None for the mean over octaves beyond the reference's training
            length, less the difference there.
        estimate: paired difference.
        low: lower end of the band that is simultaneous over this corpus and protocol's lengths; NaN where there are too
            few documents.
        high: its upper end.
        clusters: documents compared.
        reference_rise: by how much the reference itself is worse here than at its training length, 0 where it is not.
        doubtful: whether the documents' sizes are so uneven that the band covers less often than it says.
    """

    corpus: str
    protocol: str
    unit: str
    context_length_tokens: int | None
    estimate: float
    low: float
    high: float
    clusters: int
    reference_rise: float
    doubtful: bool

    @property
    def worse(self) -> bool:
        """Whether the whole band is above zero."""
        return self.low > 0

    def worse_by(self, least_effect: float) -> bool:
        """Whether the whole band is above a least effect, and above a part of the reference's own rise."""
        return self.low > max(least_effect, RISE_SHARE * self.reference_rise)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Per-document sums of one model's task, with what makes two of them comparable."""

    corpus: str
    corpus_sha256: str | None
    protocol: str
    tokenizer_sha256: str | None
    sums: SumsByDocument | None
    training_length_tokens: int | None = None
    task: str = ""


def compare_documents(
    first: Iterable[Measured], second: Iterable[Measured], *, confidence: float = CONFIDENCE
) -> tuple[list[ComparedLength], list[str]]:
    """Compares all texts and protocols two models share; also says what could not be compared, and why."""
    known: dict[tuple[str, str], Measured] = {}
    for one in first:  # the same text first, then whatever goes by its name
        known[one.corpus_sha256 or one.corpus, one.protocol] = one
        known.setdefault((one.corpus, one.protocol), one)
    lengths: list[ComparedLength] = []
    obstacles: list[str] = []
    for other in second:
        same = (other.corpus_sha256 or other.corpus, other.protocol)
        own = known.get(same, known.get((other.corpus, other.protocol)))
        if own is None:
            continue
        found, obstacle = _pair(own, other, confidence)
        lengths += found
        if obstacle:
            obstacles.append(f"{other.corpus}, {other.protocol}: not compared, because {obstacle}.")
    return lengths, obstacles


def _pair(first: Measured, second: Measured, confidence: float) -> tuple[list[ComparedLength], str]:
    if first.sums is None or second.sums is None:
        return [], "samples were not logged (--log_samples)"
    if first.corpus_sha256 != second.corpus_sha256:
        return [], "the texts differ (corpus hash)"
    shared = [length for length in first.sums.lengths if length in second.sums.lengths]
    if not shared:
        return [], "no context length is shared"
    same_tokens = first.tokenizer_sha256 == second.tokenizer_sha256
    rows = [
        (first.sums.clusters.index(cluster), index)
        for index, cluster in enumerate(second.sums.clusters)
        if cluster in set(first.sums.clusters)
    ]
    if not rows:
        return [], "no document is shared"
    mine = np.ix_([row for row, _ in rows], [first.sums.lengths.index(length) for length in shared])
    theirs = np.ix_([row for _, row in rows], [second.sums.lengths.index(length) for length in shared])
    sizes = [sums.tokens if same_tokens else sums.bytes for sums in (first.sums, second.sums)]
    own_size, other_size = sizes[0][mine], sizes[1][theirs]
    same = (own_size == other_size).all(axis=1) & (own_size == own_size[:, :1]).all(axis=1) & (own_size[:, 0] > 0)
    clusters = int(same.sum())
    if clusters == 0:
        return [], "no document has identical targets"
    differences = (second.sums.nll_nats[theirs] - first.sums.nll_nats[mine])[same]
    scale = 1.0 if same_tokens else math.log(2)
    within = [length for length in shared if length <= (first.training_length_tokens or 0)]
    weights = change_weights(shared, within[-1] if within else None)
    named: list[int | None] = [*shared]
    if weights is not None:
        differences, named = np.column_stack([differences, differences @ weights]), [*shared, None]
    band = simultaneous_band(differences / scale, own_size[same, 0], confidence=confidence)
    compared = [row for (row, _), kept in zip(rows, same, strict=True) if kept]
    levels = first.sums.nll_nats[compared].sum(axis=0) / scale / sizes[0][compared].sum(axis=0)
    trained = [length for length in first.sums.lengths if length <= (first.training_length_tokens or 0)]
    rises = levels[mine[1][0]] - (levels[len(trained) - 1] if trained else math.inf)
    rises = rises if weights is None else np.append(rises, levels[mine[1][0]] @ weights)
    return [
        ComparedLength(
            corpus=second.corpus,
            protocol=second.protocol,
            unit=NATS if same_tokens else "bits per byte",
            context_length_tokens=length,
            estimate=float(band.estimates[column]),
            low=float(band.lows[column]),
            high=float(band.highs[column]),
            clusters=clusters,
            reference_rise=max(0.0, float(rises[column])),
            doubtful=band.doubtful,
        )
        for column, length in enumerate(named)
    ], ""
