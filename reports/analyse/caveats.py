"""What a reader must know about all claims of a report: how they were made, what they do not show, what is missing."""

from collections.abc import Iterable, Mapping, Sequence

from sbeval.reports.analyse.claims import LengthClaims
from sbeval.reports.analyse.panels import CORPUS_WORDS
from sbeval.reports.analyse.ruler import TASKS
from sbeval.results.intervals import MINIMUM_CLUSTERS

_NAMED_AT_MOST = 5


def caveats(
    claims: Mapping[tuple[str, str, str], LengthClaims], ruler_missing: Mapping[str, Sequence[str]]
) -> list[str]:
    """Writes the remarks below the summary.

    Args:
        claims: (model label, corpus, protocol) to what its lengths show.
        ruler_missing: model label to those of RULER's tasks it did not run, for models that ran some.
    """
    usable = {key for key, claim in claims.items() if not claim.obstacle}
    remarks = []
    if any(protocol == "fixed_target" for _, _, protocol in usable):
        remarks.append(
            "Whether context is used is judged on identical targets only, in paired differences between lengths. More "
            "context lowers NLL up to the shortest length from which no longer one is measurably lower; it raises NLL "
            "from the shortest length beyond the training length that is measurably above it. Measurably means: the "
            "whole 95% band, simultaneous over the differences compared (max-t, bootstrap over documents), is on one "
            "side of zero."
        )
    if alone := _without_identical_targets(claims, usable):
        remarks.append(
            f"Nothing here shows use of context by {alone}: that takes the same targets at every length "
            f"(fixed_target), logged samples, and at least {MINIMUM_CLUSTERS} documents. In windows of other protocols "
            "every model that does not break improves with length, because fewer targets stand near the start of a "
            "window."
        )
    if unlogged := {label for (label, _, _), claim in claims.items() if "samples were not logged" in claim.obstacle}:
        remarks.append(
            f"Missing: paired differences of {_listed(sorted(unlogged))}; run with --log_samples to get them."
        )
    return remarks + _not_run(claims) + _ruler_not_run(ruler_missing)


def _without_identical_targets(
    claims: Mapping[tuple[str, str, str], LengthClaims], usable: set[tuple[str, str, str]]
) -> str:
    shown = {(label, corpus) for label, corpus, protocol in usable if protocol == "fixed_target"}
    lacking = dict.fromkeys((label, corpus) for label, corpus, _ in claims if (label, corpus) not in shown)
    somewhere = {label for label, _ in shown}
    return _listed(
        dict.fromkeys(
            f"{label} on {CORPUS_WORDS.get(corpus, corpus)}" if label in somewhere else label
            for label, corpus in lacking
        )
    )


def _not_run(claims: Mapping[tuple[str, str, str], LengthClaims]) -> list[str]:
    labels = dict.fromkeys(label for label, _, _ in claims)
    remarks = []
    for corpus, protocol in dict.fromkeys((corpus, protocol) for _, corpus, protocol in claims):
        absent = [
            label
            for label in labels
            if (label, corpus, protocol) not in claims and any(key[:2] == (label, corpus) for key in claims)
        ]
        if absent:
            remarks.append(f"Missing: {protocol} on {CORPUS_WORDS.get(corpus, corpus)} for {_listed(absent)}.")
    return remarks


def _ruler_not_run(missing: Mapping[str, Sequence[str]]) -> list[str]:
    lacking: dict[tuple[str, ...], list[str]] = {}
    for label, tasks in missing.items():
        if tasks:
            lacking.setdefault(tuple(tasks), []).append(label)
    parts = [f"{_joined(tasks)} for {_listed(labels)}" for tasks, labels in lacking.items()]
    return [f"Missing of RULER's {len(TASKS)} tasks: {'; '.join(parts)}."] if parts else []


def _listed(labels: Iterable[str]) -> str:
    names = list(labels)
    if len(names) > _NAMED_AT_MOST:
        names = [*names[: _NAMED_AT_MOST - 1], f"{len(names) - _NAMED_AT_MOST + 1} others"]
    return _joined(names)


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
