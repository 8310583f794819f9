"""Judges whether a candidate model is worse than a reference model: by one number, and by all numbers that both have.

A rule states the largest change for the worse that it allows. It passes if the whole confidence interval of the change
is within this limit, and fails if the whole interval is beyond it. Otherwise there is not enough data. If documents
differ so much in size that the interval is doubtful, a rule can fail but not pass. The function `compare` applies the
rule that comes with sbeval (`sbeval/fail_if_worse.yaml`) to every number; `gate` applies the rules of a policy, which
is a file of rules.

The limit is above zero because models differ measurably even if nothing is wrong: of checkpoints that differ only in
their training seed, ten of twelve ordered pairs do. If NLL of the reference itself rises beyond its training length,
the rule also allows a share of that rise. Differences form groups, such as all lengths of one text. Their intervals
hold at once over all groups, so that equal models fail in 1 % of simulations, however many groups there are. A model
that is worse at every length of one group fails under `--fail-if-worse` in 4 to 14 % of cases if its NLL is higher by
0.03 nats, in 58 to 85 % at 0.05, and always at 0.1.
"""

import dataclasses
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sbeval.errors import UserError
from sbeval.reports.analyse.panels import seen_text
from sbeval.reports.analyse.statistics import CONFIDENCE
from sbeval.reports.build import load_results
from sbeval.reports.pairs import OCTAVES, ORDINARY, SCORE, Difference, Side, paired_differences
from sbeval.reports.read.fields import grouped, length_text
from sbeval.reports.read.files import Labels, Paths, Place
from sbeval.reports.read.results import Results
from sbeval.results.intervals import MINIMUM_CLUSTERS, UNEVEN_COVERAGE, with_interval

if TYPE_CHECKING:
    from sbeval.policy import Rule

logger = logging.getLogger(__name__)
BEYOND = "mean change beyond the training length"
OVER_OCTAVES = "mean over octaves"
_FEW = f"intervals need {MINIMUM_CLUSTERS} documents or samples that both models share"
_DOUBTFUL = (
    f"the documents differ much in size, so 95% bands cover {UNEVEN_COVERAGE} in simulations; score documents"
    " of similar sizes"
)
Verdict = Literal["pass", "fail", "not enough data", "not comparable"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One number of the candidate compared with that of the reference, and the rule that judges the difference.

    Attributes:
        rule: the rule.
        name: name of the number.
        change: how much worse the candidate is: positive if it is worse; NaN if unknown.
        low: lower end of the change's confidence interval, which is simultaneous with those of all other numbers.
        high: upper end of this interval.
        allowed: largest change for the worse that the rule allows.
        reason: why there is no interval, or why it may cover less often than it claims; else empty.
        doubtful: whether the interval covers the true change less often than it claims.
        comparable: False if the models cannot be compared in this number, however much data there is.
    """

    rule: "Rule"
    name: str
    change: float = math.nan
    low: float = math.nan
    high: float = math.nan
    allowed: float
    reason: str = ""
    doubtful: bool = False
    comparable: bool = True

    @property
    def verdict(self) -> Verdict:
        """Pass if the whole interval of the change is at most `allowed`, fail if the whole interval is above it.

        Otherwise there is not enough data, or the models are not comparable. A doubtful interval may fail but not pass:
        a gate that lets a worse model through costs more than one that asks for other documents.
        """
        if not self.comparable:
            return "not comparable"
        if self.high <= self.allowed and not self.doubtful:
            return "pass"
        return "fail" if self.low > self.allowed else "not enough data"

    @property
    def text(self) -> str:
        """The verdict as one or two lines of text for a terminal."""
        change = "" if math.isnan(self.change) else f": {with_interval(self.change, self.low, self.high)}"
        reason = f"\n  {self.reason}" if self.reason else ""
        return f"{self.verdict}: {self.name}{change}, at most {self.allowed:+g} allowed{reason}"


def judge(rule: "Rule", name: str, number: Difference | None, reason: str = "", *, comparable: bool = True) -> Judged:
    """Judges the difference between candidate and reference in one number by a rule.

    Args:
        rule: the rule.
        name: name of the number.
        number: the paired difference; None if it could not be computed.
        reason: why there is no number.
        comparable: False if the models cannot be compared in this number, however much data there is.
    """
    if number is not None and number.higher_is_better is None:
        number, reason = None, "it is not recorded which way is better"
    if number is None:
        return Judged(rule=rule, name=name, allowed=rule.largest_change, reason=reason, comparable=comparable)
    change, low, high = number.change
    few = math.isnan(low)
    doubtful = number.doubtful
    most = max(rule.largest_change, rule.share_of_rise * number.reference_rise)
    return Judged(
        rule=rule,
        name=name,
        change=change,
        low=low,
        high=high,
        allowed=0.0 if number.unit == OCTAVES else most,
        reason=_FEW if few else f"doubtful: {_DOUBTFUL}" if doubtful else "",
        doubtful=doubtful,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All paired differences between two models, and the rule that judges them.

    Attributes:
        reference: displayed name of the reference model.
        candidate: displayed name of the candidate model.
        rule: the rule applied to every number.
        lengths: differences in NLL: one for each text, protocol and context length, and one for each mean over octaves
            of length.
        effective: differences in effective length by NLL: one for each text with identical targets.
        scores: differences in scores: one for each context length of RULER, and one for each ordinary lm-eval task.
        obstacles: sentences on numbers that could not be compared, and why.
        remarks: sentences on compared documents that one of the models was trained on.
    """

    reference: str
    candidate: str
    rule: "Rule"
    lengths: tuple[Difference, ...]
    effective: tuple[Difference, ...]
    scores: tuple[Difference, ...]
    obstacles: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    @property
    def verdicts(self) -> list[Judged]:
        """Every number with the verdict of the rule. An effective length fails if it is measurably shorter."""
        numbers = (*self.lengths, *self.effective, *self.scores)
        return [judge(self.rule, number.name or f"{number.group}, {_place(number)}", number) for number in numbers]

    @property
    def groups(self) -> int:
        """Number of groups of differences, such as all lengths of one text.

        Intervals are simultaneous within each group, and hold at once for all groups.
        """
        return len({number.group for number in (*self.lengths, *self.effective, *self.scores)})

    @property
    def can_be_judged(self) -> bool:
        """Whether any difference has a confidence interval. Without one no change can be judged."""
        return not all(math.isnan(number.low) for number in (*self.lengths, *self.scores))

    @property
    def doubtful(self) -> bool:
        """Whether any difference has a doubtful interval, so that a rule could fail by it but not pass."""
        return any(number.doubtful for number in self.lengths)

    @property
    def worse(self) -> bool:
        """Whether, in some number, the candidate is measurably worse by more than the rule allows."""
        return any(judged.verdict == "fail" for judged in self.verdicts)

    def text(self) -> str:
        """Returns the comparison as lines of text for a terminal."""
        lines = [
            f"{self.candidate} minus {self.reference}, paired; 95% bands, simultaneous over all numbers",
            f"(worse: the whole band is beyond {self.rule.largest_change:g}, and beyond {self.rule.share_of_rise:.0%} "
            "of what the reference itself loses from its training length to there)",
        ]
        for group, numbers in grouped((number.group, number) for number in self.lengths).items():
            documents = "1 document" if numbers[0].count == 1 else f"{numbers[0].count} documents"
            lines += ["", f"{group} ({numbers[0].unit}, {documents}; above zero is worse)"]
            if math.isnan(numbers[0].low):
                lines.append(f"  no intervals and no verdicts: they need {MINIMUM_CLUSTERS} documents")
            if numbers[0].doubtful:
                lines.append(f"  doubtful bands: {_DOUBTFUL}")
            lines += map(self._line, numbers)
        for number in self.effective:
            lines += ["", number.name + ("  worse" if number.worse else "")]
        for group, numbers in grouped((number.group, number) for number in self.scores).items():
            counted = "" if group == ORDINARY else f", {numbers[0].count} samples"
            lines += ["", f"{group} (score{counted}; verdicts follow each score's own direction)"]
            lines += map(self._line, numbers)
        notes = (*self.obstacles, *self.remarks)
        if notes:
            lines += ["", *notes]
        return "\n".join(lines)

    def _line(self, number: Difference) -> str:
        verdict = ""
        if judge(self.rule, "", number).verdict == "fail":
            verdict = "worse"
        elif number.better:
            verdict = "better"
        elif number.worse:
            verdict = "worse by too little to count"
        place = _place(number)
        place = f"{place:>6}" if number.context_length_tokens else place
        return f"  {place}  {with_interval(number.estimate, number.low, number.high)}  {verdict}".rstrip()


def _place(number: Difference) -> str:
    if number.context_length_tokens:
        return length_text(number.context_length_tokens)
    if number.name:
        return f"{number.name} ({number.count} samples)"
    return OVER_OCTAVES if number.unit == SCORE else BEYOND


def compare(
    reference: Place, candidate: Place, *, paths: Paths = (), labels: Labels = None, least_effect: float | None = None
) -> Comparison:
    """Compares two models; confidence intervals hold at once for all texts, protocols, lengths and tasks.

    Args:
        reference: a folder or file with the results of the reference model, or the name of a model in `paths`.
        candidate: folder, file or name for the model to be judged.
        paths: folders and files with results, in which models are looked up by name.
        labels: name of a model or text to the name shown instead.
        least_effect: a number counts as worse if the whole interval of its change for the worse is above this, in the
            unit of the number; None for the value in the rule that comes with sbeval.

    Raises:
        UserError: a name or folder does not identify exactly one model, or the two models have no number in common that
            can be compared.
    """
    (rule,) = rules_of()
    if least_effect is not None:
        rule = rule.changed(largest_change=least_effect)
    return compare_sides(pair_of_models(reference, candidate, paths=paths, labels=labels), rule)


def rules_of(policy: Path | None = None) -> Sequence["Rule"]:
    """Reads the rules of a policy file; if `policy` is None, of the file that comes with sbeval."""
    from sbeval.policy import FAIL_IF_WORSE, read_policy  # imports pydantic, which building a page does not need

    return read_policy(policy or FAIL_IF_WORSE)


def pair_of_models(reference: Place, candidate: Place, *, paths: Paths, labels: Labels) -> tuple[Side, Side]:
    """Finds the results of reference and candidate, and logs the notes on data left out of them.

    It has the arguments of `compare`, and raises `UserError` if a name or folder does not identify exactly one model.
    """
    searched = list(paths)
    shared = load_results(searched, labels=labels) if searched else None
    (first, first_label), (second, second_label) = (_model(name, shared, labels) for name in (reference, candidate))
    for note in dict.fromkeys([*first.notes, *second.notes]):
        logger.warning("%s%s", f"{note.path}: " if note.path else "", note.reason)
    alike = first_label == second_label and first is not second
    return (
        Side(first, first_label, f"{first_label} ({reference})" if alike else first_label),
        Side(second, second_label, f"{second_label} ({candidate})" if alike else second_label),
    )


def _model(name: Place, shared: Results | None, labels: Labels) -> tuple[Results, str]:
    known = shared.models if shared else ()
    for model in known:
        if shared is not None and str(name) in (model.label, model.record.name):
            return shared, model.label
    if not os.path.exists(os.path.expanduser(name)):
        names = ", ".join(model.label for model in known) or "none given"
        raise UserError(f"{str(name)!r} is neither a folder of results nor the name of a model ({names}).")
    results = load_results([name], labels=labels)
    if len(results.models) != 1:
        names = ", ".join(model.label for model in results.models)
        raise UserError(
            f"Expected the results of one model in {name}, found {names}: name a folder for each, or name the models."
        )
    return results, results.models[0].label


def compare_sides(sides: tuple[Side, Side], rule: "Rule", *, other_groups: int = 0) -> Comparison:
    """Compares two models by a rule.

    Args:
        sides: reference and candidate, with their results.
        rule: the rule applied to every number.
        other_groups: number of other groups of differences whose intervals must hold at once with these, such as those
            of other rules of a policy.

    Raises:
        UserError: the models have no number in common that can be compared.
    """
    texts = [side.texts() for side in sides]
    candidate_texts = {text.corpus_sha256 for text in texts[1]}
    shared = [text.corpus_sha256 for text in texts[0] if text.corpus_sha256 in candidate_texts]
    models = [side.results.model(side.label) for side in sides]
    seen = dict.fromkeys(remark for model in models for text in shared for remark in seen_text(model, text))

    def compared(confidence: float) -> Comparison:
        numbers, obstacles = paired_differences(sides, confidence=confidence, least_effect=rule.largest_change)
        return Comparison(
            reference=sides[0].shown,
            candidate=sides[1].shown,
            rule=rule,
            lengths=tuple(number for number in numbers if number.unit not in (OCTAVES, SCORE)),
            effective=tuple(number for number in numbers if number.unit == OCTAVES),
            scores=tuple(number for number in numbers if number.unit == SCORE),
            obstacles=tuple(obstacles),
            remarks=tuple(seen),
        )

    comparison = compared(CONFIDENCE)
    if not comparison.lengths and not comparison.scores:
        reasons = " ".join(comparison.obstacles) or "they have no text, protocol or task in common."
        raise UserError(
            f"{sides[0].shown} and {sides[1].shown} share no results that can be compared in pairs: {reasons}"
        )
    groups = comparison.groups + other_groups
    return comparison if groups == 1 else compared(1 - (1 - CONFIDENCE) / groups)
