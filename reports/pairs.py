"""Paired differences between two models: NLL on the same targets, effective lengths, and scores on the same samples.

`paired_differences` computes them: `--compare` asks for all numbers of two models, a rule of a policy for those of its
task. Every difference is the number of the candidate, the model to be judged, minus that of the reference. Differences
form groups, such as all lengths of one text and perplexity protocol. Confidence intervals are simultaneous over the
differences of a group. An effective length is the length up to which more context lowers NLL.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sbeval.reports.analyse.claims import length_claims
from sbeval.reports.analyse.one_number import effective_nll_length
from sbeval.reports.analyse.paired import PairedDifference, metric_differences, ruler_differences, task_difference
from sbeval.reports.analyse.statistics import Estimate, change_weights, simultaneous_band
from sbeval.reports.analyse.suite import SuiteRow, divided_tasks, suite_rows
from sbeval.reports.read.fields import name_list
from sbeval.reports.read.results import Results, records
from sbeval.reports.read.samples import (
    DOCUMENT_SUMS,
    NO_SAMPLES,
    SAMPLE_SCORES,
    MetricKey,
    SampleScores,
    SumsByDocument,
)
from sbeval.results.intervals import MINIMUM_CLUSTERS
from sbeval.results.records import IDENTICAL_TARGETS

NATS = "nats per token"
BITS = "bits per byte"
SCORE = "score"
OCTAVES = "octaves"
ORDINARY = "ordinary tasks"
EVERYTHING = "*"
RULER = "ruler"
OTHER_TOKENIZERS = "the tokenizers differ"
_ROUNDING = 1e-9
"""Relative tolerance for sizes in bytes: a run may record fractions of the bytes of a page, which are rounded."""
_BY_CHANCE = 0.5
"""If models with different tokenizers scored equal sizes in a smaller share of documents, this counts as coincidence.

Used only if the runs do not record at which bytes targets begin and end.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Difference(Estimate):
    """One number of the candidate minus the same number of the reference, with its confidence interval.

    Attributes:
        group: name of the group of differences whose intervals are simultaneous: a text and protocol, RULER's mean,
            `ORDINARY`, or the effective length on a text.
        name: task and metric of an ordinary lm-eval task, or both effective lengths in words; else empty.
        context_length_tokens: None for a number without a context length, and for the mean over octaves of length. For
            NLL that mean is over lengths beyond the training length of the reference, minus the difference at that
            length.
        unit: `NATS`; `BITS` if the tokenizers differ; `SCORE`; or `OCTAVES` for effective lengths.
        count: number of documents or samples compared.
        higher_is_better: whether a positive difference is an improvement; None if it is not recorded.
        reference_rise: NLL of the reference at this length (or its mean over octaves) minus NLL of the reference at its
            training length, or at the longest evaluated length below it; at least 0, and 0 if there is no such length.
        doubtful: whether documents are so uneven in size that the interval covers the true value in fewer cases than it
            claims.
    """

    group: str
    name: str = ""
    context_length_tokens: int | None = None
    unit: str
    count: int
    higher_is_better: bool | None = False
    reference_rise: float = 0.0
    doubtful: bool = False

    @property
    def change(self) -> tuple[float, float, float]:
        """(How much worse the candidate is, lower end, upper end of the interval); positive numbers mean worse."""
        if self.higher_is_better:
            return -self.estimate, -self.high, -self.low
        return self.estimate, self.low, self.high

    @property
    def worse(self) -> bool:
        """Whether the candidate is measurably worse: the whole interval is on the worse side of zero."""
        return self.change[1] > 0

    @property
    def better(self) -> bool:
        """Whether the candidate is measurably better: the whole interval is on the better side of zero."""
        return self.change[2] < 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The sums of NLL by document of one model on one text and protocol.

    The other fields identify the text, the protocol and the tokenizer, which decide whether and how two models are
    compared.
    """

    corpus: str
    corpus_sha256: str | None
    protocol: str
    tokenizer_sha256: str | None
    sums: SumsByDocument | None
    training_length_tokens: int | None = None
    task: str = ""


class Side(NamedTuple):
    """One of the two models of a comparison: the results it is in, its label there, and the name to show."""

    results: Results
    label: str
    shown: str

    def texts(self) -> list[Measured]:
        """Returns the model's sums of NLL by document for every text and protocol."""
        rows = self.results.measurements[self.results.measurements["setting"] == self.label]
        rows = rows[(rows["family"] == "perplexity") & (rows["protocol"] != "position")]
        return [
            Measured(
                task=str(row["task"]),
                corpus=str(row["corpus"]),
                corpus_sha256=_text(row["corpus_sha256"]),
                protocol=str(row["protocol"]),
                tokenizer_sha256=_text(row["tokenizer_sha256"]),
                sums=self.results.behind(DOCUMENT_SUMS, row),
                training_length_tokens=self.results.model(self.label).origin_length_tokens,
            )
            for row in records(rows.drop_duplicates(["task", "corpus_sha256", "protocol"]))
        ]

    def samples(self) -> dict[str, SampleScores]:
        """Returns name of a task to the scores of the model's samples in it."""
        logged = self.results[SAMPLE_SCORES]
        return {task: scores for (label, task), scores in logged.items() if label == self.label}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


class WeightedSum(NamedTuple):
    """A weighted sum of the metrics of one task, such as their mean over octaves of context length."""

    weights: Mapping[MetricKey, float]
    higher_is_better: bool | None


def paired_differences(
    sides: tuple[Side, Side],
    task: str = EVERYTHING,
    *,
    confidence: float,
    least_effect: float = 0.0,
    sums: Sequence[WeightedSum] = (),
) -> tuple[list[Difference], list[str]]:
    """Compares two models in the numbers of a task, with intervals that are simultaneous within each group.

    Args:
        sides: reference and candidate.
        task: name of a task, `RULER` for the mean over RULER's tasks, or `EVERYTHING`.
        confidence: probability that the intervals of a group cover all its true differences.
        least_effect: for effective lengths, as in `effective_differences`.
        sums: the numbers to compare, for a task that scores samples.

    Returns:
        The differences (one for each of `sums`, or none), and texts on numbers that could not be compared.
    """
    texts = [[text for text in side.texts() if task in (EVERYTHING, text.task)] for side in sides]
    if task == EVERYTHING:
        lengths, obstacles = text_differences(*texts, confidence=confidence)
        effective = effective_differences(*texts, least_effect=least_effect, confidence=confidence)
        scores, further = score_differences(*sides, confidence=confidence)
        return [*lengths, *effective, *scores], [*obstacles, *further]
    if any(texts):
        return text_differences(*texts, confidence=confidence)
    base, logged = (side.samples() for side in sides)
    if task == RULER:
        ruler, _ = ruler_differences(logged, base, confidence=confidence)
        of_ruler: dict[str, Any] = {"group": RULER, "higher_is_better": True}
        return [scored(each, context_length_tokens=length, **of_ruler) for length, each in ruler.items()], []
    if task not in base or task not in logged:
        tasks = dict.fromkeys(known for side in sides for known in side.results.tasks)
        unknown = f"neither has run this task; there are {name_list(tasks, at_most=6)}"
        return [], ["one of the two has no logged samples of this task" if task in tasks else unknown]
    metrics = list(dict.fromkeys(metric for each in sums for metric in each.weights))
    weights_MK = np.array([[each.weights.get(metric, 0.0) for each in sums] for metric in metrics])
    options: dict[str, Any] = {"weights_MK": weights_MK, "confidence": confidence}
    paired = metric_differences(logged[task], base[task], metrics, **options) if metrics else []
    ways = [each.higher_is_better for each in sums]
    return [scored(each, group=task, higher_is_better=way) for each, way in zip(paired, ways, strict=False)], []


def text_differences(
    reference: Iterable[Measured], candidate: Iterable[Measured], *, confidence: float
) -> tuple[list[Difference], list[str]]:
    """Compares the NLL of two models on all texts and protocols that both were run on.

    Returns:
        The differences, and a sentence for each text on which they could not be compared, or only on some documents.
    """
    known: dict[tuple[str, str], Measured] = {}
    for measured in reference:  # texts are matched by hash, and by name only if no hash is equal
        known[measured.corpus_sha256 or measured.corpus, measured.protocol] = measured
        known.setdefault((measured.corpus, measured.protocol), measured)
    differences: list[Difference] = []
    obstacles: list[str] = []
    for second in candidate:
        by_name = known.get((second.corpus, second.protocol))
        first = known.get((second.corpus_sha256 or second.corpus, second.protocol), by_name)
        compared = [] if first is None else _text_differences(first, second, confidence)
        if isinstance(compared, str):
            obstacles.append(f"{second.corpus}, {second.protocol}: not compared, because {compared}.")
        else:
            differences += compared
            if first is not None and (share := _share_text(first, second)):
                obstacles.append(f"{second.corpus}, {second.protocol}: {share}.")
    return differences, obstacles


def _text_differences(first: Measured, second: Measured, confidence: float) -> list[Difference] | str:
    """Returns the differences at every shared length and in the mean over octaves, or a clause on why there is none."""
    if first.sums is None or second.sums is None:
        return NO_SAMPLES
    if first.corpus_sha256 != second.corpus_sha256:
        return "the texts differ (corpus hash)"
    lengths = [length for length in first.sums.lengths if length in second.sums.lengths]
    if not lengths:
        return "no context length is shared"
    documents = [name for name in second.sums.clusters if name in set(first.sums.clusters)]
    if not documents:
        return "no document is shared"
    same_tokens = _same_tokenizer(first, second)
    scale = 1.0 if same_tokens else math.log(2)
    sizes = [sums.tokens if same_tokens else sums.bytes for sums in (first.sums, second.sums)]
    in_first, in_second = (
        np.ix_([sums.clusters.index(name) for name in documents], [sums.lengths.index(length) for length in lengths])
        for sums in (first.sums, second.sums)
    )
    size_CK = sizes[0][in_first]
    same_C = np.isclose(size_CK, sizes[1][in_second], rtol=_ROUNDING, atol=0).all(axis=1)
    same_C &= np.isclose(size_CK, size_CK[:, :1], rtol=_ROUNDING, atol=0).all(axis=1) & (size_CK[:, 0] > 0)
    if same_tokens:
        blocks = [[sums.blocks.get(name) for name in documents] for sums in (first.sums, second.sums)]
        same_C &= [not (targets and base) or targets == base for base, targets in zip(*blocks, strict=True)]
    else:
        same_C &= [_same_bytes(first, second, name) for name in documents]
        if not _known_bytes(first, second) and same_C.mean() < _BY_CHANCE:
            same_C[:] = False
    if not same_C.any():
        return "no document has identical targets" if same_tokens else _other_tokenizers(second, len(documents))
    differences_CK = (second.sums.nll_nats[in_second] - first.sums.nll_nats[in_first])[same_C]
    # NLL of the reference model at each of its lengths, on the same documents
    compared = in_first[0][same_C, 0]
    levels_K = first.sums.nll_nats[compared].sum(axis=0) / scale / sizes[0][compared].sum(axis=0)
    trained = [length for length in first.sums.lengths if length <= (first.training_length_tokens or 0)]
    rises_K = levels_K[in_first[1][0]] - (levels_K[len(trained) - 1] if trained else math.inf)
    places: list[int | None] = [*lengths]
    within = [length for length in trained if length in lengths]
    weights_K = change_weights(lengths, within[-1] if within else None)
    if weights_K is not None:
        differences_CK = np.column_stack([differences_CK, differences_CK @ weights_K])
        rises_K = np.append(rises_K, levels_K[in_first[1][0]] @ weights_K)
        places.append(None)
    band = simultaneous_band(differences_CK / scale, size_CK[same_C, 0], confidence=confidence)
    return [
        Difference(
            group=f"{second.corpus}, {second.protocol}",
            context_length_tokens=length,
            unit=NATS if same_tokens else BITS,
            estimate=estimate,
            low=low,
            high=high,
            count=band.clusters,
            reference_rise=max(0.0, rise),
            doubtful=band.doubtful,
        )
        for length, rise, (estimate, low, high) in zip(places, rises_K.tolist(), band, strict=True)
    ]


def _same_tokenizer(first: Measured, second: Measured) -> bool:
    return first.tokenizer_sha256 == second.tokenizer_sha256


def _known_bytes(first: Measured, second: Measured) -> set[str]:
    """Returns the shared documents for which both runs record the bytes at which targets begin and end."""
    spans = [set(measured.sums.byte_blocks) if measured.sums is not None else set() for measured in (first, second)]
    return spans[0] & spans[1]


def _same_bytes(first: Measured, second: Measured, document: str) -> bool:
    """Whether targets in a document begin and end at the same bytes in both runs; True if a run records no bytes."""
    spans = [measured.sums.byte_blocks.get(document) for measured in (first, second) if measured.sums is not None]
    return None in spans or spans[0] == spans[1]


def _other_tokenizers(second: Measured, documents: int) -> str:
    """Returns why two models with different tokenizers cannot be compared on a text, and a protocol that allows it."""
    among = "the one shared document" if documents == 1 else f"the {documents} shared documents"
    reason = f"{OTHER_TOKENIZERS} and cut the text at other places: in none of {among} the targets are the same text"
    if second.protocol == "rolling":  # it scores every token of a document, so no other protocol would help
        return reason
    why = "a sample logs one sum over its targets, which cannot be divided where the other tokenizer cuts"
    return f"{reason}; {why}; more data does not help, and the protocol rolling compares the two in bits per byte"


def _share_text(first: Measured, second: Measured) -> str:
    """Returns a text on the share of documents on which two models with different tokenizers are compared.

    It is empty if their tokenizers are the same, or if the runs do not record at which bytes targets begin and end.
    """
    known = _known_bytes(first, second)
    if _same_tokenizer(first, second) or not known:
        return ""
    alike = sum(_same_bytes(first, second, name) for name in known)
    share = f"{alike} of {len(known)} documents ({alike / len(known):.0%})"
    return f"{OTHER_TOKENIZERS}, so {share} are compared: those whose targets begin and end at the same bytes"


def effective_differences(
    reference: Iterable[Measured], candidate: Iterable[Measured], *, least_effect: float, confidence: float
) -> list[Difference]:
    """Compares effective lengths by NLL on texts with identical targets; the intervals of both models hold at once.

    For a model whose NLL falls at no length, the effective length is set to one token, so that the difference in
    octaves is finite.

    Args:
        reference: sums of the reference.
        candidate: sums of the candidate.
        least_effect: in nats per token. For the candidate's interval, NLL counts as risen from one length to the next
            only if the rise is measurably more than this.
        confidence: probability that the intervals of both models cover their true effective lengths.
    """
    known = {(text.corpus_sha256 or text.corpus, text.protocol): text for text in reference}
    differences = []
    for second in candidate:
        first = known.get((second.corpus_sha256 or second.corpus, second.protocol))
        if first is None or second.protocol not in IDENTICAL_TARGETS:
            continue
        each = 1 - (1 - confidence) / 2
        # effective lengths use only differences between neighbouring lengths: passing no training length skips others
        claims = [length_claims(text.sums, None, confidence=each) for text in (first, second)]
        # show the same effective length as a report, which uses 95% intervals; here only the interval is wider
        named = [length_claims(text.sums, None).lowers_to_tokens for text in (first, second)]
        wide = [
            dataclasses.replace(claim, lowers_to_tokens=tokens) for claim, tokens in zip(claims, named, strict=True)
        ]
        old, new = (
            effective_nll_length(claim, least_loss=loss) for claim, loss in zip(wide, (0, least_effect), strict=True)
        )
        if old is not None and new is not None and claims[0].lengths == claims[1].lengths:
            text = f"{first.corpus}, {first.protocol}"
            ends = [(new.tokens, old.tokens), (new.low, old.high), (new.high, old.low)]
            estimate, low, high = (math.log2(tokens or 1) - math.log2(old_tokens or 1) for tokens, old_tokens in ends)
            differences.append(
                Difference(
                    group=f"{text}: effective length",
                    name=f"{text}: effective length {new.text}, against {old.text}",
                    unit=OCTAVES,
                    estimate=estimate,
                    low=low,
                    high=high,
                    count=claims[0].clusters,
                    higher_is_better=True,
                )
            )
    return differences


def score_differences(reference: Side, candidate: Side, *, confidence: float) -> tuple[list[Difference], list[str]]:
    """Compares the scores of two models: RULER's mean and all ordinary lm-eval tasks.

    Returns:
        The differences, and a sentence for each task that could not be compared.
    """
    ruler, tasks = ruler_differences(candidate.samples(), reference.samples(), confidence=confidence)
    group = f"RULER, mean over {len(tasks)} {'task' if len(tasks) == 1 else 'tasks'}"
    differences = [
        scored(paired, group=group, higher_is_better=True, context_length_tokens=length)
        for length, paired in ruler.items()
        if not math.isnan(paired.low)
    ]
    obstacles = [_too_few("RULER", paired) for paired in list(ruler.values())[:1] if math.isnan(paired.low)]
    rows = _shared_rows(reference, candidate)
    logged = [candidate.label in row.samples and reference.label in base.samples for row, base in rows]
    unlogged = [row.name for (row, _), has_samples in zip(rows, logged, strict=True) if not has_samples]
    obstacles += [f"{name}: not compared, because {NO_SAMPLES}." for name in unlogged]
    for row, base in itertools.compress(rows, logged):
        paired = task_difference(
            row.samples[candidate.label],
            base.samples[reference.label],
            (row.metric, row.filter_name),
            confidence=1 - (1 - confidence) / sum(logged),
        )
        if paired is None:
            reason = "the runs share no question, or their samples do not add up to the results files' numbers"
            obstacles.append(f"{row.name}: not compared, because {reason}.")
        elif math.isnan(paired.low):
            obstacles.append(_too_few(row.name, paired))
        else:
            differences.append(scored(paired, group=ORDINARY, higher_is_better=row.higher_is_better, name=row.name))
    return differences, obstacles


def _shared_rows(reference: Side, candidate: Side) -> list[tuple[SuiteRow, SuiteRow]]:
    """Returns (row of the candidate, row of the reference) for each ordinary task and metric that both models have."""
    divided = divided_tasks(reference.results) | divided_tasks(candidate.results)
    rows, base = (
        {
            (row.name, row.task, row.metric, row.filter_name): row
            for row in suite_rows(side.results, divided)
            if side.label in row.cells
        }
        for side in (candidate, reference)
    )
    return [(row, base[key]) for key, row in rows.items() if key in base and row.higher_is_better is not None]


def scored(paired: PairedDifference, **of: Any) -> Difference:
    """Converts a paired difference of scores to a `Difference`; `of` are its other fields, such as group and name."""
    band: dict[str, Any] = {"estimate": paired.estimate, "low": paired.low, "high": paired.high}
    return Difference(unit=SCORE, count=paired.samples, **band, **of)


def _too_few(name: str, paired: PairedDifference) -> str:
    count = paired.samples
    return f"{name}: not compared, because only {count} samples are shared and intervals need {MINIMUM_CLUSTERS}."
