import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from sbeval.reports.samples import DocumentSums

RESULTS = Path(__file__).parents[2] / "docs" / "results"
LENGTHS = [256 * 2**power for power in range(9)]


@pytest.fixture(scope="module")
def pages():
    """The modules of docs/results, which import each other by their bare names."""
    sys.path.insert(0, str(RESULTS))
    try:
        loaded = {}
        for name in ("found", "claims", "figures", "write_pages"):
            spec = importlib.util.spec_from_file_location(name, RESULTS / f"{name}.py")
            loaded[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded[name])
        yield loaded
    finally:
        sys.path.remove(str(RESULTS))
        for name in ("found", "claims", "figures", "write_pages"):
            sys.modules.pop(name, None)


def results(pages, *, beyond: dict[str, float], seeds: int, at_training_length: dict[str, float] | None = None):
    """Results in which a scheme's NLL changes by `beyond[scheme]` past its training length, in all of 30 files."""
    draw = np.random.default_rng(0)
    level = 2.0 + 0.1 * draw.standard_normal(30)
    metrics, sums = {}, {}
    for scheme, change in beyond.items():
        for seed in range(seeds):
            run = scheme if seed == 0 else f"{scheme}_seed{seed}"
            base = (at_training_length or {}).get(scheme, 0.0) + 0.001 * seed
            nll = {length: base + (change if length > 1024 else 0.0) for length in LENGTHS}
            noise = {length: 0.01 * draw.standard_normal(30) for length in LENGTHS}
            table = {
                length: {
                    f"file{index}": np.array([100 * (level[index] + nll[length] + noise[length][index]), 100.0, 300.0])
                    for index in range(30)
                }
                for length in LENGTHS
            }
            for task in ("sb_stdlib_stream", "sb_stdlib_fixed_target"):
                sums[run, task] = DocumentSums(table)
                column = sums[run, task].nll_nats.sum(0) / sums[run, task].tokens.sum(0)
                metrics[run, task] = {f"nll@{length:07d}": value for length, value in zip(LENGTHS, column, strict=True)}
    plan = {"shrink": 1, "seeds": seeds, "needle_samples": 5, "recall_steps": 10}
    return pages["found"].Found(
        metrics=metrics, sums=sums, records={}, recall=[], speed=[], plan=plan, jobs=[], gpu_hours=0.0
    )


def verdict(pages, name: str, found) -> str:
    return getattr(pages["claims"], name)(found).verdict


def test_one_seed_never_holds_in_full(pages):
    gains = {"stickbreaking": -0.1, "rope": 2.0}
    assert verdict(pages, "_uses", results(pages, beyond=gains, seeds=1)) == "holds in part"
    assert verdict(pages, "_uses", results(pages, beyond=gains, seeds=3)) == "holds"


def test_a_claim_that_the_numbers_deny_does_not_hold(pages):
    found = results(pages, beyond={"stickbreaking": 0.5, "rope": 2.0}, seeds=3)
    assert verdict(pages, "_uses", found) == "does not hold"
    assert verdict(pages, "_keeps", found) == "does not hold"
    worse = results(
        pages, beyond={"stickbreaking": 0.0, "rope": 0.0}, seeds=3, at_training_length={"stickbreaking": 0.1}
    )
    assert verdict(pages, "_at_training_length", worse) == "does not hold"
    better = results(pages, beyond={"stickbreaking": 0.0, "rope": 0.0}, seeds=3, at_training_length={"rope": 0.1})
    assert verdict(pages, "_at_training_length", better) == "holds"


def test_stream_alone_never_holds_in_full(pages):
    found = results(pages, beyond={"stickbreaking": -0.1, "rope": 2.0}, seeds=3)
    assert verdict(pages, "_keeps", found) == verdict(pages, "_best_scheme", found) == "holds in part"


def test_missing_results_are_not_measured(pages):
    page = pages["claims"].claims_page(results(pages, beyond={}, seeds=1))
    assert page.count("**not measured**") == 10


def test_differences_are_paired_over_files(pages):
    found = results(pages, beyond={"stickbreaking": -0.1}, seeds=1)
    estimate, low, high = found.gain(("stickbreaking", 16), ("stickbreaking", 1), "sb_stdlib_fixed_target")
    assert low < -0.1 < high
    assert high - low < 0.03
    assert estimate == pytest.approx(-0.1, abs=0.01)
    assert found.gain(("stickbreaking", 16), ("nope", 1), "sb_stdlib_fixed_target") is None
