"""Paired differences of NLL by position between two models, and the band over them."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from sbeval.reports.analyse.statistics import simultaneous_band
from sbeval.reports.read.positions import Bin, SumsByPosition, scored_targets
from sbeval.reports.read.results import records
from sbeval.results.intervals import MINIMUM_CLUSTERS, uneven


def doubtful_positions(sums: SumsByPosition) -> bool:
    """Says whether one model's intervals by position are doubtful in some bin."""
    return any(uneven(list(scored_targets(documents).values())) for documents in sums.sums.values())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PositionBand:
    """One model minus another on identical targets in one bin; the band is simultaneous over the bins.

    It is doubtful where documents differ so much in size that it covers less often than it says.
    """

    low: float
    high: float
    documents: int
    doubtful: bool = False


def difference_to_baseline(
    table: pd.DataFrame, baseline: str, bands: Mapping[str, Mapping[tuple[int, int], PositionBand]]
) -> pd.DataFrame:
    """Subtracts the baseline's NLL in every bin both have; the baseline itself is left out.

    Args:
        table: columns setting, first, last, nll; one row a bin of positions.
        baseline: the model subtracted.
        bands: model to the bands of its paired differences. Without one a difference has no interval: those of the
            two levels say nothing about it.
    """
    base = table[table["setting"] == baseline].set_index(["first", "last"])["nll"]
    others = table[table["setting"] != baseline].copy()
    bins = pd.MultiIndex.from_frame(others[["first", "last"]])
    others["nll"] = others["nll"].to_numpy() - base.reindex(bins).to_numpy()
    none = PositionBand(low=math.nan, high=math.nan, documents=0)
    found = [bands.get(row["setting"], {}).get((int(row["first"]), int(row["last"])), none) for row in records(others)]
    others["ci95_low"], others["ci95_high"] = [one.low for one in found], [one.high for one in found]
    return others.dropna(subset=["nll"]).reset_index(drop=True)


def position_bands(own: SumsByPosition, base: SumsByPosition) -> tuple[dict[Bin, PositionBand], str]:
    """Compares two models bin by bin.

    A bin counts where both scored the same number of targets in every document, and in at least `MINIMUM_CLUSTERS`
    documents; the band is simultaneous over the bins that count.

    Returns:
        Bin to its band, and what stood in the way elsewhere (empty where nothing did).
    """
    shared = [place for place in own.sums if place in base.sums]
    same = [place for place in shared if scored_targets(own.sums[place]) == scored_targets(base.sums[place])]
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
        place: PositionBand(low=float(low), high=float(high), documents=len(own.sums[place]), doubtful=band.doubtful)
        for place, low, high in zip(enough, band.lows, band.highs, strict=True)
    }
    return found, obstacle
