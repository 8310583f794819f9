"""The results of the experiment as the pages read them, and how numbers are written."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sbeval.reports.analyse.overview import DOUBTFUL
from sbeval.reports.analyse.statistics import simultaneous_band
from sbeval.reports.read.files import Notes
from sbeval.reports.read.samples import SumsByDocument, read_document_sums
from sbeval.results.intervals import uneven

STREAM, FIXED = "sb_stdlib_stream", "sb_stdlib_fixed_target"
NAMES = {
    "stickbreaking": "stick-breaking",
    "stickbreaking_remainder": "stick-breaking, remainder bias",
    "stickbreaking_remainder_norm": "stick-breaking, remainder bias, head norm",
    "rope": "RoPE",
    "rope_dynamic1": "RoPE, `dynamic:1` at evaluation",
    "rope_dynamic4": "RoPE, `dynamic:4` at evaluation",
    "rope_4x": "RoPE, trained at 4x length",
    "rope_4x_dynamic": "RoPE, trained at 4x length with `dynamic:4`",
    "nope": "NoPE",
    "alibi": "ALiBi",
    "fire": "FIRE",
    "forgetting": "FoX",
    "rope_window_256": "RoPE, window 1/4x",
    "rope_window_512": "RoPE, window 1/2x",
    "rope_window_1024": "RoPE, window 1x",
    "stickbreaking_extended": "stick-breaking, extended to 4x",
    "rope_extended": "RoPE, extended to 4x with `dynamic:4`",
}


LATER = ("forgetting",)
"""Schemes that the plan of the archive does not have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """All results, by scheme (with `_seedN` for further seeds) and task.

    Attributes:
        metrics: metric keys without lm-eval's filter.
        sums: per-document sums of the perplexity tasks.
        records: training records by run.
        recall: MQRAR runs.
        speed: rows of benchmarks/training.py.
        plan: settings of the experiment.
        jobs: the ledgers of the experiment and of all additions.
        gpu_hours: accelerators times the time from the first job's start to the last one's end, over all additions.
        packed: short extensions on packed and on joined documents, each with the `addition` that holds it.
        sharded: those with sharded weights: `runs` and `log` of the run, and its `addition`.
        fire_rates: what `fire_rates.py` found, None where it was not run.
    """

    metrics: dict[tuple[str, str], dict[str, Any]]
    sums: dict[tuple[str, str], SumsByDocument]
    records: dict[str, dict[str, Any]]
    recall: list[dict[str, Any]]
    speed: list[dict[str, Any]]
    plan: dict[str, Any]
    jobs: list[dict[str, Any]]
    gpu_hours: float
    packed: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    sharded: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    fire_rates: dict[str, Any] | None = None

    @property
    def length(self) -> int:
        """Training length in tokens."""
        return 1024 // int(self.plan["shrink"])

    def nll(self, scheme: str, task: str, multiple: float) -> float | None:
        """NLL in nats per token at a multiple of the training length."""
        value = self.metrics.get((scheme, task), {}).get(f"nll@{round(multiple * self.length):07d}")
        return None if value is None else float(value)

    def seeds(self, scheme: str) -> list[str]:
        """Runs of a scheme that were evaluated, the first seed first."""
        named = [scheme, *(f"{scheme}_seed{seed}" for seed in range(1, int(self.plan["seeds"])))]
        return [name for name in named if (name, STREAM) in self.metrics]

    @property
    def added(self) -> list[str]:
        """The schemes of `LATER` that were trained."""
        return [scheme for scheme in LATER if f"scheme_{scheme}" in self.records]

    def edge_rate(self, scheme: str) -> float | None:
        """A scheme's learning rate where it is the lowest or highest tried, so that a better one may lie beyond."""
        record = self.records.get(f"scheme_{scheme}")
        if record is None:
            return None
        rate, rates = float(record["recipe"]["optimization"]["learning_rate"]), self.plan["learning_rates"]
        return rate if rate in (min(rates), max(rates)) else None

    def gain(self, one: tuple[str, float], other: tuple[str, float], task: str) -> tuple[float, float, float] | None:
        """NLL of one (scheme, multiple) minus that of the other on the same targets, with its 95% interval."""
        columns = []
        for scheme, multiple in (one, other):
            sums = self.sums.get((scheme, task))
            if sums is None or round(multiple * self.length) not in sums.lengths:
                return None
            column = sums.lengths.index(round(multiple * self.length))
            columns.append((sums.clusters, sums.nll_nats[:, column], sums.tokens[:, column]))
        (names, nats, tokens), (other_names, other_nats, other_tokens) = columns
        if names != other_names or not np.array_equal(tokens, other_tokens):
            return None
        seen = tokens > 0
        band = simultaneous_band((nats - other_nats)[seen, None], tokens[seen])
        return float(band.estimates[0]), float(band.lows[0]), float(band.highs[0])

    def doubt(self, scheme: str, task: str) -> str:
        """The mark beside an interval over documents so uneven that it is doubtful; nothing where it is not."""
        sums = self.sums.get((scheme, task))
        return f" {DOUBTFUL}" if sums is not None and uneven(sums.tokens.max(axis=1)) else ""


def read_tasks(
    folder: Path,
) -> tuple[dict[tuple[str, str], dict[str, Any]], dict[tuple[str, str], SumsByDocument]]:
    """Reads lm-eval's files below `results/`: metrics and per-document sums by scheme and task."""
    metrics: dict[tuple[str, str], dict[str, Any]] = {}
    sums: dict[tuple[str, str], SumsByDocument] = {}
    for file in sorted(folder.glob("results/*/*/results_*.json")):
        scheme = file.parents[1].name.removeprefix("scheme_")
        date = file.stem.removeprefix("results_")
        for task, values in json.loads(file.read_text(encoding="utf-8"))["results"].items():
            metrics[scheme, task] = {key.partition(",")[0]: value for key, value in values.items()}
            samples = file.with_name(f"samples_{task}_{date}.jsonl")
            if samples.is_file() and (found := read_document_sums(samples, Notes())) is not None:
                sums[scheme, task] = found
    return metrics, sums


def read(folder: Path) -> Found:
    """Reads the unpacked archive."""
    metrics, sums = read_tasks(folder)
    first_jobs = _lines(folder / "jobs.jsonl")
    later_jobs = [job for file in sorted(folder.glob("additions/*/*jobs.jsonl")) for job in _lines(file)]
    machines = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("additions/*/machine.json")]
    log = (folder / "queue.log").read_text(encoding="utf-8").splitlines()
    ended_seconds = max(float(line.split()[0]) for line in log if "  ended  " in line)
    speed = folder / "training_speed.json"
    return Found(
        metrics=metrics,
        sums=sums,
        records={file.stem: json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("records/*.json")},
        recall=[run for file in sorted(folder.glob("mqrar/*.json")) for run in json.loads(file.read_text("utf-8"))],
        speed=json.loads(speed.read_text(encoding="utf-8")) if speed.is_file() else [],
        plan=json.loads((folder / "plan.json").read_text(encoding="utf-8")),
        jobs=first_jobs + later_jobs,
        gpu_hours=(
            len({job["gpu"] for job in first_jobs}) * ended_seconds
            + sum(machine["gpus"] * machine["seconds"] for machine in machines)
        )
        / 3600,
        packed=[
            json.loads(file.read_text(encoding="utf-8")) | {"addition": file.parent.name}
            for file in sorted(folder.glob("additions/*/packed_*.json"))
        ],
        sharded=[
            {
                "runs": _lines(file),
                "log": _lines(file.with_name("sharded_log.jsonl")),
                "addition": file.parent.name,
            }
            for file in sorted(folder.glob("additions/*/sharded_runs.jsonl"))
        ],
        fire_rates=next(
            (json.loads(file.read_text("utf-8")) for file in folder.glob("additions/*/fire_rates.json")), None
        ),
    )


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)] + [""]


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or not np.isfinite(value) else f"{value:.{digits}f}"


def signed(found: tuple[float, float, float] | None, doubt: str = "") -> str:
    if found is None:
        return "not measured"
    estimate, low, high = found
    return f"{estimate:+.3f}" + (f" [{low:+.3f}, {high:+.3f}]{doubt}" if np.isfinite(low) else "")


def multiple_name(multiple: float) -> str:
    return f"1/{round(1 / multiple)}x" if multiple < 1 else f"{multiple:g}x"
