"""Compares two models on identical targets, length by length, for a person or for a CI job that guards a checkpoint."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from sbeval.errors import UserError
from sbeval.reports.analyse.compare_lengths import RISE_SHARE, ComparedLength, Measured, compare_documents
from sbeval.reports.analyse.compare_scores import ComparedScore, compare_scores
from sbeval.reports.analyse.one_number.compared import ComparedEffective, compare_effective
from sbeval.reports.analyse.statistics import CONFIDENCE
from sbeval.reports.build import load_results
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.results import Results, records
from sbeval.reports.read.samples import DOCUMENT_SUMS
from sbeval.results.digits import with_interval
from sbeval.results.intervals import MINIMUM_CLUSTERS, UNEVEN_COVERAGE

LEAST_EFFECT = 0.02
"""Nats a token, bits a byte or a score's own unit; seeds of one recipe stay within it at lengths they cope with."""
BEYOND, OVER_OCTAVES = "mean change beyond the training length", "mean over octaves"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Everything two models were compared on.

    Attributes:
        reference: label of the first model.
        candidate: label of the second model.
        lengths: one entry a corpus, protocol and length.
        effective: one entry a corpus with identical targets.
        scores: one entry a length of RULER, and one an ordinary task.
        obstacles: what could not be compared, and why.
        least_effect: what a whole band has to exceed to count, in each number's own unit.
    """

    reference: str
    candidate: str
    lengths: tuple[ComparedLength, ...]
    effective: tuple[ComparedEffective, ...]
    scores: tuple[ComparedScore, ...]
    obstacles: tuple[str, ...]
    least_effect: float = LEAST_EFFECT

    @property
    def judged(self) -> bool:
        """Whether anything has a band, without which nothing is known to be worse or not."""
        lows = [one.low for one in self.lengths] + [one.low for one in self.scores]
        return not all(map(math.isnan, lows))

    @property
    def worse(self) -> bool:
        """Whether the candidate is certainly worse somewhere by more than the least effect, or in effective length."""
        everything: list[ComparedLength | ComparedScore] = [*self.lengths, *self.scores]
        return any(one.worse_by(self.least_effect) for one in everything) or any(one.worse for one in self.effective)

    def text(self) -> str:
        """Returns the comparison as lines for a terminal."""
        lines = [
            f"{self.candidate} minus {self.reference}, paired; 95% bands that hold for all numbers at once",
            f"(worse: the whole band is beyond {self.least_effect:g}, and beyond {RISE_SHARE:.0%} of what the "
            "reference itself loses from its training length to there)",
        ]
        for corpus, protocol, unit in dict.fromkeys((one.corpus, one.protocol, one.unit) for one in self.lengths):
            own = [one for one in self.lengths if (one.corpus, one.protocol) == (corpus, protocol)]
            documents = "1 document" if own[0].clusters == 1 else f"{own[0].clusters} documents"
            lines += ["", f"{corpus}, {protocol} ({unit}, {documents}; above zero is worse)"]
            if math.isnan(own[0].low):
                lines.append(f"  no intervals and no verdicts: they take {MINIMUM_CLUSTERS} documents")
            if own[0].doubtful:
                lines.append(f"  doubtful bands: the documents differ much in size, so that 95% are {UNEVEN_COVERAGE}")
            for one in own:
                verdict = "better" if one.high < 0 else self._verdict(one)
                length = one.context_length_tokens
                context = f"{length_text(length):>6}" if length else BEYOND
                lines.append(f"  {context}  {with_interval(one.estimate, one.low, one.high)}  {verdict}".rstrip())
        for pair in self.effective:
            lines += ["", f"{pair.corpus}: effective length {pair.candidate.text}, against {pair.reference.text}"]
            lines[-1] += "  worse" if pair.worse else ""
        for group in dict.fromkeys(score.group for score in self.scores):
            scores = [score for score in self.scores if score.group == group]
            counted = f", {scores[0].samples} samples" if scores[0].context_length_tokens is not None else ""
            lines += ["", f"{group} (score{counted}; verdicts follow each score's own direction)"]
            lines += [self._score_line(score) for score in scores]
        lines += ["", *self.obstacles] if self.obstacles else []
        return "\n".join(lines)

    def _verdict(self, one: ComparedLength | ComparedScore) -> str:
        if one.worse_by(self.least_effect):
            return "worse"
        return "worse by too little to count" if one.worse else ""

    def _score_line(self, score: ComparedScore) -> str:
        length = score.context_length_tokens
        named = f"{score.name} ({score.samples} samples)" if score.name else OVER_OCTAVES
        place = f"{length_text(length):>6}" if length else named
        verdict = "better" if score.better else self._verdict(score)
        return f"  {place}  {with_interval(score.estimate, score.low, score.high)}  {verdict}".rstrip()


def compare(
    reference: Path | str,
    candidate: Path | str,
    *,
    paths: Iterable[Path | str] = (),
    labels: Mapping[str, str] | None = None,
    least_effect: float = LEAST_EFFECT,
) -> Comparison:
    """Compares two models; bands hold at once over all texts, protocols, lengths and tasks.

    Args:
        reference: a folder or file with the results of one model, or the name of a model in `paths`.
        candidate: likewise, the one to be judged.
        paths: results in which names are looked up.
        labels: names to show in place of the checkpoints' own.
        least_effect: what a whole band has to exceed to count as worse, in each number's own unit.

    Raises:
        UserError: a name or folder does not stand for one model, or the two share nothing that can be compared.
    """
    first, second = pair_of_models(reference, candidate, paths=paths, labels=labels)
    texts = measured(first), measured(second)

    def compared(
        confidence: float,
    ) -> tuple[list[ComparedLength], list[ComparedEffective], list[ComparedScore], list[str]]:
        lengths, obstacles = compare_documents(*texts, confidence=confidence)
        effective = compare_effective(*texts, least_effect=least_effect, confidence=confidence)
        scores, more = compare_scores(first[:2], second[:2], confidence=confidence)
        return lengths, effective, scores, obstacles + more

    lengths, effective, scores, obstacles = compared(CONFIDENCE)
    groups = len({(one.corpus, one.protocol) for one in lengths}) + len({score.group for score in scores})
    groups += len(effective)
    if groups > 1:
        lengths, effective, scores, obstacles = compared(1 - (1 - CONFIDENCE) / groups)
    if not lengths and not scores:
        reasons = " ".join(obstacles) or "they have no text, protocol or task in common."
        raise UserError(
            f"Expected {first.shown} and {second.shown} to share results that can be compared in pairs: {reasons}"
        )
    return Comparison(
        reference=first.shown,
        candidate=second.shown,
        lengths=tuple(lengths),
        effective=tuple(effective),
        scores=tuple(scores),
        obstacles=tuple(obstacles),
        least_effect=least_effect,
    )


class Side(NamedTuple):
    """One of two models: the results it stands in, its label there, and the name to show."""

    results: Results
    label: str
    shown: str


def pair_of_models(
    reference: Path | str,
    candidate: Path | str,
    *,
    paths: Iterable[Path | str] = (),
    labels: Mapping[str, str] | None = None,
) -> tuple[Side, Side]:
    """Finds the two models of a comparison; arguments and errors are those of `compare`."""
    given = list(paths)
    shared = load_results(given, labels=labels) if given else None
    first, first_label = _one_model(reference, shared, labels)
    second, second_label = _one_model(candidate, shared, labels)
    alike = first_label == second_label and first is not second
    return (
        Side(first, first_label, f"{first_label} ({reference})" if alike else first_label),
        Side(second, second_label, f"{second_label} ({candidate})" if alike else second_label),
    )


def _one_model(name: Path | str, shared: Results | None, labels: Mapping[str, str] | None) -> tuple[Results, str]:
    if shared is not None:
        for model in shared.models:
            if str(name) in (model.label, model.record.name):
                return shared, model.label
    if not Path(name).exists():
        known = ", ".join(model.label for model in shared.models) if shared else "none given"
        raise UserError(f"Expected a folder of results or the name of a model ({known}), found {str(name)!r}.")
    results = load_results([name], labels=labels)
    if len(results.models) != 1:
        found = ", ".join(model.label for model in results.models)
        raise UserError(f"Expected the results of one model in {name}, found {found}; give them apart or by name.")
    return results, results.models[0].label


def measured(side: Side) -> list[Measured]:
    """Returns the sums of every text and protocol of a model."""
    rows, label = side.results.measurements, side.label
    trained = side.results.model(label).record.training_length_tokens
    own = rows[(rows["setting"] == label) & (rows["family"] == "perplexity") & (rows["protocol"] != "position")]
    return [
        Measured(
            task=str(row["task"]),
            corpus=str(row["corpus"]),
            corpus_sha256=_text(row["corpus_sha256"]),
            protocol=str(row["protocol"]),
            tokenizer_sha256=_text(row["tokenizer_sha256"]),
            sums=side.results[DOCUMENT_SUMS].get((label, row["task"])),
            training_length_tokens=trained,
        )
        for row in records(own.drop_duplicates(["task", "corpus_sha256", "protocol"]))
    ]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and not pd.isna(value) else None
