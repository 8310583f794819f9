"""Writes the "cards" of the summary from the measurements.

A card is a box with the facts of one model, headline numbers, and sentences on its results.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from sbeval.reports.analyse.claims import TOO_FEW, Claims, LengthClaims, LengthDifference
from sbeval.reports.analyse.panels import CORPUS_NAMES, text_name
from sbeval.reports.analyse.protocols import on_identical_targets, windows_text
from sbeval.reports.read.fields import display_name, length_text, quote_name
from sbeval.reports.read.models import SCHEME_NAMES, EvaluatedModel
from sbeval.reports.read.record_texts import extrapolation_text, rope_scaling_text
from sbeval.results.intervals import MINIMUM_CLUSTERS, change_text
from sbeval.results.records import IDENTICAL_TARGETS

_TASKS_AT_MOST = 4
_NO_GAIN = "has a measurably lower NLL than the next shorter one"
DOUBTFUL_TEXT = "doubtful intervals, since these documents differ much in size"


class Headline(NamedTuple):
    """A number that a model's card shows in large print, and its meaning in words."""

    value: str
    meaning: str


class Finding(NamedTuple):
    """The content of the card of one model.

    Attributes:
        label: the model's label.
        facts: position scheme, number of parameters and training length in one line.
        headlines: the numbers that readers look for first.
        sentences: sentences on the results of the model.
    """

    label: str
    facts: str
    headlines: tuple[Headline, ...]
    sentences: tuple[str, ...]


def model_facts(model: EvaluatedModel) -> str:
    """Returns position scheme, parameter count, training length and parent (the model it was made from) in one line."""
    record = model.record
    trained = record.training_length_tokens
    parent = ""
    if record.extended_from:
        name = model.parent or record.extended_from.get("name")
        parent = f"extended from {quote_name(str(name)) if name else 'a parent not named'}"
    facts = (
        SCHEME_NAMES.get(record.attention or "", record.attention or "attention not recorded"),
        f"window {length_text(record.sliding_window)}" if record.sliding_window else "",
        rope_scaling_text(record.rope_scaling),
        extrapolation_text(record.extrapolation),
        f"{parameters_text(record.parameters)} parameters" if record.parameters else "",
        f"trained at {length_text(trained)}" if trained else "training length not recorded",
        f"mean of {model.seeds} training seeds" if model.seeds > 1 else "",
        parent,
    )
    return ", ".join(filter(None, facts))


def parameters_text(parameters: int) -> str:
    """Returns a parameter count as text, such as 4.3M, 367M or 1.2B."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= unit:
            value = parameters / unit
            return f"{value:.1f}{name}" if value < 100 else f"{value:.0f}{name}"
    return str(parameters)


def model_findings(
    models: Sequence[EvaluatedModel], claims: Claims, effective_lengths: Mapping[str, Sequence[str]]
) -> list[Finding]:
    """Returns a card for each model.

    Args:
        models: the models, in the order shown.
        claims: each model's paired differences of NLL between context lengths.
        effective_lengths: model label to its sentences on RULER's effective lengths.
    """
    findings = []
    for model in models:
        of_model = {key[1:]: claim for key, claim in claims.items() if key[0] == model.label}
        identical = {text: claim for text, claim in of_model.items() if text[1] in IDENTICAL_TARGETS}
        sentences = [
            on_identical_targets(protocol, _context_sentence(text_name(corpus, protocol), claim))
            for (corpus, protocol), claim in identical.items()
        ]
        other_protocols = {text: claim for text, claim in of_model.items() if text not in identical}
        sentences += _stream_sentences(other_protocols, dict(identical.keys()))
        sentences += effective_lengths.get(model.label, ())
        usable = [claim for claim in identical.values() if not claim.obstacle]
        usable = usable or [claim for claim in (*identical.values(), *of_model.values()) if _few(claim)]
        findings.append(
            Finding(
                label=model.label,
                facts=model_facts(model),
                headlines=_headlines(usable[0]) if usable else (),
                sentences=tuple(sentences) or (_nothing_claimed(model),),
            )
        )
    return findings


def _nothing_claimed(model: EvaluatedModel) -> str:
    names = list(dict.fromkeys(display_name(task.name) for run in model.runs for task in run.tasks))
    named = ", ".join(names if len(names) <= _TASKS_AT_MOST else names[: _TASKS_AT_MOST - 1])
    more = f" and {len(names) - _TASKS_AT_MOST + 1} more" if len(names) > _TASKS_AT_MOST else ""
    return f"No perplexity or RULER score against context length; its runs measured {named}{more}."


def _few(claim: LengthClaims) -> bool:
    """Whether differences were computed, but on too few documents for a confidence interval."""
    return claim.obstacle == TOO_FEW and claim.beyond_reference


def _headlines(claim: LengthClaims) -> tuple[Headline, ...]:
    longest = length_text(max(claim.lengths))
    if _few(claim):
        meaning = f"nats per token at {longest} against {length_text(claim.reference_tokens or 0)}, no interval"
        return (Headline(value=signed(claim.differences[-1].estimate), meaning=meaning),)
    headlines = [_lowers_headline(claim, longest)]
    if claim.beyond_reference:
        reference = length_text(claim.reference_tokens or 0)
        value = "none"
        meaning = f"no context up to {longest} is measurably worse than {reference}"
        if claim.raises_from_tokens:
            value = length_text(claim.raises_from_tokens)
            meaning = f"first context measurably worse than {reference}"
        headlines.append(Headline(value=value, meaning=meaning))
    return tuple(headlines)


def _lowers_headline(claim: LengthClaims, longest: str) -> Headline:
    """Returns the headline with the length up to which more context lowers NLL; it names the two lengths compared."""
    if (step := claim.last_gain) is None and claim.gains_after_loss:
        return Headline(value="none", meaning=f"more context raises NLL first ({_loss(claim)})")
    if step is None:
        return Headline(value="none", meaning=f"no context up to {longest} {_NO_GAIN}")
    last = "≥ " if step.context_length_tokens == max(claim.lengths) else ""
    meaning = f"NLL falls up to here: measurably lower than at {_earlier(step, claim)}"
    return Headline(value=last + length_text(step.context_length_tokens), meaning=meaning)


def _context_sentence(text: str, claim: LengthClaims) -> str:
    where = f"On identical targets ({text}"
    if claim.obstacle:
        return f"{where}): {_without_claim(claim)}."
    longest = max(claim.lengths)
    start = f"{where}, {claim.clusters} documents){_doubt(claim)}, "
    if claim.lowers_to_tokens is None:
        first = f"no context length {_NO_GAIN}"
        if claim.gains_after_loss:
            first = f"more context raises NLL first ({_loss(claim)}), and lowers it in a later step only"
    elif claim.lowers_to_tokens == longest:
        first = f"more context lowers NLL all the way to {length_text(longest)}, the longest compared{_step(claim)}"
    else:
        further = "" if claim.raises_from_tokens else ", and no later step lowers it measurably"
        further = f", then raises it ({_loss(claim)})" if claim.gains_after_loss else further
        first = f"more context lowers NLL up to {length_text(claim.lowers_to_tokens)}{_step(claim)}{further}"
    if claim.reference_tokens is None:
        return f"{start}{first}; {_no_reference(claim)}."
    reference = length_text(claim.reference_tokens)
    if not claim.beyond_reference:
        return f"{start}{first}; {_none_beyond(claim)}."
    if claim.raises_from_tokens is None:
        last = claim.differences[-1]
        return f"{start}{first}; {_not_worse(claim)} ({_minus(last, claim)})."
    worse = next(item for item in claim.differences if item.context_length_tokens == claim.raises_from_tokens)
    return (
        f"{start}{first}; from {length_text(claim.raises_from_tokens)} on{_stated(claim)}, NLL is above its value at "
        f"{reference} ({_minus(worse, claim)}){_recovery(claim)}."
    )


def _not_worse(claim: LengthClaims) -> str:
    """Returns a clause for a model whose NLL does not rise measurably beyond its training length.

    An interval that includes zero does not show that NLL does not rise. The clause therefore says which rise of NLL the
    intervals rule out.
    """
    above = f" of more than {math.ceil(1000 * claim.ruled_out_nats) / 1000:.3f} nats" if claim.ruled_out_nats else ""
    return (
        f"no length up to {length_text(max(claim.lengths))} is measurably worse than "
        f"{length_text(claim.reference_tokens or 0)}, and a rise{above} is ruled out"
    )


def _stated(claim: LengthClaims) -> str:
    """Returns a clause if NLL of a context-extended model rises within its new training length; else an empty text."""
    stated = claim.training_length_tokens or 0
    return f", within its stated {length_text(stated)}" if stated >= (claim.raises_from_tokens or 0) else ""


def _step(claim: LengthClaims) -> str:
    """Returns, in parentheses, the fall of NLL from the next shorter length to `lowers_to_tokens`, with its interval.

    The text is empty if NLL falls measurably at no length.
    """
    step = claim.last_gain
    return "" if step is None else f" (from {_earlier(step, claim)}: {step.text})"


def _loss(claim: LengthClaims) -> str:
    """Returns the first measurable rise of NLL between neighbouring lengths, with its interval.

    `lowers_to_tokens` is never longer than the length before this rise.
    """
    step = claim.first_loss
    if step is None:
        return ""
    return f"from {_earlier(step, claim)} to {length_text(step.context_length_tokens)}: {step.text}"


def _earlier(step: LengthDifference, claim: LengthClaims) -> str:
    """Returns, in words, the shorter of the two neighbouring lengths that a step compares."""
    return length_text(claim.lengths[claim.lengths.index(step.context_length_tokens) - 1])


def _doubt(claim: LengthClaims) -> str:
    return f", with {DOUBTFUL_TEXT}" if claim.doubtful else ""


def _no_reference(claim: LengthClaims) -> str:
    if claim.training_length_tokens is None:
        return "its training length is not recorded, so no length is compared with it"
    return f"none of the lengths compared is within its training length of {length_text(claim.training_length_tokens)}"


def _none_beyond(claim: LengthClaims) -> str:
    """Returns a clause for a model with no compared length beyond its training length.

    The clause says "compared" and not "evaluated", since a longer length may have been evaluated and left out.
    """
    lengths = (claim.origin_length_tokens, claim.training_length_tokens)
    # an extended model has two training lengths, its own and its parent's: name one that no compared length exceeds
    trained = next((length for length in lengths if length is not None and length >= max(claim.lengths)), 0)
    return f"none of the lengths compared is beyond the training length of {length_text(trained)}"


def _minus(difference: LengthDifference, claim: LengthClaims) -> str:
    longer = difference.context_length_tokens
    reference = claim.reference_tokens or 0
    return f"{length_text(longer)} minus {length_text(reference)}: {difference.text} nats per token"


def _without_claim(claim: LengthClaims) -> str:
    """Returns a clause for a text on which no length can be named: the reason, and the change of NLL if few documents.

    The change is shown only if the reason is that there are too few documents for an interval.
    """
    if claim.obstacle != TOO_FEW:
        return f"nothing can be said, because {claim.obstacle}"
    is_single = claim.clusters == 1
    documents = "1 document" if is_single else f"{claim.clusters} documents"
    too_few = f"{documents} {'is' if is_single else 'are'} too few for a 95% interval, which needs {MINIMUM_CLUSTERS}"
    if not _few(claim):
        return f"nothing can be said, because {too_few}"
    last = claim.differences[-1]
    side = "lower" if last.estimate < 0 else "higher"
    lowest, highest = claim.by_document[0], claim.by_document[-1]
    agreeing = sum((change < 0) == (last.estimate < 0) for change in claim.by_document)
    each = (
        "" if is_single else f", {side} in {agreeing} of them (by document from {signed(lowest)} to {signed(highest)})"
    )
    size = signed(abs(last.estimate))[1:]
    return (
        f"in {documents} NLL at {length_text(last.context_length_tokens)} is {size} nats per token "
        f"{side} than at {length_text(claim.reference_tokens or 0)}{each}; {too_few}"
    )


def signed(value: float) -> str:
    """Returns a number as text with its sign and at least two digits."""
    return change_text(value, least=2)[0].replace("-", "\N{MINUS SIGN}")


def _recovery(claim: LengthClaims) -> str:
    later = [item for item in claim.differences if item.context_length_tokens > (claim.raises_from_tokens or 0)]
    again = [length_text(item.context_length_tokens) for item in later if item.low <= 0]
    return f", but not measurably at {', '.join(again)}" if again else ""


def _stream_sentences(claims: Mapping[tuple[str, str], LengthClaims], judged: Collection[str]) -> list[str]:
    """Returns sentences on protocols that score other target tokens at each context length.

    Args:
        claims: (text, protocol) to one model's paired differences.
        judged: texts on which another protocol scored identical targets at every length. That protocol shows whether
            the model uses its context.
    """
    sentences = []
    for (corpus, protocol), claim in claims.items():
        where = f"{windows_text(protocol)} ({CORPUS_NAMES.get(corpus, corpus)})"
        if claim.obstacle:
            if corpus not in judged or _few(claim):
                sentences.append(f"{where}: {_without_claim(claim)}.")
            continue
        if claim.reference_tokens is None:
            sentences.append(f"{where}: {_no_reference(claim)}.")
            continue
        if not claim.beyond_reference:
            sentences.append(f"{where}: {_none_beyond(claim)}.")
            continue
        where += _doubt(claim)
        reference = length_text(claim.reference_tokens)
        if claim.raises_from_tokens:
            from_there = length_text(claim.raises_from_tokens)
            verdict = f"NLL is above its value at {reference} from {from_there} on{_stated(claim)}{_recovery(claim)}"
        else:
            verdict = _not_worse(claim)
        caveat = "" if corpus in judged else "; this alone does not show that context is used"
        sentences.append(f"{where}, {verdict}{caveat}.")
    return sentences
