"""What all models show side by side: a sentence and a table before each model's own words."""

import dataclasses
from collections.abc import Mapping, Sequence

from sbeval.reports.analyse.claims import LengthClaims
from sbeval.reports.analyse.findings import difference_text
from sbeval.reports.analyse.panels import CORPUS_WORDS
from sbeval.reports.read.models import EvaluatedModel, length_text

_NAMED_AT_MOST = 4
HEADER = (
    "model",
    "trained at",
    "more context lowers NLL up to",
    "worse than at the training length from",
    "longest context minus training length (nats per token)",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """All models side by side.

    Attributes:
        sentences: one for each text with identical targets for two models or more.
        rows: cells in the order of `HEADER`, one row a model and text; empty for fewer than two.
    """

    sentences: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def side_by_side(models: Sequence[EvaluatedModel], claims: Mapping[tuple[str, str, str], LengthClaims]) -> Overview:
    """Compares the models on identical targets, from (model label, corpus, protocol) to what its lengths show."""
    usable = {
        (label, corpus): claim
        for (label, corpus, protocol), claim in claims.items()
        if protocol == "fixed_target" and not claim.obstacle
    }
    corpora = list(dict.fromkeys(corpus for _, corpus in usable))
    sentences, rows = [], []
    for corpus in corpora:
        own = [(model.label, claim) for model in models if (claim := usable.get((model.label, corpus)))]
        if len(own) < 2:
            continue
        where = CORPUS_WORDS.get(corpus, corpus)
        sentences.append(_sentence(where, own))
        rows += [_row(label if len(corpora) == 1 else f"{label} ({where})", claim) for label, claim in own]
    return Overview(sentences=tuple(part for part in sentences if part), rows=tuple(rows))


def _sentence(where: str, own: Sequence[tuple[str, LengthClaims]]) -> str:
    better, alike = [], []
    worse: dict[int, list[str]] = {}
    for label, claim in own:
        if claim.reference_tokens is None or max(claim.lengths) == claim.reference_tokens:
            continue
        if claim.raises_from_tokens is not None:
            worse.setdefault(claim.raises_from_tokens, []).append(label)
        elif claim.differences[-1].high < 0:
            better.append(label)
        else:
            alike.append(label)
    compared = len(better) + len(alike) + sum(map(len, worse.values()))
    if compared < 2:
        return ""
    parts = []
    if better:
        parts.append(f"lower NLL at their longest context than at their training length: {_listed(better)}")
    if alike:
        parts.append(f"neither lower there nor higher at any length beyond it: {_listed(alike)}")
    parts += [f"higher from {length_text(length)} on: {_listed(labels)}" for length, labels in sorted(worse.items())]
    return f"On identical targets ({where}), of {compared} models: {'; '.join(parts)}."


def _row(label: str, claim: LengthClaims) -> tuple[str, ...]:
    trained, last = claim.training_length_tokens, claim.differences[-1] if claim.differences else None
    longest = max(claim.lengths)
    further = claim.reference_tokens is not None and longest > claim.reference_tokens
    lowers, raises = claim.lowers_to_tokens, claim.raises_from_tokens
    return (
        label,
        length_text(trained) if trained else "not recorded",
        "none" if lowers is None else length_text(lowers) + (", the longest" if lowers == longest else ""),
        (length_text(raises) if raises else f"nowhere up to {length_text(longest)}") if further else "not evaluated",
        f"{length_text(longest)}: {difference_text(last)}" if further and last is not None else "not evaluated",
    )


def _listed(labels: Sequence[str]) -> str:
    shown = labels if len(labels) <= _NAMED_AT_MOST else [*labels[: _NAMED_AT_MOST - 1]]
    more = f" and {len(labels) - len(shown)} others" if len(shown) < len(labels) else ""
    return ", ".join(shown) + more
