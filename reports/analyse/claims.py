"""Claims about one model from paired differences of NLL between context lengths.

Two rules, both on documents whose scored tokens are the same at every length:

- *More context lowers NLL up to L.* A step is a length's paired difference to the next shorter length. A step is a gain
  if its whole band is below zero, and a loss if its whole band is above zero. L is the length of the last gain before
  the first loss; without a gain there is no L. The band is simultaneous over all steps. The training length plays no
  part.
- *It raises NLL above its value at the training length from M on.* M is the shortest length beyond the training length
  whose whole band is above zero. The band is simultaneous over the differences of all other lengths to the training
  length (or to the longest length below it that was evaluated).

Why the first rule looks at steps: a band against the training length alone would call a curve that stops falling at 4K
a gain up to 64K. In simulations such a rule names a length that adds nothing in up to 80 % of draws, and rules over all
pairs of lengths do so in up to 8 %. Skewed differences miss on one side of a band only, so each end gets the width that
its own side needs. On a flat curve a length is then named in at most 3 % of draws with even noise and 4 % with skewed
noise (20 to 100 documents); one width for both sides names one in 7 % (`research/interval_studies/lengths_rule.py`,
`benchmarks/results/intervals.md`).
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
"""(model label, name of the text, protocol)."""
TOO_FEW = "there are too few documents for an interval"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LengthDifference(Estimate):
    """NLL at a context length minus NLL at a shorter or reference length, in nats per token, on the same targets."""

    context_length_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LengthClaims:
    """What paired differences show about one model's use of context, on one text under one protocol.

    Attributes:
        lengths: context lengths compared, in tokens, ascending.
        training_length_tokens: None where not recorded.
        origin_length_tokens: an extended model's parent's training length, else the training length.
        reference_tokens: the length compared with: `origin_length_tokens`, or the longest evaluated length below it.
        lowers_to_tokens: length L of the first rule: more context lowers NLL up to here; None without a gain.
        raises_from_tokens: length M of the second rule: shortest length beyond the reference with a measurably higher
            NLL than there; None without one.
        differences: differences to the reference, one for each other length, with a simultaneous band; the band is NaN
            where there are too few documents.
        steps: differences to the next shorter length, one for each length but the shortest, with a simultaneous band.
        clusters: number of documents compared.
        doubtful: whether documents are so uneven in size that intervals cover less often than they say; known from the
            samples, or without them from the run's record.
        by_document: where documents are too few for a band, each document's NLL at the longest length minus that at
            the reference, ascending.
        obstacle: why nothing can be claimed, as a clause; empty where something can.
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
        """The largest rise of NLL beyond the reference that the band allows, in nats per token; at least 0."""
        longer = [item.high for item in self.differences if item.context_length_tokens > (self.reference_tokens or 0)]
        return max(0.0, *longer)

    @property
    def beyond_reference(self) -> bool:
        """Whether a longer length than the reference was compared with it."""
        return self.reference_tokens is not None and max(self.lengths) > self.reference_tokens

    @property
    def first_loss(self) -> LengthDifference | None:
        """The first step that measurably raises NLL; None without one."""
        return next((step for step in self.steps if step.low > 0), None)

    @property
    def gains_after_loss(self) -> bool:
        """Whether a step after the first loss is a gain. The rule does not count such a gain."""
        loss = self.first_loss
        return loss is not None and any(
            step.high < 0 and step.context_length_tokens > loss.context_length_tokens for step in self.steps
        )

    @property
    def last_gain(self) -> LengthDifference | None:
        """The step that ends at `lowers_to_tokens`; None without one."""
        return next((step for step in self.steps if step.context_length_tokens == self.lowers_to_tokens), None)


Claims = Mapping[ClaimKey, LengthClaims]


def all_claims(results: Results) -> dict[ClaimKey, LengthClaims]:
    """Returns the claims for every model, text and protocol; protocols with identical targets come first."""
    claims: dict[ClaimKey, LengthClaims] = {}
    table = results.measurements
    rows = table[(table["family"] == "perplexity") & (table["protocol"] != "position")]
    texts = records(rows.drop_duplicates(["setting", "task", "corpus", "corpus_sha256", "protocol"]))
    for row in sorted(texts, key=lambda text: ranked(text["protocol"], PROTOCOL_ORDER)):
        label, task = row["setting"], row["task"]
        sums = results.behind(DOCUMENT_SUMS, row)
        model = results.model(label)
        trained = model.record.training_length_tokens
        claim = length_claims(sums, trained, origin_length_tokens=model.origin_length_tokens)
        if sums is None and model.uneven_documents(task):
            claim = dataclasses.replace(claim, doubtful=True)
        claims[label, row["corpus"], row["protocol"]] = claim
    return claims


def not_compared(lengths: Sequence[int], trained_at: int | None) -> str:
    """Returns why no longer length was compared with the training length, for a table cell; empty where one was."""
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
    """Compares all context lengths on the documents whose scored tokens are the same at each length.

    Args:
        sums: sums of NLL by document and length; None where samples were not logged.
        training_length_tokens: the model's training length, None where unknown.
        origin_length_tokens: an extended model's parent's training length; it is preferred as the reference.
        confidence: how often the band over all steps covers all true steps, and likewise the band over all differences
            to the reference.
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
    document_changes = np.empty(0)
    if reference is not None:
        earlier = lengths.index(reference)
        if few:
            document_changes = (nll[:, -1] - nll[:, earlier]) / tokens
        pairs = [(earlier, index) for index in range(len(lengths)) if index != earlier]
        differences = _differences(nll, tokens, lengths, pairs, confidence)
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
        by_document=tuple(sorted(map(float, document_changes))),
        obstacle=TOO_FEW if few else "",
    )


def _sign(step: LengthDifference) -> int:
    """Returns -1 for a measurable gain, 1 for a measurable loss, 0 where the interval holds zero."""
    if step.high < 0:
        return -1
    return 1 if step.low > 0 else 0


def longest_shown(signs: Sequence[int]) -> int:
    """Returns how many steps lead up to the last gain before the first loss; 0 without such a gain.

    Args:
        signs: for each step, -1 for a gain, 1 for a loss, 0 for neither.
    """
    up = signs.index(1) if 1 in signs else len(signs)
    return max((step + 1 for step in range(up) if signs[step] < 0), default=0)


def _reference(lengths: Sequence[int], training_length_tokens: int | None) -> int | None:
    within = [length for length in lengths if training_length_tokens is not None and length <= training_length_tokens]
    return max(within) if within else None


def _differences(
    nll: Floats, tokens: Floats, lengths: Sequence[int], pairs: Sequence[tuple[int, int]], confidence: float
) -> tuple[LengthDifference, ...]:
    """Subtracts the first of each pair of columns from the second; the band is simultaneous over all pairs."""
    differences_CK = np.stack([nll[:, later] - nll[:, earlier] for earlier, later in pairs], axis=1)
    band = simultaneous_band(differences_CK, tokens, confidence=confidence, each_side=True)
    return tuple(
        LengthDifference(context_length_tokens=lengths[later], estimate=estimate, low=low, high=high)
        for (_, later), (estimate, low, high) in zip(pairs, band, strict=True)
    )
