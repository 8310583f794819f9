"""Writes the verdicts and the table that compare all models, and the warnings below the summary."""

import functools
from collections.abc import Mapping, Sequence

from sbeval.reports.analyse.claims import TOO_FEW, ClaimKey, Claims, LengthClaims, not_compared
from sbeval.reports.analyse.one_number import NLL_CHANGE, Area, CurveNumber, effective_nll_length
from sbeval.reports.analyse.panels import CORPUS_NAMES, text_name
from sbeval.reports.analyse.protocols import windows_text
from sbeval.reports.analyse.ruler import ALIAS_TEXT, TASKS
from sbeval.reports.analyse.verdicts import DOUBTFUL, verdict_sentences
from sbeval.reports.read.fields import display_name, grouped, length_text, name_list
from sbeval.reports.read.models import EvaluatedModel
from sbeval.results.intervals import MINIMUM_CLUSTERS, UNEVEN_COVERAGE, UNEVEN_LOG_DEVIATION
from sbeval.results.records import IDENTICAL_TARGETS

_all_named = functools.partial(name_list, at_most=5)
Lists = Mapping[str, Sequence[str]]
BRACKETS = " [95% interval]"
HEADER = (
    "model",
    "trained at",
    f"more context lowers NLL up to{BRACKETS}",
    "first length worse than at the training length",
    "mean change beyond the training length (over octaves, nats per token)",
    "longest context minus the training length (nats per token)",
)
_COMPARED_WITH = ", compared with "


def headings(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the column headings of a comparison table.

    They are `HEADER` if all models are compared with their training length. If some model was not evaluated at its
    training length, the headings say "the length compared with" in place of "the training length".
    """
    has_other_reference = any(_COMPARED_WITH in cell for row in rows for cell in row[1:2])
    return [
        heading.replace("the training length", "the length compared with") if has_other_reference else heading
        for heading in HEADER
    ]


def side_by_side(
    models: Sequence[EvaluatedModel], claims: Claims, numbers: Sequence[CurveNumber] = ()
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Compares all models on each text.

    Returns:
        The verdicts, one for each text: on a protocol with identical targets if one was run. A verdict names its text
        and protocol unless it is the only one and rests on identical targets. And the rows of a table with the columns
        of `HEADER`, for texts on which at least two models were scored on identical targets.
    """
    areas = {(number.setting, *number.text): number.area for number in numbers if number.metric == NLL_CHANGE}
    usable = {key: claim for key, claim in claims.items() if not claim.obstacle}
    texts = dict.fromkeys((corpus, protocol) for _, corpus, protocol in usable)
    identical = [text for text in texts if text[1] in IDENTICAL_TARGETS]
    judged = [text for text in texts if text in identical or text[0] not in dict(identical)]
    verdicts, rows = [], []
    for corpus, protocol in judged:
        of_models = [(model.label, claim) for model in models if (claim := usable.get((model.label, corpus, protocol)))]
        where = text_name(corpus, protocol)
        is_identical = (corpus, protocol) in identical
        if verdict := verdict_sentences(protocol, of_models):
            place = where if is_identical else f"{windows_text(protocol)} ({where})"
            verdicts.append(verdict if is_identical and len(judged) == 1 else f"{place}: {verdict}")
        if is_identical and len(of_models) > 1:
            suffix = "" if len(identical) == 1 else f" ({where})"
            rows += [_row(label + suffix, claim, areas.get((label, corpus, protocol))) for label, claim in of_models]
    return verdicts, rows


def _row(label: str, claim: LengthClaims, area: Area | None) -> tuple[str, ...]:
    trained = claim.training_length_tokens
    last = claim.differences[-1] if claim.differences else None
    longest = max(claim.lengths)
    further, reference = claim.beyond_reference, claim.reference_tokens
    other_reference = f"{_COMPARED_WITH}{length_text(reference)}" if reference and reference != trained else ""
    effective = effective_nll_length(claim)
    raises = claim.raises_from_tokens
    mark = f" {DOUBTFUL}" if claim.doubtful else ""
    without = not_compared(claim.lengths, reference or trained) or "not measured"
    if not further:
        raised = without
    elif raises:
        raised = length_text(raises)
    else:
        raised = f"nowhere measurably up to {length_text(longest)}"
    return (
        label,
        (length_text(trained) if trained else "not recorded") + other_reference,
        "" if effective is None else effective.text,
        raised,
        f"{area.text}{mark}" if area is not None else without,
        f"{length_text(longest)}: {last.text}{mark}" if further and last is not None else without,
    )


def dropped_lengths(models: Sequence[EvaluatedModel]) -> list[str]:
    """Returns texts such as "64K of TASK for MODEL" on context lengths that were requested but skipped.

    A length is left out if another run of the model evaluated it.
    """
    places: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for model in models:
        tasks = grouped((task.name, task.record) for _, task in model.task_runs() if task.record is not None)
        for name, of_task in tasks.items():
            evaluated = {length for record in of_task for length in record.lengths}
            dropped = {length for record in of_task for length in record.dropped_lengths} - evaluated
            if dropped:
                places.setdefault((tuple(sorted(dropped)), display_name(name)), []).append(model.label)
    by_models = grouped(((lengths, tuple(labels)), task) for (lengths, task), labels in places.items())
    return [
        f"{name_list(map(length_text, lengths))} of {_all_named(tasks)} for {_all_named(labels)}"
        for (lengths, labels), tasks in by_models.items()
    ]


def caveats(
    claims: Claims, ruler_missing: Lists, ruler_apart: Lists, ruler_filled: Lists, dropped: Sequence[str] = ()
) -> list[str]:
    """Returns the warnings below the summary.

    Args:
        claims: the paired differences of NLL between lengths.
        ruler_missing: model label to the RULER tasks that it did not run, for models that ran at least one.
        ruler_apart: model label to its tasks that do not count in RULER's averages (`ruler.apart`).
        ruler_filled: the code that generated RULER's prompts, to the labels of models run with them
            (`ruler.filled_by`).
        dropped: the texts that `dropped_lengths` returns.
    """
    usable = {key for key, claim in claims.items() if not claim.obstacle}
    remarks = []
    if any(protocol in IDENTICAL_TARGETS for _, _, protocol in usable):
        remarks.append(
            "Only identical targets show whether a model uses context. Differences between lengths are paired by "
            "document, and measurable if the whole 95% band is on one side of zero (max-t over all lengths, bootstrap "
            "over documents). More context lowers NLL up to the last length with a measurable fall from the next "
            "shorter length, before any measurable rise. More context raises NLL from the first length beyond the "
            "training length (or beyond the longest length compared within it) with NLL measurably above its value "
            "there. A model breaks if NLL at that first length is measurably above NLL at every shorter length."
        )
    if doubtful := dict.fromkeys(key[1:] for key in claims if claims[key].doubtful):
        remarks.append(
            f"{DOUBTFUL}: intervals and bands for "
            f"{name_list([f'{protocol} on {CORPUS_NAMES.get(corpus, corpus)}' for corpus, protocol in doubtful])} are "
            "doubtful. The documents' sizes have a standard deviation of log tokens above "
            f"{UNEVEN_LOG_DEVIATION:g}, so that a few of them weigh as much as all others; on such texts 95% "
            f"intervals cover {UNEVEN_COVERAGE} in simulations."
        )
    if alone := _without_identical_targets(claims, usable):
        remarks.append(
            f"No result here shows use of context by {alone}: that needs {_lacking(claims)}. In windows of other "
            "protocols NLL may fall with length even if a model uses no more context, because most targets have less "
            "context than the length says."
        )
    if unlogged := {label for (label, _, _), claim in claims.items() if "samples were not logged" in claim.obstacle}:
        names = _all_named(sorted(unlogged))
        remarks.append(f"Missing: paired differences of {names}; run with --log_samples to get them.")
    if dropped:
        remarks.append(
            f"Context lengths left out because the task's text or the model is shorter: {'; '.join(dropped)}."
        )
    if ruler_apart:
        tasks = name_list(dict.fromkeys(task for tasks in ruler_apart.values() for task in tasks))
        remarks.append(f"Left out of RULER's averages: {tasks} for {_all_named(ruler_apart)} ({ALIAS_TEXT}).")
    if len(ruler_filled) > 1:
        named = "; ".join(f"{rule} for {_all_named(labels)}" for rule, labels in ruler_filled.items())
        remarks.append(f"RULER's prompts were filled by different rules, so these scores are not comparable: {named}.")
    return remarks + _not_run(claims) + _ruler_not_run(ruler_missing)


def _without_identical_targets(claims: Claims, usable: set[ClaimKey]) -> str:
    with_identical = {(label, corpus) for label, corpus, protocol in usable if protocol in IDENTICAL_TARGETS}
    lacking = dict.fromkeys((label, corpus) for label, corpus, _ in claims if (label, corpus) not in with_identical)
    labels_with_identical = {label for label, _ in with_identical}
    places = {(label, corpus): f" on {CORPUS_NAMES.get(corpus, corpus)}" for label, corpus in lacking}
    return _all_named(
        dict.fromkeys(key[0] + (place if key[0] in labels_with_identical else "") for key, place in places.items())
    )


def _lacking(claims: Claims) -> str:
    """Returns which requirements models lack for comparing lengths on identical targets, joined by "and"."""
    needs = {}
    for label, corpus, _ in claims:
        keys = [key for protocol in IDENTICAL_TARGETS if (key := (label, corpus, protocol)) in claims]
        obstacle = min((claims[key].obstacle for key in keys), key=bool, default=None)
        if obstacle is None:
            needs[0] = "the same targets at every length (fixed_target)"
        elif obstacle == TOO_FEW:
            needs[1] = f"at least {MINIMUM_CLUSTERS} documents"
        elif obstacle:
            needs[2] = "logged samples" if "logged" in obstacle else "two lengths or more on the same targets"
    return " and ".join(needs[order] for order in sorted(needs))


def _not_run(claims: Claims) -> list[str]:
    labels = dict.fromkeys(label for label, _, _ in claims)
    remarks = []
    for corpus, protocol in dict.fromkeys((corpus, protocol) for _, corpus, protocol in claims):
        measured = [label for label in labels if any(key[:2] == (label, corpus) for key in claims)]
        absent = [label for label in measured if (label, corpus, protocol) not in claims]
        if absent:
            remarks.append(f"Missing: {protocol} on {CORPUS_NAMES.get(corpus, corpus)} for {_all_named(absent)}.")
    return remarks


def _ruler_not_run(missing: Lists) -> list[str]:
    lacking = grouped((tuple(tasks), label) for label, tasks in missing.items() if tasks)
    parts = [f"{name_list(tasks)} for {_all_named(labels)}" for tasks, labels in lacking.items()]
    return [f"Missing of RULER's {len(TASKS)} tasks: {'; '.join(parts)}."] if parts else []
