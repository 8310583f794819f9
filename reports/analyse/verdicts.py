"""Writes the verdict at the top of the page: a short sentence for each group of models with the same result.

Every word rests on the simultaneous intervals of `claims.LengthClaims`. A sentence gives a number only for a length
whose whole interval is on one side of zero.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sbeval.reports.analyse.claims import LengthClaims, LengthDifference
from sbeval.reports.analyse.findings import signed
from sbeval.reports.analyse.protocols import on_identical_targets
from sbeval.reports.read.fields import grouped, length_text, name_list
from sbeval.results.records import IDENTICAL_TARGETS

DOUBTFUL = "\N{DAGGER}"
"""A dagger: marks a 95% interval that covers the true value in fewer than 95% of cases."""
_NAMES_AT_MOST = 4
_SENTENCES_AT_MOST = 4


class _Result(NamedTuple):
    """The strongest statement that the intervals of one model allow.

    Attributes:
        order: sort key; models that get worse come first.
        predicate: verb and object. "{s}" stands for the s of a verb after a single model, "{past}" and "{longest}" for
            the lengths.
        past: length beyond which the statement holds, in tokens.
        longest: longest length compared, in tokens.
        change: difference to the reference length that is shown; None to show none.
        doubtful: whether the intervals are doubtful.
    """

    order: int
    predicate: str
    past: int
    longest: int
    change: LengthDifference | None
    doubtful: bool


def verdict_sentences(protocol: str, of_models: Sequence[tuple[str, LengthClaims]]) -> str:
    """Returns the verdict on one text and protocol, such as "rope breaks past 1K (+3.5 nats at 4K).".

    There is a sentence for each group of models with the same statement about the same lengths. If these are many,
    there is one for each statement, with the range of lengths.

    Args:
        protocol: perplexity protocol; only one with identical targets can show that a model improves.
        of_models: label and `LengthClaims` of every model. Models without a length beyond the reference length are
            left out.
    """
    results = [(_result(claim, protocol), label) for label, claim in of_models if claim.beyond_reference]
    results.sort(key=lambda each: each[0][:4])
    same_lengths = grouped((result[:4], (result, label)) for result, label in results)
    same_predicate = grouped((result.predicate, (result, label)) for result, label in results)
    groups = same_lengths if len(same_lengths) <= _SENTENCES_AT_MOST else same_predicate
    return " ".join(map(_sentence, groups.values()))


def _sentence(group: Sequence[tuple[_Result, str]]) -> str:
    results = [result for result, _ in group]
    past = [result.past for result in results]
    later = " or later" if max(past) > min(past) else ""
    predicate = results[0].predicate.format(
        s="s" if len(group) == 1 else "",
        past=length_text(min(past)) + later,
        longest=_span([result.longest for result in results]),
    )
    mark = f" {DOUBTFUL}" if any(result.doubtful for result in results) else ""
    if changes := [result.change for result in results if result.change is not None]:
        nats = sorted(change.estimate for change in changes)
        sizes = " to ".join(dict.fromkeys((signed(nats[0]), signed(nats[-1]))))
        mark = f" ({sizes}{mark} nats at {_span([change.context_length_tokens for change in changes])})"
    return f"{name_list([label for _, label in group], at_most=_NAMES_AT_MOST)} {predicate}{mark}."


def _span(lengths: Sequence[int]) -> str:
    return " to ".join(dict.fromkeys(map(length_text, (min(lengths), max(lengths)))))


def _result(claim: LengthClaims, protocol: str) -> _Result:
    past, longest = claim.reference_tokens or 0, max(claim.lengths)
    change: LengthDifference | None = claim.differences[-1]
    if claim.raises_from_tokens is not None:
        past = claim.lengths[claim.lengths.index(claim.raises_from_tokens) - 1]
        change = [item for item in claim.differences_beyond if item.low > 0][-1]
        order, predicate = (0, "break{s} past {past}") if claim.breaks else (1, "get{s} worse past {past}")
    elif protocol not in IDENTICAL_TARGETS:
        order, predicate, change = 4, "show{s} no loss from {past} to {longest}", None
    elif claim.differences[-1].high >= 0:
        order, predicate, change = 4, "show{s} neither a gain at {longest} nor a loss past {past}", None
    elif claim.lowers_to_tokens == longest:
        order, predicate, change = 2, on_identical_targets(protocol, "keep{s} improving to {longest}"), None
    else:
        order, predicate = 3, on_identical_targets(protocol, "improve{s} past {past}")
    return _Result(order, predicate, past, longest, change, claim.doubtful)
