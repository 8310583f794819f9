"""What paired differences between context lengths allow to be said about one model.

Two rules, both on documents whose scored tokens are the same at every length:

- *More context lowers NLL up to L.* A step is a length's paired difference to the length before. Of the steps before
  the first whose whole band is above zero, the last whose whole band is below zero ends at L; if none is, there is no
  L. The band is simultaneous over all steps. The training length plays no part. A length whose own step is
  no gain is named in less than 5 % of simulations (`research/interval_studies/lengths_rule.py`).
- *It raises NLL above its value at the training length from M on.* M is the shortest length beyond the training length
  whose whole band is above zero; the band is simultaneous over the differences of all other lengths to the training
  length (or to the longest length below it that was evaluated).
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from sbeval.reports.analyse.protocols import PROTOCOL_ORDER
from sbeval.reports.analyse.statistics import CONFIDENCE, Estimate, Floats, simultaneous_band
from sbeval.reports.read.fields import length_text, ranked
from sbeval.reports.read.results import Results, records
from sbeval.reports.read.samples import DOCUMENT_SUMS, NO_SAMPLES, SumsByDocument
from sbeval.results.intervals import MINIMUM_CLUSTERS, uneven

ClaimKey = tuple[str, str, str]
"""A model's label, a corpus and a protocol."""
TOO_FEW = "there are too few documents for an interval"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LengthDifference(Estimate):
    """NLL at a length minus NLL at the one before or the reference, in nats per token, on the same targets."""

    context_length_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LengthClaims:
    """What one model does with more context, on one corpus under one protocol.

    Attributes:
        lengths: context lengths compared, ascending.
        training_length_tokens: None where not recorded.
        origin_length_tokens: of an extended model its parent's training length, else the training length.
        reference_tokens: the training length (of an extended model its parent's), or the longest length below it that
            was evaluated.
        lowers_to_tokens: the longest length whose own step is a gain; None where no step is.
        raises_from_tokens: shortest length beyond the reference with a higher NLL than there; None where none.
        differences: against the reference, one for each other length; the band is simultaneous over them, NaN where
            there are too few documents.
        steps: against the length before, one for each length but the shortest, with a band over them.
        clusters: documents compared.
        doubtful: whether the documents' sizes are so uneven that intervals and bands cover less often than they say;
            if the run recorded it, it needs no samples.
        by_document: if documents are too few for a band, each one's NLL at the longest length less that at the
            reference, ascending.
        obstacle: why nothing can be said; empty where something can.
    """

    lengths: tuple[int, ...] = ()
    training_length_tokens: int | None = None
    origin_length_tokens: int | None = None
    reference_tokens: int | None = None
    lowers_to_tokens: int | None = None
    raises_from_tokens: int | None = None
    differences: tuple[LengthDifference, ...] = ()
    steps: tuple[LengthDifference, ...] = ()
    clusters: int = 0
    doubtful: bool = False
    by_document: tuple[float, ...] = ()
    obstacle: str = ""

    @property
    def ruled_out_nats(self) -> float:
        """What no length beyond the reference is worse by: the upper end of the band where it is highest."""
        longer = [item.high for item in self.differences if item.context_length_tokens > (self.reference_tokens or 0)]
        return max(0.0, *longer)

    @property
    def beyond_reference(self) -> bool:
        """Whether a length beyond the reference is compared with it."""
        return self.reference_tokens is not None and max(self.lengths) > self.reference_tokens

    @property
    def first_loss(self) -> LengthDifference | None:
        """The first step that is measurably a loss."""
        return next((step for step in self.steps if step.low > 0), None)

    @property
    def gains_after_loss(self) -> bool:
        """Whether a step behind the first loss is measurably a gain, which the rule does not count."""
        loss = self.first_loss
        return loss is not None and any(
            step.high < 0 and step.context_length_tokens > loss.context_length_tokens for step in self.steps
        )

    @property
    def last_gain(self) -> LengthDifference | None:
        """The step up to `lowers_to_tokens`."""
        return next((step for step in self.steps if step.context_length_tokens == self.lowers_to_tokens), None)


Claims = Mapping[ClaimKey, LengthClaims]


def all_claims(results: Results) -> dict[ClaimKey, LengthClaims]:
    """Returns what the lengths show for every (model label, corpus, protocol), identical targets first."""
    claims: dict[ClaimKey, LengthClaims] = {}
    table = results.measurements
    rows = table[(table["family"] == "perplexity") & (table["protocol"] != "position")]
    texts = records(rows.drop_duplicates(["setting", "task", "corpus", "corpus_sha256", "protocol"]))
    for row in sorted(texts, key=lambda text: ranked(text["protocol"], PROTOCOL_ORDER)):
        label, task = row["setting"], row["task"]
        sums = results.behind(DOCUMENT_SUMS, row)
        model = results.model(label)
        trained = model.record.training_length_tokens
        found = length_claims(sums, trained, origin_length_tokens=model.origin_length_tokens)
        if sums is None and model.uneven_documents(task):
            found = dataclasses.replace(found, doubtful=True)
        claims[label, row["corpus"], row["protocol"]] = found
    return claims


def not_compared(lengths: Sequence[int], trained_at: int | None) -> str:
    """Returns why no longer length is compared with the training length, for a table's cell; empty where one is."""
    if trained_at is None:
        return "training length not recorded"
    if min(lengths) > trained_at:
        return f"no length up to {length_text(trained_at)} was compared"
    return "" if max(lengths) > trained_at else f"no length beyond {length_text(trained_at)} was compared"


def length_claims(
    sums: SumsByDocument | None,
    training_length_tokens: int | None,
    *,
    origin_length_tokens: int | None = None,
    confidence: float = CONFIDENCE,
) -> LengthClaims:
    """Compares all lengths on the documents whose scored tokens are the same at each of them.

    `sums` are None where samples were not logged; lengths are compared with the original training length where an
    extended model has one. Each of the two bands holds all its differences at once with the given confidence.
    """
    if sums is None:
        return LengthClaims(obstacle=f"{NO_SAMPLES}, so lengths cannot be compared in pairs")
    lengths = tuple(sums.lengths)
    doubtful = uneven(sums.tokens.max(axis=1))
    if len(lengths) < 2:
        return LengthClaims(lengths=lengths, doubtful=doubtful, obstacle="only one context length can be compared")
    same = (sums.tokens == sums.tokens[:, :1]).all(axis=1) & (sums.tokens[:, 0] > 0)
    clusters = int(same.sum())
    if clusters == 0:
        obstacle = "the lengths were not scored on the same targets"
        return LengthClaims(lengths=lengths, doubtful=doubtful, obstacle=obstacle)
    few = clusters < MINIMUM_CLUSTERS
    nll = sums.nll_nats[same]
    tokens = sums.tokens[same, 0]
    reference = _reference(lengths, origin_length_tokens) or _reference(lengths, training_length_tokens)
    differences: tuple[LengthDifference, ...] = ()
    raises_from = None
    own = np.empty(0)
    if reference is not None:
        earlier = lengths.index(reference)
        if few:
            own = (nll[:, -1] - nll[:, earlier]) / tokens
        others = [index for index in range(len(lengths)) if index != earlier]
        differences = _differences(nll, tokens, lengths, [(earlier, index) for index in others], confidence)
        longer = [item for item in differences if item.context_length_tokens > reference]
        raises_from = next((item.context_length_tokens for item in longer if item.low > 0), None)
    steps = _differences(nll, tokens, lengths, list(itertools.pairwise(range(len(lengths)))), confidence)
    last = longest_shown([_sign(step) for step in steps])
    return LengthClaims(
        lengths=lengths,
        training_length_tokens=training_length_tokens,
        origin_length_tokens=origin_length_tokens or training_length_tokens,
        reference_tokens=reference,
        lowers_to_tokens=lengths[last] if last else None,
        raises_from_tokens=raises_from,
        differences=differences,
        steps=steps,
        clusters=clusters,
        doubtful=doubtful,
        by_document=tuple(sorted(map(float, own))),
        obstacle=TOO_FEW if few else "",
    )


def _sign(step: LengthDifference) -> int:
    """Returns -1 for a measurable gain, 1 for a measurable loss, 0 where the interval holds zero."""
    if step.high < 0:
        return -1
    return 1 if step.low > 0 else 0


def longest_shown(signs: Sequence[int]) -> int:
    """Returns how many steps lead to the last gain before the first loss; 0 if there is none.

    Args:
        signs: for each step -1 where it is measurably a gain, 1 where measurably a loss, 0 where neither.
    """
    up = signs.index(1) if 1 in signs else len(signs)
    return max((step + 1 for step in range(up) if signs[step] < 0), default=0)


def _reference(lengths: Sequence[int], training_length_tokens: int | None) -> int | None:
    within = [length for length in lengths if training_length_tokens is not None and length <= training_length_tokens]
    return max(within) if within else None


def _differences(
    nll: Floats, tokens: Floats, lengths: Sequence[int], pairs: Sequence[tuple[int, int]], confidence: float
) -> tuple[LengthDifference, ...]:
    """Subtracts the first of each pair of columns from the second, with one band over all pairs."""
    differences_CK = np.stack([nll[:, later] - nll[:, earlier] for earlier, later in pairs], axis=1)
    band = simultaneous_band(differences_CK, tokens, confidence=confidence, each_side=True)
    return tuple(
        LengthDifference(context_length_tokens=lengths[later], estimate=estimate, low=low, high=high)
        for (_, later), (estimate, low, high) in zip(pairs, band, strict=True)
    )
