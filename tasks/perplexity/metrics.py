"""Turns the model's log-probabilities into sums by document, which samples log, and these sums into metrics.

lm-eval aggregates each metric key separately, and writes every sample's value of every key to the samples file. A
sample therefore logs its sums only once, under `nll@L`. The aggregation of that key computes all metrics of the length,
and the aggregations of the other keys look up the results.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import TokenizedCorpus
from sbeval.corpora.windows import Window
from sbeval.errors import UserError
from sbeval.results.intervals import RatioEstimate, ratio_interval
from sbeval.results.records import ClusterSums, metric_key

WindowNll = Mapping[Window, NDArray[np.float64]]
"""NLL in nats of each window's scored targets, float64 [scored]."""


def checked_nll(task: str, window: Window, answer: Any, *, null: bool = False) -> NDArray[np.float64]:
    """Returns the NLL in nats of a window's scored targets, float64 [scored], and checks that it is finite.

    Args:
        task: its name, for errors.
        window: the window that was scored.
        answer: the model's answer, with an attribute `logprobs`.
        null: whether non-finite values are allowed.

    Raises:
        ValueError: the answer does not have one log-probability for each scored target.
        UserError: a log-probability is not finite, and `null` is false.
    """
    logprobs = np.asarray(answer.logprobs, np.float64)
    if logprobs.shape != (window.scored,):
        raise ValueError(f"expected {window.scored} log-probabilities from the model, found shape {logprobs.shape}")
    if not null and not np.isfinite(logprobs).all():
        first = window.stop - window.scored + int(np.argmin(np.isfinite(logprobs)))
        raise UserError(
            f"{task}: expected finite log-probabilities, found {logprobs[first - window.stop]} for token "
            f"{first - window.start + 1} of a window of {window.stop - window.start} tokens: try dtype=float32."
        )
    return -logprobs


def document_rows(corpus: TokenizedCorpus, windows: Iterable[Window], nll: WindowNll) -> list[ClusterSums]:
    """Sums NLL, tokens, words and bytes over the windows' scored targets; returns one row for each source document."""
    sums: dict[int, list[float]] = {}
    for window in windows:
        for document_sums in corpus.document_sums(window.stop - window.scored, nll[window]):
            row = sums.setdefault(document_sums.document, [0.0, 0.0, 0.0, 0.0])
            for column, value in enumerate(document_sums[1:]):
                row[column] += value
    named = ((corpus.names[document], row) for document, row in sums.items())
    return [ClusterSums(name, nats, int(tokens), words, size) for name, (nats, tokens, words, size) in named]


RATIOS: dict[str, tuple[str, Callable[[float], float]]] = {
    "nll": ("tokens", lambda nats: nats),
    "token_perplexity": ("tokens", np.exp),
    "word_perplexity": ("words", np.exp),
    "byte_perplexity": ("bytes", np.exp),
    "bits_per_byte": ("bytes", lambda nats: nats / math.log(2)),
}
UNITS = ("tokens", "words", "bytes")
COUNTS = ("tokens", "clusters")
OF_LONGPPL = ("longppl_ci95", "longppl_tokens", "longppl_clusters")


class CompactList(tuple[Any, ...]):
    """A list of numbers that lm-eval's table shows in short form, and that its JSON files hold completely."""

    __slots__ = ()

    def __repr__(self) -> str:
        if len(self) == 2 and all(isinstance(item, float) for item in self):
            return f"[{self[0]:.3f}, {self[1]:.3f}]"
        return f"{len(self)} bins"

    __str__ = __repr__


class SampleMetrics(dict[str, Any]):
    """The values that one sample logs, and the keys of metrics that are computed from all samples together.

    lm-eval logs the entries of the dictionary, but aggregates the keys that `items()` yields. `items()` therefore also
    yields the keys of the computed metrics; as entries of the dictionary they would add a hundred empty values to every
    logged sample.
    """

    def __init__(self, logged: dict[str, Any], computed: Iterable[str]) -> None:
        super().__init__(logged)
        self._computed = tuple(computed)

    def items(self) -> Any:
        """Returns the pairs of the logged entries, then a pair (key, None) for every computed metric."""
        return [*super().items(), *((key, None) for key in self._computed if key not in self)]


def cluster_sums(samples: Iterable[Iterable[Sequence[Any]]], columns: int) -> NDArray[np.float64]:
    """Sums the rows (cluster name, then values) of all samples by cluster.

    Returns float64 [columns, clusters], with clusters sorted by name.
    """
    sums: dict[str, NDArray[np.float64]] = {}
    for rows in samples:
        for name, *values in rows:
            sums[name] = sums.get(name, np.zeros(columns)) + np.asarray(values, np.float64)
    return np.array([sums[name] for name in sorted(sums)]).reshape(len(sums), columns).T


@dataclass
class PerplexityMetrics:
    """Computes the metrics of one task in one run.

    Attributes:
        lengths: context lengths in tokens, ascending.
        seed: seed of the bootstrap.
        same_targets: whether every length scores the same targets, so that only the context differs. There is then a
            metric `nll_change@L`, NLL at L minus NLL at the shortest length: below zero, the longer context helps.
        beside: names of further contexts after which the same targets are scored, such as "without" (no context).
            Samples log the sums with such a context under `nll_<name>@L`. The metric `gain_over_<name>@L` is
            `nll_<name>@L` minus `nll@L`, paired by document.
        longppl: whether samples also log sums over LongPPL's key tokens under `longppl@L`.
    """

    lengths: Sequence[int]
    seed: int
    same_targets: bool
    beside: Sequence[str] = ()
    longppl: bool = False
    _values: dict[str, Any] = field(default_factory=dict)
    _nats: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    def higher_is_better(self) -> dict[str, bool]:
        """Returns a mapping from metric keys to whether higher is better; intervals and counts are left out."""
        undirected = ("_ci95", "tokens@", "clusters@")
        keys = [key for key in self.aggregation() if not any(word in key for word in undirected)]
        return {key: key.startswith("gain_over_") for key in keys}

    def aggregation(self) -> dict[str, Callable[[list[Any]], Any]]:
        """Returns lm-eval's aggregation functions by metric key.

        lm-eval calls the functions in this order. That of `nll@L` comes first, because it computes all other metrics.
        """
        functions: dict[str, Callable[[list[Any]], Any]] = {
            metric_key("nll", length): functools.partial(self._nll, length) for length in self.lengths
        }
        for length in self.lengths:
            names = [name for name in RATIOS if name != "nll"] + [f"{name}_ci95" for name in RATIOS] + list(COUNTS)
            if self.same_targets and length != self.lengths[0]:
                names += ["nll_change", "nll_change_ci95"]
            if self.longppl:
                functions[metric_key("longppl", length)] = functools.partial(self._longppl, length)
                names += OF_LONGPPL
            for condition in self.beside:
                functions[metric_key(f"nll_{condition}", length)] = functools.partial(self._beside, condition, length)
                names += [f"gain_over_{condition}", f"gain_over_{condition}_ci95"]
            for name in names:
                functions[metric_key(name, length)] = functools.partial(self._stored, metric_key(name, length))
        return functions

    def _nll(self, length: int, samples: list[Any]) -> Any:
        nll_nats, *sizes = cluster_sums(samples, 1 + len(UNITS))
        tokens, *_ = sizes
        ratios = [ratio_interval(nll_nats, size, seed=self.seed) for size in sizes]
        estimates = dict(zip(UNITS, ratios, strict=True))
        values: dict[str, Any] = {"tokens": int(tokens.sum()), "clusters": int((tokens > 0).sum())}
        for metric, (unit, transform) in RATIOS.items():
            values[metric] = _finite(transform, estimates[unit].estimate)
            values[f"{metric}_ci95"] = _interval(estimates[unit], transform)
        self._nats[length] = nll_nats
        if self.same_targets and length != self.lengths[0]:
            values |= self._difference("nll_change", nll_nats - self._nats[self.lengths[0]], tokens)
        self._keep(length, values)
        return values["nll"]

    def _beside(self, condition: str, length: int, samples: list[Any]) -> Any:
        nll_nats, tokens, *_ = cluster_sums(samples, 1 + len(UNITS))
        self._keep(length, self._difference(f"gain_over_{condition}", nll_nats - self._nats[length], tokens))
        return _finite(float, ratio_interval(nll_nats, tokens, seed=self.seed).estimate)

    def _difference(self, name: str, nats: NDArray[np.float64], tokens: NDArray[np.float64]) -> dict[str, Any]:
        ratio = ratio_interval(nats, tokens, seed=self.seed)
        return {name: ratio.estimate, f"{name}_ci95": _interval(ratio, lambda nats: nats)}

    def _longppl(self, length: int, samples: list[Any]) -> Any:
        nll_nats, tokens, *_ = cluster_sums(samples, 1 + len(UNITS))
        ratio = ratio_interval(nll_nats, tokens, seed=self.seed)
        values = (_interval(ratio, np.exp), int(tokens.sum()), ratio.clusters)
        self._keep(length, dict(zip(OF_LONGPPL, values, strict=True)))
        return _finite(np.exp, ratio.estimate)

    def _keep(self, length: int, values: Mapping[str, Any]) -> None:
        self._values |= {metric_key(name, length): value for name, value in values.items()}

    def _stored(self, key: str, samples: list[Any]) -> Any:
        return self._values[key]


def _finite(transform: Callable[[float], float], value: float) -> float | None:
    with np.errstate(over="ignore"):
        result = float(transform(value))
    return result if math.isfinite(result) else None


def _interval(estimate: RatioEstimate, transform: Callable[[float], float]) -> CompactList | None:
    if estimate.low is None or estimate.high is None:
        return None
    low, high = _finite(transform, estimate.low), _finite(transform, estimate.high)
    return None if low is None or high is None else CompactList([low, high])
