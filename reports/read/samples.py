"""Reads lm-eval's samples files: sums of NLL by document, and scores of single samples.

Reports use them to compare two models on the same documents and the same questions.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.foreign_files import fits, usable_number
from sbeval.reports.read.fields import agrees, context_metric, display_name, grouped, length_text
from sbeval.reports.read.files import Notes, read_lines
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.results import Reader, TaskKey, averaging
from sbeval.reports.read.runs import InputLimit, TaskResult, input_limit
from sbeval.results.records import IDENTICAL_TARGETS, metric_key

NO_SAMPLES = "samples were not logged (--log_samples), or do not add up to the results file's numbers"
NOT_ITS_NUMBERS = "do not add up to the results file's numbers and were left out"
_BEHIND_DOCUMENT = "\0"
Blocks = Mapping[str, frozenset[tuple[int, int]]]


class SumsByDocument:
    """Sums of NLL, tokens and bytes in one task, for each source document ("cluster") and context length.

    Attributes:
        lengths: context lengths in tokens, ascending.
        clusters: names of the source documents, sorted.
        nll_nats: sums of NLL in nats, float64 [clusters, lengths].
        tokens: numbers of target tokens, float64 [clusters, lengths]; 0 if a document has no target at a length.
        bytes: numbers of bytes of the targets, float64 [clusters, lengths]; NaN if they are unknown.
        blocks: document to the (start, stop) positions in the text, in tokens, of its contiguous stretches of targets;
            only for protocols with identical targets.
        byte_blocks: document to the (start, stop) positions of the same stretches in bytes of the document. A document
            is missing if some sample does not record its bytes.
    """

    def __init__(
        self,
        sums: dict[int, dict[str, NDArray[np.float64]]],
        blocks: Blocks | None = None,
        byte_blocks: Blocks | None = None,
    ) -> None:
        self.blocks = blocks or {}
        self.byte_blocks = byte_blocks or {}
        self.lengths = sorted(sums)
        self.clusters = sorted({cluster for documents in sums.values() for cluster in documents})
        row = {cluster: index for index, cluster in enumerate(self.clusters)}
        table = np.zeros((3, len(self.clusters), len(self.lengths)))
        for column, length in enumerate(self.lengths):
            for cluster, values in sums[length].items():
                table[:, row[cluster], column] = values
        self.nll_nats, self.tokens, self.bytes = self._table = table

    def documents(self, length: int) -> dict[str, NDArray[np.float64]]:
        """Returns document to float64 [NLL in nats, tokens, bytes], for documents with targets at a context length."""
        column = self.lengths.index(length)
        scored = self.tokens[:, column] > 0
        return {cluster: self._table[:, row, column] for row, cluster in enumerate(self.clusters) if scored[row]}

    @classmethod
    def merged(cls, runs: Sequence["SumsByDocument"]) -> "SumsByDocument":
        """Joins the sums of several runs of one model; if two runs have the same length, the first run is used."""
        sums = {length: run.documents(length) for run in reversed(runs) for length in run.lengths}
        return cls(sums, runs[0].blocks, runs[0].byte_blocks)

    @classmethod
    def averaged(cls, seeds: Sequence["SumsByDocument"]) -> "SumsByDocument":
        """Averages NLL over training seeds, for documents in which all seeds scored the same targets."""
        means = {}
        for length in seeds[0].lengths:
            if all(length in seed.lengths for seed in seeds):
                by_seed = [seed.documents(length) for seed in seeds]
                means[length] = {
                    cluster: np.array([sum(documents[cluster][0] for documents in by_seed) / len(seeds), tokens, size])
                    for cluster, (_, tokens, size) in by_seed[0].items()
                    if all(cluster in documents and documents[cluster][1] == tokens for documents in by_seed)
                    and len({frozenset(blocks) for seed in seeds if (blocks := seed.blocks.get(cluster))}) <= 1
                }
        return cls(means, seeds[0].blocks, seeds[0].byte_blocks)


def document_of(unit: str) -> str:
    """Returns the document that a unit belongs to.

    A unit is a document or, with `by_stretch`, a contiguous stretch of targets in it.
    """
    return unit.partition(_BEHIND_DOCUMENT)[0]


def read_document_sums(
    path: Path, notes: Notes, task: TaskResult | None = None, *, by_stretch: bool = False
) -> SumsByDocument | None:
    """Adds up the sums by document (`ClusterSums` rows) of all samples in a samples file.

    Rows with a sum that is not finite are left out with a note. If the file holds all samples, a context length whose
    sums disagree with the numbers in the results file is left out with a note too.

    Args:
        path: the samples file.
        notes: the list that notes are added to.
        task: the task's results, which the sums are checked against; None to skip that check.
        by_stretch: whether to return sums for each contiguous stretch of targets instead of for each document.

    Returns:
        The sums; None if the file has none.
    """
    blocks_are_targets = task is not None and task.record is not None and task.record.protocol in IDENTICAL_TARGETS
    samples = task.samples_used if task else None
    sums: dict[int, dict[str, NDArray[np.float64]]] = {}
    blocks: dict[str, set[tuple[int, int]]] = defaultdict(set)
    byte_blocks: dict[str, set[tuple[int, int]]] = defaultdict(set)
    without_bytes: set[str] = set()
    bad_rows = lines = 0
    for sample in read_lines(path, notes, samples=samples):
        lines += 1
        block = _block(sample.get("doc"), "start", "stop") if blocks_are_targets else set()
        byte_block = _block(sample.get("doc"), "start_byte", "stop_byte") if blocks_are_targets else set()
        for key, rows in sample.items():
            parsed = context_metric(key)
            if parsed is None or parsed[0] != "nll" or not isinstance(rows, list):
                continue
            documents = sums.setdefault(parsed[1], {})
            for row in rows:
                if not isinstance(row, list) or len(row) != 5:
                    bad_rows += 1
                    continue
                cluster = _BEHIND_DOCUMENT.join(map(str, (row[0], *sorted(block) * by_stretch)))
                nll, tokens, size = (usable_number(row[place]) for place in (1, 2, 4))
                if nll is None or tokens is None:
                    bad_rows += 1
                elif tokens > 0:
                    values = np.array([nll, tokens, np.nan if size is None else size])
                    documents[cluster] = documents.get(cluster, 0.0) + values
                    blocks[cluster] |= block
                    byte_blocks[cluster] |= byte_block
                    if not byte_block:
                        without_bytes.add(cluster)
    if bad_rows:
        notes.add(path, f"{bad_rows} document sums are not finite numbers and were left out.")
    elif task is not None and lines >= (samples or math.inf):
        sums = {length: sums[length] for length in sums if _adds_up(sums[length], length, task, notes)}
    whole_blocks = {cluster: frozenset(of_cluster) for cluster, of_cluster in blocks.items()}
    known = {name: frozenset(spans) for name, spans in byte_blocks.items() if name not in without_bytes}
    return SumsByDocument(sums, whole_blocks, known) if any(sums.values()) else None


def _adds_up(documents: Mapping[str, NDArray[np.float64]], length: int, task: TaskResult, notes: Notes) -> bool:
    nll, tokens, size = map(float, sum(documents.values(), np.zeros(3)))
    bits = nll / size / math.log(2) if size else math.nan
    computed = {
        "tokens": tokens,
        "clusters": len(set(map(document_of, documents))),
        "nll": nll / max(tokens, 1),
        "bits_per_byte": bits,
    }
    recorded = {name: task.metrics.get(f"{metric_key(name, length)},none") for name in computed}
    if wrong := [name for name in computed if not agrees(recorded[name], computed[name])]:
        notes.add(task.samples, f"samples at {length_text(length)} {NOT_ITS_NUMBERS} ({', '.join(wrong)}).")
    return not wrong


def _block(document: object, *ends: str) -> set[tuple[int, int]]:
    """Returns a set with the (start, stop) positions of a sample's targets, read from two fields of the document.

    The set is empty if a field is missing.
    """
    bounds: Any = [document.get(name) for name in ends] if isinstance(document, Mapping) else []
    return {(bounds[0], bounds[1])} if fits(bounds, list[int]) and bounds else set()


def read_documents(
    models: Sequence[EvaluatedModel], notes: Notes, *, by_stretch: bool = False
) -> dict[TaskKey, SumsByDocument]:
    """Reads the sums by source document of all perplexity tasks.

    Runs of one model at different lengths are joined. If two runs have the same length, the first in
    `EvaluatedModel.task_runs` is used.

    Args:
        models: the evaluated models.
        notes: the list that notes are added to.
        by_stretch: whether to return sums for each contiguous stretch of identical targets instead of for each
            document. Notes are then dropped, since the call that reads sums by document adds the same notes.

    Returns:
        (model label, task, hash of the text) to the sums.
    """
    joined: dict[TaskKey, SumsByDocument] = {}
    counting = grouped(
        ((model.label, display_name(task.name), task.record.corpus_sha256 or ""), task)
        for model in models
        for _, task in model.task_runs()
        if task.record is not None and task.record.family == "perplexity"
        if not by_stretch or task.record.protocol in IDENTICAL_TARGETS
    )
    for key, tasks in counting.items():
        wanted = {length for task in tasks if task.record for length in task.record.lengths}
        runs = []
        for task in tasks:
            if task.samples is None or task.record is None or not wanted.intersection(task.record.lengths):
                continue
            sums = read_document_sums(task.samples, Notes() if by_stretch else notes, task, by_stretch=by_stretch)
            if sums is not None:
                runs.append(sums)
                wanted -= set(sums.lengths)
        if runs:
            joined[key] = SumsByDocument.merged(runs)
    return joined


SampleKey = tuple[str, str]
"""(sample number, identifier of the question); two runs have equal keys for a sample if the question is the same."""
MetricKey = tuple[str, str]
"""(metric as the samples file names it, such as `acc` or `score@0004096`; lm-eval's filter)."""
Scores = Mapping[MetricKey, Mapping[SampleKey, float]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleScores:
    """The scores of one model's samples in one task.

    Attributes:
        scores: (metric, filter) to (sample to score).
        depths_percent: context length in tokens to (sample to the mean depth of its needles in percent).
        by_limit: bounds on the input length to the scores from runs with these bounds; if several runs have a metric,
            `scores` has it from the first run, whatever its bounds.
        indices: sample to its index among those that the task draws, which is the same in tasks that share samples.
            Samples without a recorded index are missing.
        seeds: if `scores` are means over several training seeds, the scores of every seed; else empty.
    """

    scores: Scores
    depths_percent: Mapping[int, Mapping[SampleKey, float]] = dataclasses.field(default_factory=dict)
    by_limit: Mapping[InputLimit, Scores] = dataclasses.field(default_factory=dict)
    indices: Mapping[SampleKey, int] = dataclasses.field(default_factory=dict)
    seeds: tuple["SampleScores", ...] = ()

    def within(self, limit: InputLimit) -> "SampleScores":
        """Returns the scores from only those runs that had these bounds on the input length."""
        return dataclasses.replace(self, scores=self.by_limit.get(limit, {}))


def read_all_scores(models: Sequence[EvaluatedModel], notes: Notes) -> dict[TaskKey, SampleScores]:
    """Reads the scores of single samples in all tasks except perplexity and attention spans.

    If several runs of one model have a metric, the first in `EvaluatedModel.task_runs` is used.

    Returns:
        (model label, task) to the scores of its samples.
    """
    by_task: dict[TaskKey, list[SampleScores]] = defaultdict(list)
    for model in models:
        for run, task in model.task_runs():
            family = task.record.family if task.record else None
            if task.samples is not None and family not in ("perplexity", "span"):
                scores = read_scores(task.samples, notes, task)
                scores = dataclasses.replace(scores, by_limit={input_limit(run, task): scores.scores})
                by_task[model.label, display_name(task.name)].append(scores)
    return {key: _first_of(runs) for key, runs in by_task.items()}


def read_scores(path: Path, notes: Notes, task: TaskResult) -> SampleScores:
    """Reads the scores in a task's samples file; leaves out metrics whose mean disagrees with the results file."""
    scores: dict[MetricKey, dict[SampleKey, float]] = defaultdict(dict)
    depths: dict[int, dict[SampleKey, float]] = defaultdict(dict)
    indices: dict[SampleKey, int] = {}
    unusable = 0
    filtered = Counter[str]()
    for sample in read_lines(path, notes, samples=task.samples_used):
        filtered[str(sample.get("filter") or "none")] += 1
        if type(sample.get("doc_id")) is not int:
            unusable += 1
            continue
        key = (str(sample["doc_id"]), _question(sample))
        document = sample.get("doc")
        if isinstance(document, Mapping) and type(index := document.get("index")) is int:
            indices[key] = index
        chosen = sample.get("filter")
        named = sample.get("metrics")
        if isinstance(named, list):
            metrics = list(dict.fromkeys(name for name in named if isinstance(name, str)))
        else:
            metrics = [name for name in sample if context_metric(name)]
        for metric in metrics:
            score = usable_number(value := sample.get(metric))
            if score is not None:
                scores[metric, str(chosen or "none")][key] = score
            # a list of two or more is not a score, but an intermediate value that lm-eval aggregates itself
            elif value is not None and (context_metric(metric) or not isinstance(value, list) or len(value) < 2):
                unusable += 1
        try:
            for length, depth in _depths(sample.get("doc")).items():
                depths[length][key] = depth
        except ValueError:
            unusable += 1
    if unusable:
        reason = "are not finite numbers, or have no sample's number, and were left out."
        notes.add(path, f"{unusable} scores or depths of samples {reason}")
    for (metric, chosen), by_sample in list(scores.items()):
        is_complete = not unusable and filtered[str(chosen)] >= (task.samples_used or math.inf)
        mean = sum(by_sample.values()) / len(by_sample)  # like lm-eval, over the samples that have a score
        if is_complete and not agrees(task.means.get(f"{metric},{chosen}"), mean):
            notes.add(path, f"samples {NOT_ITS_NUMBERS} ({metric}, {chosen}).")
            del scores[metric, chosen]
    return SampleScores(scores=dict(scores), depths_percent=dict(depths), indices=indices)


def _averaged(seeds: Sequence[SampleScores]) -> SampleScores:
    """Averages the scores of training seeds sample by sample; samples that some seed lacks are left out."""
    limits = [limit for limit in seeds[0].by_limit if all(limit in seed.by_limit for seed in seeds)]
    return SampleScores(
        scores=_means([seed.scores for seed in seeds]),
        depths_percent=seeds[0].depths_percent,
        by_limit={limit: _means([seed.by_limit[limit] for seed in seeds]) for limit in limits},
        indices=seeds[0].indices,
        seeds=tuple(seeds),
    )


def _means(seeds: Sequence[Scores]) -> Scores:
    shared: dict[MetricKey, dict[SampleKey, float]] = {}
    for metric, first in seeds[0].items():
        rest = [seed.get(metric, {}) for seed in seeds[1:]]
        keys = [key for key in first if all(key in scores for scores in rest)]
        shared[metric] = {key: (first[key] + sum(scores[key] for scores in rest)) / len(seeds) for key in keys}
    return shared


def _first_of(runs: Sequence[SampleScores]) -> SampleScores:
    scores = {metric: values for run in reversed(runs) for metric, values in run.scores.items()}
    depths = {length: values for run in reversed(runs) for length, values in run.depths_percent.items()}
    by_limit: dict[InputLimit, dict[MetricKey, Mapping[SampleKey, float]]] = defaultdict(dict)
    for run in reversed(runs):
        for limit, limited in run.by_limit.items():
            by_limit[limit] |= limited
    indices = {key: index for run in reversed(runs) for key, index in run.indices.items()}
    return SampleScores(scores=scores, depths_percent=depths, by_limit=dict(by_limit), indices=indices)


def _question(sample: Mapping[str, object]) -> str:
    """Returns an identifier of a sample's question: its expected answers if it has any, else the document's hash.

    The hash is not used for both, since it covers the prompt, and prompts of some tasks depend on the tokenizer.
    """
    document = sample.get("doc")
    if isinstance(document, Mapping) and "references" in document:
        return str(document["references"])
    return str(sample.get("doc_hash", ""))


def _depths(document: object) -> dict[int, float]:
    """Returns context length in tokens to the mean depth in percent of a sample's needles.

    It is empty for a sample without depths.

    Raises:
        ValueError: lengths and depths do not have the expected types, or not the same number of entries.
    """
    if not isinstance(document, Mapping) or document.get("depths_percent") is None:
        return {}
    lengths: Any = document.get("lengths")
    percents: Any = document["depths_percent"]
    if not fits(lengths, list[int]) or not fits(percents, list[list[float]]) or len(lengths) != len(percents):
        raise ValueError
    return {length: sum(needles) / len(needles) for length, needles in zip(lengths, percents, strict=True) if needles}


DOCUMENT_SUMS = Reader(read=read_documents, pool=averaging(SumsByDocument.averaged))
SAMPLE_SCORES = Reader(read=read_all_scores, pool=averaging(_averaged))
