"""Sums by document that follow a curve over context lengths."""

import numpy as np

from sbeval.reports.read.results import Results
from sbeval.reports.read.samples import DOCUMENT_SUMS, SumsByDocument

LENGTHS = [256, 512, 1024, 2048, 4096]


def sums(curve: list[float], *, documents: int = 40, noise: float = 0.01, seed: int = 0) -> SumsByDocument:
    """Returns documents of different sizes, each with its own level at all of `LENGTHS`."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(500, 5000, documents).astype(float)
    level = generator.normal(0, 0.3, documents)
    table = {}
    for length, nll in zip(LENGTHS, curve, strict=True):
        nats = (nll + level + generator.normal(0, noise, documents)) * tokens
        rows = np.stack([nats, tokens, 3 * tokens], axis=1)
        table[length] = {f"document {index}": row for index, row in enumerate(rows)}
    return SumsByDocument(table)


def sums_of(results: Results, label: str, task: str) -> SumsByDocument:
    """Returns the sums of a model's task that was run on one text."""
    (of_task,) = (value for key, value in results[DOCUMENT_SUMS].items() if key[:2] == (label, task))
    return of_task
