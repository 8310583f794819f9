"""Data on NLL by position in a long window: a table of position bins, sums by source document, and paired differences.

Paired differences between two models come with a "band": confidence intervals that cover all true differences at once.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sbeval.errors import visible
from sbeval.foreign_files import usable_number
from sbeval.reports.analyse.statistics import simultaneous_band
from sbeval.reports.read.fields import agrees, display_name
from sbeval.reports.read.files import Notes, read_lines
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.results import DECIMAL, TEXT, WHOLE, Reader, TaskKey, averaging, interval_ends, typed_frame
from sbeval.reports.read.samples import NOT_ITS_NUMBERS
from sbeval.results.intervals import MINIMUM_CLUSTERS, uneven

_OF_THE_RUN = dict.fromkeys(("setting", "task", "corpus", "corpus_sha256"), TEXT) | {"context_length_tokens": WHOLE}
_OF_THE_BIN = dict.fromkeys(("first", "last", "nll", "ci95_low", "ci95_high", "tokens", "clusters"), DECIMAL)
_COLUMNS = _OF_THE_RUN | _OF_THE_BIN | {"tokenizer_sha256": TEXT}
_NUMBERS = {"nll": "mean", "ci95_low": "mean", "ci95_high": "mean", "tokens": "min", "clusters": "min"}
"""Columns with numbers that differ between training seeds, to the pandas aggregation that merges these numbers."""
_NOT_BY_DOCUMENT = "hold no sums by position and document that add up to the results file's numbers"
Bin = tuple[int, int]
"""First and last position of a bin of positions in the window."""


def _tabulate(models: Sequence[EvaluatedModel], notes: Notes) -> pd.DataFrame:
    """Returns a table of NLL with one row for each position bin of each model, task, text and context length.

    If several runs have the same context length, the first in `EvaluatedModel.task_runs` is used. Rows are in the order
    of `task_runs`.
    """
    rows: list[dict[str, Any]] = []
    for model in models:
        for run, task in model.task_runs():
            record = task.record
            context = {
                "setting": model.label,
                "task": display_name(task.name),
                "corpus": display_name(record.corpus) if record and record.corpus else None,
                "corpus_sha256": record.corpus_sha256 if record else None,
                "context_length_tokens": record.lengths[0] if record and record.lengths else math.nan,
                "tokenizer_sha256": record.tokenizer_sha256 if record else None,
                "results_file": visible(str(run.path)),
            }
            for key, value in task.metrics.items():
                if _is_bins(key, value):
                    rows += [context | cells for cells in _bin_rows(value, task.metrics, key.partition(",")[2])]
    frame = typed_frame(rows, _COLUMNS | {"results_file": TEXT})
    keys = ["setting", "task", "corpus_sha256", "context_length_tokens"]
    counts = frame["results_file"] == frame.groupby(keys, dropna=False)["results_file"].transform("first")
    return frame[counts].drop(columns="results_file").reset_index(drop=True)


def first_pass(bins: pd.DataFrame) -> pd.DataFrame:
    """Keeps, for each model, task and text, only the bins of the context length that comes first in the table."""
    lengths = bins["context_length_tokens"].fillna(0)
    keys = [bins[key] for key in ("setting", "task", "corpus_sha256")]
    return bins[lengths == lengths.groupby(keys, dropna=False).transform("first")].reset_index(drop=True)


def _bin_rows(bins: Sequence[Any], metrics: Mapping[str, Any], filter_name: str) -> Iterator[dict[str, Any]]:
    def beside(name: str) -> Sequence[Any]:
        value = metrics.get(f"{name},{filter_name}", metrics.get(name))
        return value if isinstance(value, list) and len(value) == len(bins) else [None] * len(bins)

    for item, ends, count in zip(bins, beside("position_nll_ci95"), beside("position_clusters"), strict=True):
        if not isinstance(item, list) or len(item) != 4 or any(usable_number(cell) is None for cell in item):
            continue
        clusters = usable_number(count)
        if item[3] > 0:
            first, last, nll, tokens = item
            cells = (first, last, nll, *interval_ends(ends), tokens, math.nan if clusters is None else clusters)
            yield dict(zip(_OF_THE_BIN, cells, strict=True))


def _pool(rows: pd.DataFrame, pooled_label: Mapping[str, str], notes: Notes) -> pd.DataFrame:
    """Averages the rows of several training seeds bin by bin; a bin that some seed lacks is left out."""
    inside = rows["setting"].isin(pooled_label.keys())
    seeds = rows[inside].assign(original=rows["setting"])
    seeds["setting"] = seeds["setting"].map(pooled_label)
    keys = [column for column in rows.columns if column not in _NUMBERS]
    means = seeds.groupby(keys, dropna=False, sort=False).agg({**_NUMBERS, "original": "nunique"}).reset_index()
    ran = seeds.groupby(["setting", "task"])["original"].nunique()
    wanted = [ran[key] for key in zip(means["setting"], means["task"], strict=True)]
    means = means[means["original"] == wanted]
    return pd.concat([rows[~inside], means[rows.columns]], ignore_index=True)


BINS = Reader(read=_tabulate, pool=_pool)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SumsByPosition:
    """Sums of NLL in one run, by position bin and source document.

    Attributes:
        sums: bin to (document to float64 [NLL in nats, tokens]).
        obstacle: why there are no sums, as the end of a sentence about samples; empty if there are sums.
    """

    sums: Mapping[Bin, Mapping[str, NDArray[np.float64]]] = dataclasses.field(default_factory=dict)
    obstacle: str = ""

    @property
    def doubtful(self) -> bool:
        """Whether documents of some bin are so uneven in size that its interval covers less often than it claims."""
        return any(uneven(list(_scored_targets(documents).values())) for documents in self.sums.values())


UNLOGGED = SumsByPosition(obstacle="were not logged (--log_samples)")


def _read_sums(models: Sequence[EvaluatedModel], notes: Notes) -> dict[TaskKey, SumsByPosition]:
    """Reads sums by position from the samples file of the first run in `EvaluatedModel.task_runs`, for every task."""
    sums: dict[TaskKey, SumsByPosition] = {}
    for model in models:
        for _, task in model.task_runs():
            key = (model.label, display_name(task.name), (task.record and task.record.corpus_sha256) or "")
            bins = next((value for name, value in task.metrics.items() if _is_bins(name, value)), None)
            if bins is None or key in sums:
                continue
            if task.samples is None:
                sums[key] = UNLOGGED
            else:
                sums[key] = _sums_in(task.samples, bins, notes, task.samples_used)
    return sums


def _sums_in(path: Path, bins: Sequence[Any], notes: Notes, samples: float | None) -> SumsByPosition:
    """Reads a samples file and adds up, bin by bin, the rows [document, NLL in nats, tokens] of all samples.

    Rows with an NLL that is not finite are left out. If the file holds all samples, bins whose sums disagree with NLL
    and token count in the results file are left out too. A note is written in both cases.
    """
    sums: dict[Bin, dict[str, NDArray[np.float64]]] = {}
    places = [_place(item) for item in bins]
    bad_rows = lines = 0
    for sample in read_lines(path, notes, samples=samples):
        lines += 1
        rows_by_bin = sample.get("position_nll")
        if not isinstance(rows_by_bin, list):
            continue
        for place, rows in zip(places, rows_by_bin, strict=False):
            for row in rows if isinstance(rows, list) and place is not None else ():
                if not isinstance(row, list) or len(row) != 3:
                    return SumsByPosition(obstacle=_NOT_BY_DOCUMENT)
                nll, tokens = map(usable_number, row[1:])
                bad_rows += nll is None or tokens is None
                if nll is not None and tokens is not None and tokens > 0 and place is not None:
                    documents = sums.setdefault(place, {})
                    documents[str(row[0])] = documents.get(str(row[0]), 0.0) + np.array([nll, tokens])
    if bad_rows:
        notes.add(path, f"{bad_rows} sums by position are not finite numbers and were left out.")
    elif lines >= (samples or math.inf):
        for place, item in zip(places, bins, strict=True):
            nll, tokens = sum(sums.get(place, {}).values(), np.zeros(2)) if place else (0.0, 0.0)
            if tokens and place and not (agrees(item[2], nll / tokens) and agrees(item[3], tokens)):
                del sums[place]
                notes.add(path, f"samples of positions {place[0]} to {place[1]} {NOT_ITS_NUMBERS}.")
    return SumsByPosition(sums=sums, obstacle="" if sums else _NOT_BY_DOCUMENT)


def _averaged(seeds: Sequence[SumsByPosition]) -> SumsByPosition:
    """Averages the sums of several training seeds; keeps only bins in which all seeds have the same targets."""
    if obstacle := next((seed.obstacle for seed in seeds if seed.obstacle), ""):
        return SumsByPosition(obstacle=obstacle)
    sums = {}
    for place, first in seeds[0].sums.items():
        bins = [seed.sums.get(place, {}) for seed in seeds]
        if all(_scored_targets(documents) == _scored_targets(first) for documents in bins):
            sums[place] = {name: np.mean([documents[name] for documents in bins], axis=0) for name in first}
    return SumsByPosition(sums=sums)


POSITION_SUMS = Reader(read=_read_sums, pool=averaging(_averaged))


def _scored_targets(documents: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    return {document: float(values[1]) for document, values in documents.items()}


def _is_bins(name: str, value: object) -> bool:
    return name.partition(",")[0] == "position_nll" and isinstance(value, list)


def _place(item: object) -> Bin | None:
    if isinstance(item, list) and len(item) == 4 and all(type(end) is int for end in item[:2]):
        return item[0], item[1]
    return None


class PositionBand(NamedTuple):
    """95% interval of one model's NLL minus another's on identical targets in one bin; simultaneous over all bins.

    `doubtful` is True if documents differ so much in size that the interval covers the true value in fewer than 95% of
    cases. The ends are NaN if there is no interval.
    """

    low: float = math.nan
    high: float = math.nan
    doubtful: bool = False


def position_bands(candidate: SumsByPosition, base: SumsByPosition) -> tuple[dict[Bin, PositionBand], str]:
    """Compares the NLL of two models bin by bin.

    A bin gets an interval if both models scored the same number of targets in every document, and at least
    `MINIMUM_CLUSTERS` documents. The intervals are simultaneous over these bins.

    Returns:
        Bin to the interval of `candidate` minus `base`; and a clause on why bins lack an interval, empty if none does.
    """
    sums, base_sums = candidate.sums, base.sums
    shared = [place for place in sums if place in base_sums]
    same = [place for place in shared if _scored_targets(sums[place]) == _scored_targets(base_sums[place])]
    enough = [place for place in same if len(sums[place]) >= MINIMUM_CLUSTERS]
    obstacle = ""
    if not same:
        obstacle = "the two were not scored on the same targets"
    elif not enough:
        obstacle = f"no range of positions has targets in {MINIMUM_CLUSTERS} documents"
    elif len(same) < len(shared):
        obstacle = "in some ranges of positions the two were not scored on the same targets"
    elif len(enough) < len(same):
        obstacle = f"some ranges of positions have targets in fewer than {MINIMUM_CLUSTERS} documents"
    if not enough:
        return {}, obstacle
    documents = sorted({document for place in enough for document in sums[place]})
    differences_CK, tokens_CK = np.zeros((2, len(documents), len(enough)))
    for column, place in enumerate(enough):
        for row, document in enumerate(documents):
            if document in sums[place]:
                nll, tokens_CK[row, column] = sums[place][document]
                differences_CK[row, column] = nll - base_sums[place][document][0]
    band = simultaneous_band(differences_CK, tokens_CK)
    return {
        place: PositionBand(low=float(low), high=float(high), doubtful=band.doubtful)
        for place, low, high in zip(enough, band.lows, band.highs, strict=True)
    }, obstacle
