"""Paired differences of NLL by position: the sums of every source document in every bin, and the band over them."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sbeval.reports.analyse.statistics import simultaneous_band
from sbeval.reports.read.fields import shown_name, usable_number
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.notes import Notes
from sbeval.reports.read.samples import read_lines
from sbeval.results.intervals import MINIMUM_CLUSTERS

UNLOGGED = "were not logged (--log_samples)"
NOT_BY_DOCUMENT = "hold no sums by position and document"
Bin = tuple[int, int]
"""First and last position."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PositionSums:
    """Sums of one run by bin of positions and source document.

    Attributes:
        sums: bin to (document to [NLL in nats, tokens]).
        obstacle: why there are none; empty where there are.
    """

    sums: Mapping[Bin, Mapping[str, NDArray[np.float64]]]
    obstacle: str = ""

    @classmethod
    def averaged(cls, parts: Sequence["PositionSums"]) -> "PositionSums":
        """Averages NLL over models scored on the same text; a bin stays where all have the same targets in it."""
        if obstacle := next((part.obstacle for part in parts if part.obstacle), ""):
            return cls(sums={}, obstacle=obstacle)
        sums = {}
        for place, first in parts[0].sums.items():
            found = [part.sums.get(place, {}) for part in parts]
            if all(_targets(one) == _targets(first) for one in found):
                sums[place] = {document: np.mean([one[document] for one in found], axis=0) for document in first}
        return cls(sums=sums)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PositionBand:
    """One model minus another on identical targets in one bin; the band is simultaneous over the bins."""

    low: float
    high: float
    documents: int


def read_positions(models: Sequence[EvaluatedModel], notes: Notes) -> dict[tuple[str, str], PositionSums]:
    """Returns (model label, task) to the sums of the run that counts (`EvaluatedModel.task_runs`)."""
    found: dict[tuple[str, str], PositionSums] = {}
    for model in models:
        for _, task in model.task_runs():
            key = (model.label, shown_name(task.name))
            bins = next((value for name, value in task.metrics.items() if _is_bins(name, value)), None)
            if bins is not None and key not in found:
                found[key] = (
                    PositionSums(sums={}, obstacle=UNLOGGED)
                    if task.samples is None
                    else read_position_sums(task.samples, [_bin(one) for one in bins], notes)
                )
    return found


def read_position_sums(path: Path, bins: Sequence[Bin | None], notes: Notes) -> PositionSums:
    """Adds up the rows [document, NLL in nats, tokens] of every sample, bin by bin; a row not finite is left out."""
    sums: dict[Bin, dict[str, NDArray[np.float64]]] = {}
    for sample in read_lines(path, notes):
        rows_by_bin = sample.get("position_nll")
        if not isinstance(rows_by_bin, list):
            continue
        for place, rows in zip(bins, rows_by_bin, strict=False):
            for row in rows if isinstance(rows, list) and place is not None else ():
                if not isinstance(row, list) or len(row) != 3:
                    return PositionSums(sums={}, obstacle=NOT_BY_DOCUMENT)
                nll, tokens = map(usable_number, row[1:])
                if nll is not None and tokens is not None and tokens > 0 and place is not None:
                    documents = sums.setdefault(place, {})
                    documents[str(row[0])] = documents.get(str(row[0]), 0.0) + np.array([nll, tokens])
    return PositionSums(sums=sums, obstacle="" if sums else NOT_BY_DOCUMENT)


def position_bands(own: PositionSums, base: PositionSums) -> tuple[dict[Bin, PositionBand], str]:
    """Compares two models bin by bin.

    A bin counts where both scored the same number of targets in every document, and in at least `MINIMUM_CLUSTERS`
    documents; the band is simultaneous over the bins that count.

    Returns:
        Bin to its band, and what stood in the way elsewhere (empty where nothing did).
    """
    shared = [place for place in own.sums if place in base.sums]
    same = [place for place in shared if _targets(own.sums[place]) == _targets(base.sums[place])]
    enough = [place for place in same if len(own.sums[place]) >= MINIMUM_CLUSTERS]
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
    documents = sorted({document for place in enough for document in own.sums[place]})
    row = {document: index for index, document in enumerate(documents)}
    differences_CK, tokens_CK = np.zeros((2, len(documents), len(enough)))
    for column, place in enumerate(enough):
        for document, (nll, tokens) in own.sums[place].items():
            differences_CK[row[document], column] = nll - base.sums[place][document][0]
            tokens_CK[row[document], column] = tokens
    band = simultaneous_band(differences_CK, tokens_CK)
    found = {
        place: PositionBand(low=float(low), high=float(high), documents=len(own.sums[place]))
        for place, low, high in zip(enough, band.lows, band.highs, strict=True)
    }
    return found, obstacle


def _targets(documents: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    return {document: float(values[1]) for document, values in documents.items()}


def _is_bins(name: str, value: object) -> bool:
    return name.partition(",")[0] == "position_nll" and isinstance(value, list)


def _bin(item: object) -> Bin | None:
    if isinstance(item, list) and len(item) == 4 and all(type(end) is int for end in item[:2]):
        return item[0], item[1]
    return None
