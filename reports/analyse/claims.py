"""Up to which context length more context lowers a model's NLL, and from which length on it raises NLL.

Two rules decide this. Both use paired differences of NLL between context lengths, on documents whose scored tokens are
the same at every length. A "band" is a set of confidence intervals that cover all their true values at once in 95% of
cases:

- *More context lowers NLL up to L.* A "step" is the NLL at one length minus the NLL at the next shorter length. A step
  is a "gain" if its whole interval is below zero, and a "loss" if its whole interval is above zero. L is the length of
  the last gain before the first loss; without a gain there is no L. The band covers all steps at once. This rule does
  not use the training length.
- *More context raises NLL above its value at the training length from M on.* M is the shortest length beyond the
  training length at which the difference to the training length has its whole interval above zero. If the training
  length was not evaluated, the longest evaluated length below it is used. The band covers the differences of all other
  lengths at once.

Why the first rule compares neighbouring lengths: compared with the training length only, a curve that stops falling at
4K would count as a gain up to 64K. In simulations such a rule names a length that does not lower NLL in up to 80 % of
draws, and rules that compare all pairs of lengths do so in up to 8 %. Intervals of skewed differences miss the true
value on one side only, so the distance to each end is computed for its side. On a flat curve the rule then names a
length in at most 3 % of draws with symmetric noise and 4 % with skewed noise (20 to 100 documents). With the same
distance on both sides it names a length in 7 % (`research/interval_studies/lengths_rule.py`,
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
    """NLL at one context length minus NLL at another one, in nats per token, on the same target tokens."""

    context_length_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LengthClaims:
    """The paired differences of NLL of one model on one text and perplexity protocol, and the lengths of both rules.

    Attributes:
        lengths: context lengths compared, in tokens, ascending.
        training_length_tokens: the model's training length; None if it is not recorded.
        origin_length_tokens: for a context-extended model, the training length of the model that was extended; for any
            other model, the training length.
        reference_tokens: the reference length, whose NLL is subtracted in `differences`: the longest evaluated length
            of at most `origin_length_tokens`, or, if no such length was evaluated, of at most the training length.
        lowers_to_tokens: length L of the first rule: more context lowers NLL up to here; None if no step is a gain.
        raises_from_tokens: length M of the second rule: the shortest length beyond the reference length at which NLL is
            measurably higher than at the reference length; None if there is no such length.
        differences: NLL at every other length minus NLL at the reference length, with simultaneous intervals. These are
            NaN if there are too few documents.
        steps: for every length but the shortest, its NLL minus NLL at the next shorter length, with simultaneous
            intervals.
        clusters: number of documents compared.
        doubtful: whether documents are so uneven in size that the intervals cover the true value in fewer cases than
            they claim. Computed from the samples; if samples were not logged, taken from the run's record.
        by_document: if there are too few documents for intervals, the NLL of every document at the longest length minus
            its NLL at the reference length, ascending.
        obstacle: a clause that says why the rules cannot be applied; empty if they can.
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
        """The highest upper end of the differences beyond the reference length, in nats per token, at least 0.

        The band rules out that NLL rises by more than this.
        """
        return max(0.0, *(item.high for item in self.differences_beyond))

    @property
    def differences_beyond(self) -> tuple[LengthDifference, ...]:
        """The differences of all lengths longer than the reference length."""
        reference = self.reference_tokens or 0
        return tuple(item for item in self.differences if item.context_length_tokens > reference)

    @property
    def breaks(self) -> bool:
        """Whether NLL at `raises_from_tokens` is measurably above NLL at every shorter length, of which there are two.

        The intervals are simultaneous, so NLL is above if the intervals of the two differences do not overlap.
        """
        at = self.raises_from_tokens
        if at is None or self.lengths.index(at) < 2:
            return False
        shorter = [item.high for item in self.differences if item.context_length_tokens < at]
        low = next(item.low for item in self.differences if item.context_length_tokens == at)
        return low > max(0.0, *shorter)

    @property
    def beyond_reference(self) -> bool:
        """Whether some context length longer than the reference length was evaluated."""
        return self.reference_tokens is not None and max(self.lengths) > self.reference_tokens

    @property
    def first_loss(self) -> LengthDifference | None:
        """The first step whose whole interval is above zero; None if there is none."""
        return next((step for step in self.steps if step.low > 0), None)

    @property
    def gains_after_loss(self) -> bool:
        """Whether NLL measurably falls again after the first step that measurably raised it. L ignores such a gain."""
        loss = self.first_loss
        return loss is not None and any(
            step.high < 0 and step.context_length_tokens > loss.context_length_tokens for step in self.steps
        )

    @property
    def last_gain(self) -> LengthDifference | None:
        """The step from the next shorter length to `lowers_to_tokens`; None if no step is a gain."""
        return next((step for step in self.steps if step.context_length_tokens == self.lowers_to_tokens), None)


Claims = Mapping[ClaimKey, LengthClaims]


def all_claims(results: Results) -> dict[ClaimKey, LengthClaims]:
    """Returns `LengthClaims` for every model, text and protocol; protocols with identical targets come first."""
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
    """Returns the reason, for a table cell, why no length beyond the training length was compared with it.

    The text is empty if some longer length was compared.
    """
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
        sums: sums of NLL by document and length; None if samples were not logged.
        training_length_tokens: the model's training length; None if it is unknown.
        origin_length_tokens: for a context-extended model, the training length of the model that was extended. If it is
            given, the reference length is chosen by it and not by `training_length_tokens`.
        confidence: probability that all intervals of the steps cover their true values at once, and likewise all
            intervals of the differences to the reference length.
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
    last = last_gain_step([_sign(step) for step in steps])
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
    """Returns -1 if a step measurably lowers NLL, 1 if it measurably raises NLL, 0 if its interval includes zero."""
    if step.high < 0:
        return -1
    return 1 if step.low > 0 else 0


def last_gain_step(signs: Sequence[int]) -> int:
    """Returns the number of steps up to and including the last gain before the first loss; 0 if there is none.

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
    """For each pair of columns, subtracts the first from the second; intervals are simultaneous over all pairs."""
    differences_CK = np.stack([nll[:, later] - nll[:, earlier] for earlier, later in pairs], axis=1)
    band = simultaneous_band(differences_CK, tokens, confidence=confidence, each_side=True)
    return tuple(
        LengthDifference(context_length_tokens=lengths[later], estimate=estimate, low=low, high=high)
        for (_, later), (estimate, low, high) in zip(pairs, band, strict=True)
    )
