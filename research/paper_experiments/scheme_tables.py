r"""Tables of position schemes from archives of `scheme_grid` and of docs/results/extrapolation, as Markdown.

    python -m research.paper_experiments.scheme_tables docs/results/extrapolation/results.tar.xz grid.tar.xz \
        --figure rivals.png

An archive, or a folder with the same contents, that comes later replaces models of the same name. NLL and scores are
means over seeds. A difference between two schemes has a 95% interval over documents and seeds. The half width over
documents is that of the bootstrap on documents' NLL, averaged over seeds. That over seeds is Welch's t interval of the
models' NLL. Both are independent, so their squares add up. Seeds are not counted for a scheme with one seed.
`--figure` draws NLL of identical targets for some schemes: means over seeds, with the lowest and the highest.
"""

import argparse
import dataclasses
import math
import re
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from research.interval_studies.archive import FIXED, NAMES, STREAM, read_tasks, table
from research.png import write_png
from sbeval.corpora.archives import unpack
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.lines import SCORE_TOOLTIP, length_figure
from sbeval.reports.figures.theme import series_looks
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.results import LENGTH
from sbeval.reports.read.samples import SumsByDocument
from sbeval.results.intervals import ratio_interval

RIFFLED = "sb_stdlib_riffled"
SCORES = {
    "sb_niah_single_1": ("score",),
    "sb_niah_single_1_forced": ("exact_match",),
    "sb_mqrar": ("exact_match_16_pairs", "exact_match_64_pairs"),
    "sb_flipflop": ("exact_match",),
    "sb_copy_passage": ("exact_match", "retrieval_gain"),
    "sb_copy_selective": ("exact_match", "retrieval_gain"),
    "sb_copy_phrase": ("exact_match_128_tokens", "retrieval_gain_128_tokens", "retrieval_gain_512_tokens"),
}
"""Metrics of a table each, by task."""
REFERENCE = "stickbreaking"
DRAWN = (REFERENCE, "forgetting", "alibi", "rope", "nape", "nape_asentmax", "asentmax", "entmax", "ssmax")
_SEED = re.compile(r"(?P<scheme>.*)_seed(?P<seed>\d+)")


class Model(NamedTuple):
    """One trained model: metrics by task, and sums of NLL by document and task."""

    metrics: dict[str, dict[str, float]]
    sums: dict[str, SumsByDocument]


Schemes = dict[str, dict[int, Model]]
"""Models by scheme and seed."""


class Difference(NamedTuple):
    """A difference in nats per token with its 95% interval; `seeds` says whether that counts seeds too."""

    estimate: float
    low: float
    high: float
    seeds: bool

    def __str__(self) -> str:
        return f"{self.estimate:+.3f} [{self.low:+.3f}, {self.high:+.3f}]{'' if self.seeds else ' ‡'}"


def read_models(sources: Sequence[Path]) -> Schemes:
    """Reads the models of archives or folders; a later source replaces tasks of the same model."""
    schemes: Schemes = {}
    for source in sources:
        with tempfile.TemporaryDirectory() as unpacked:
            folder = source
            if source.is_file():
                folder = Path(unpacked)
                with tarfile.open(source) as archive:
                    unpack(archive, folder)
            metrics, sums = read_tasks(folder)
        for name, task in metrics:
            matched = _SEED.fullmatch(name)
            scheme, seed = (matched["scheme"], int(matched["seed"])) if matched else (name, 0)
            model = schemes.setdefault(scheme, {}).setdefault(seed, Model({}, {}))
            model.metrics[task] = metrics[name, task]
            if (name, task) in sums:
                model.sums[task] = sums[name, task]
    return schemes


def values(models: Mapping[int, Model], task: str, metric: str, length: int) -> list[float]:
    """Returns a metric at one length of all seeds that have it."""
    key = f"{metric}@{length:07d}"
    found = [model.metrics[task][key] for _, model in sorted(models.items()) if key in model.metrics.get(task, {})]
    return [float(value) for value in found]


def lengths_of(schemes: Schemes, task: str, metric: str) -> list[int]:
    """Returns the context lengths at which any model has a metric, ascending."""
    keys = {key for models in schemes.values() for model in models.values() for key in model.metrics.get(task, {})}
    return sorted(int(key.rpartition("@")[2]) for key in keys if key.startswith(f"{metric}@") and key[-7:].isdigit())


def seed_variance(numbers: Sequence[float]) -> float:
    """Returns the variance of the mean over seeds, NaN for one seed."""
    return float(np.var(numbers, ddof=1) / len(numbers)) if len(numbers) > 1 else math.nan


def difference(first: Mapping[int, Model], second: Mapping[int, Model], task: str, length: int) -> Difference | None:
    """Returns the NLL of the first scheme minus that of the second at one length; None if documents lack sums.

    Raises:
        ValueError: the schemes were scored on too few common documents for an interval.
    """
    sides = []
    for models in (first, second):
        sums = [model.sums[task] for model in models.values() if task in model.sums]
        if not sums or any(length not in one.lengths for one in sums):
            return None
        sides.append((SumsByDocument.averaged(sums).documents(length), values(models, task, "nll", length)))
    (ours, our_nll), (theirs, their_nll) = sides
    common = sorted(ours.keys() & theirs.keys())
    tokens = np.array([ours[name][1] for name in common])
    nats = np.array([ours[name][0] - theirs[name][0] for name in common])
    estimate, low, high, _ = ratio_interval(nats, tokens, seed=0)
    if low is None or high is None:
        raise ValueError(f"{task} at {length} tokens has {len(common)} common documents, too few for an interval")
    variances = [seed_variance(nll) for nll in (our_nll, their_nll)]
    counted = [(variance, len(nll)) for variance, nll in zip(variances, (our_nll, their_nll), strict=True)]
    known = [(variance, count) for variance, count in counted if count > 1]
    half = 0.0
    if known and (total := sum(variance for variance, _ in known)) > 0:
        freedom = total**2 / sum(variance**2 / (count - 1) for variance, count in known)
        half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(total)
    below, above = math.hypot(estimate - low, half), math.hypot(high - estimate, half)
    return Difference(estimate, estimate - below, estimate + above, seeds=len(known) == 2)


def ordered(schemes: Schemes) -> list[str]:
    """Returns the schemes in the order of the published table."""
    return [scheme for scheme in NAMES if scheme in schemes]


def _mean(numbers: Sequence[float], digits: int) -> str:
    return f"{np.mean(numbers):.{digits}f}" if numbers else ""


def nll_table(schemes: Schemes, task: str) -> list[str]:
    """Returns NLL by length, a mean over seeds, with the largest distance of a seed from it."""
    lengths = lengths_of(schemes, task, "nll")
    rows = []
    for scheme in ordered(schemes):
        cells = []
        for length in lengths:
            numbers = values(schemes[scheme], task, "nll", length)
            spread = f" ±{max(abs(n - np.mean(numbers)) for n in numbers):.3f}" if len(numbers) > 1 else ""
            cells.append(_mean(numbers, 3) + spread)
        rows.append([NAMES[scheme], str(len(values(schemes[scheme], task, "nll", lengths[-1]))), *cells])
    return table(["scheme", "seeds", *map(length_text, lengths)], rows)


def difference_table(schemes: Schemes, task: str, lengths: Sequence[int]) -> list[str]:
    """Returns each scheme's NLL minus the reference's at some lengths, with intervals."""
    rows = []
    for scheme in ordered(schemes):
        if scheme != REFERENCE:
            found = [difference(schemes[scheme], schemes[REFERENCE], task, length) for length in lengths]
            rows.append([NAMES[scheme], *("" if one is None else str(one) for one in found)])
    return table(["scheme", *map(length_text, lengths)], rows)


def mean_and_range(numbers: Sequence[float]) -> str:
    """Returns the mean of the seeds' scores, with the lowest and the highest where they differ; empty without any."""
    spread = f" ({min(numbers):.2f} to {max(numbers):.2f})" if len(set(numbers)) > 1 else ""
    return _mean(numbers, 2) + spread


def score_table(schemes: Schemes, task: str, metric: str) -> list[str]:
    """Returns a score by length: a mean over seeds, with the seeds' range where they differ."""
    lengths = lengths_of(schemes, task, metric)
    rows = []
    for scheme in ordered(schemes):
        cells = []
        for length in lengths:
            cells.append(mean_and_range(values(schemes[scheme], task, metric, length)))
        if any(cells):
            rows.append([NAMES[scheme], *cells])
    return table(["scheme", *map(length_text, lengths)], rows) if rows else []


def riffled_table(schemes: Schemes) -> list[str]:
    """Returns by how much a document's own earlier pieces lower its NLL when riffled, a mean over seeds."""
    lengths = lengths_of(schemes, RIFFLED, "nll")
    rows = []
    for scheme in ordered(schemes):
        by_length = [
            [
                without - with_pieces
                for without, with_pieces in zip(
                    values(schemes[scheme], RIFFLED, "nll_replaced", length),
                    values(schemes[scheme], RIFFLED, "nll", length),
                    strict=True,
                )
            ]
            for length in lengths
        ]
        if any(by_length):
            rows.append([NAMES[scheme], *(_mean(gains, 3) for gains in by_length)])
    return table(["scheme", *map(length_text, lengths)], rows) if rows else []


def tables(schemes: Schemes) -> str:
    """Returns all tables with their headings."""
    lines = ["## Identical targets, context inside one file (nats per token)", "", *nll_table(schemes, FIXED)]
    lines += ["Each scheme minus stick-breaking; ‡ without seeds:", ""]
    lines += difference_table(schemes, FIXED, [1024, 4096, 16384])
    lines += ["## Joined files (nats per token)", "", *nll_table(schemes, STREAM)]
    lines += ["Each scheme minus stick-breaking; ‡ without seeds:", ""]
    lines += difference_table(schemes, STREAM, [1024, 16384, 65536])
    if riffled := riffled_table(schemes):
        lines += ["## Riffled documents: nats per token that the own document's pieces are worth", "", *riffled]
    for task, metrics in SCORES.items():
        for metric in metrics:
            if scores := score_table(schemes, task, metric):
                lines += [f"## `{task}`, {metric}", "", *scores]
    return "\n".join(lines)


def nll_figure(schemes: Schemes, training_length_tokens: int = 1024) -> dict[str, Any]:
    """Returns the specification of the figure of NLL of identical targets against context length."""
    shown = [scheme for scheme in DRAWN if scheme in schemes]
    records = []
    for scheme in shown:
        for length in lengths_of(schemes, FIXED, "nll"):
            if not (numbers := values(schemes[scheme], FIXED, "nll", length)):
                continue
            ends = {"seeds": len(numbers), "seed_low": min(numbers), "seed_high": max(numbers)}
            number = {"setting": NAMES[scheme], LENGTH: length, "value": np.mean(numbers), **ends}
            records.append(number | {"ci95_low": math.nan, "ci95_high": math.nan})
    looks = {
        label: dataclasses.replace(look, training_length_tokens=training_length_tokens)
        for label, look in series_looks([NAMES[scheme] for scheme in shown]).items()
    }
    caption = Caption(
        title="NLL of identical targets, 4.3M parameters, trained at 1K",
        finding="NLL of each scheme against context length",
        subtitle="mean over the training seeds; bars from the lowest to the highest",
    )
    return length_figure(
        pd.DataFrame(records),
        caption,
        looks=looks,
        number_format=".3f",
        tooltip=SCORE_TOOLTIP,
        y_title="NLL (nats per token, log scale)",
        y_scale="log",
        y_domain=(1.75, 6.5),
        y_values=(1.8, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0),
        y_format=".1f",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the tables and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+", help="archives or folders, the newest last")
    parser.add_argument("--figure", type=Path, help="a PNG to write")
    options = parser.parse_args(arguments)
    schemes = read_models(options.sources)
    print(tables(schemes))
    if options.figure is not None:
        write_png(nll_figure(schemes), options.figure)


if __name__ == "__main__":
    main()
