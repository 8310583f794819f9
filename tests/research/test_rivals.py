"""The rivals at evaluation time are evaluated as the adapter takes them, and the page says who is ahead."""

import itertools
import json
import re
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval._cli.utils import key_val_to_dict

from research.paper_experiments import longrope_factors
from research.paper_experiments.longrope_factors import beginnings, rising
from research.paper_experiments.rivals import CHECKPOINTS, LENGTH_TOKENS, TASKS, WAYS, jobs_of
from research.published_results.found import FIXED, STREAM, Found, multiple_name
from research.published_results.rivals import MULTIPLES, NAMES, OWN, rivals_section
from sbeval.model_adapters.options import AdapterOptions
from sbeval.models.extrapolation import Extrapolation
from tests.models.small import small_model, tokens


def test_every_command_asks_for_what_the_adapter_takes_of_a_checkpoint_that_ships(
    tmp_path: Path,
) -> None:
    (tmp_path / "longrope_16.json").write_text(json.dumps({"factor": 16, "long_factor": [1.0] * 32}))
    search, *jobs = jobs_of(Path("held_out.jsonl.gz"), tmp_path, "cuda")
    assert str(tmp_path / "longrope_16.json") in search.command()
    assert {job.name for job in jobs if search.name in job.needs} == {f"demo_rope_longrope_16-{task}" for task in TASKS}
    assert len({job.name for job in jobs}) == len(jobs) == len(TASKS) * (len(WAYS) + 1)
    results = set()
    for job in jobs:
        words = dict(itertools.pairwise(map(str, job.command())))
        arguments = key_val_to_dict(words["--model_args"])
        options = AdapterOptions.pop(arguments)
        assert Path(arguments["pretrained"]) == CHECKPOINTS / ("rope" if "_rope" in job.name else "stickbreaking")
        if isinstance(options.extrapolation, Extrapolation):
            assert options.extrapolation.trained_at(LENGTH_TOKENS).method in job.name
        asked = options.extrapolation is not None or options.rope_scaling is not None
        assert asked == (job.name.partition("-")[0] not in ("demo_rope", OWN))
        results.add(Path(words["--output_path"]).name)
    assert results == set(NAMES)


class Measured:
    """NLL by model and multiple of the training length under one task, in place of what an archive holds."""

    def __init__(self, nll: dict[tuple[str, float], float]) -> None:
        self.of = nll
        self.metrics = {(run, STREAM): {} for run, _ in nll}

    def nll(self, run: str, task: str, multiple: float) -> float | None:
        return self.of.get((run, multiple)) if task == STREAM else None

    def gain(self, one: tuple[str, float], other: tuple[str, float], task: str) -> tuple[float, float, float]:
        apart = self.of[one] - self.of[other]
        return apart, apart - 0.01, apart + 0.01

    def doubt(self, run: str, task: str) -> str:
        return ""


@given(st.lists(st.integers(0, 9), min_size=4 * 3, max_size=4 * 3))
def test_stick_breaking_is_best_exactly_where_the_page_says_so(levels: list[int]) -> None:
    runs, multiples = [OWN, *list(NAMES)[1:4]], (1, 4, 16)
    nll = {place: 2 + level / 10 for place, level in zip(itertools.product(runs, multiples), levels, strict=True)}
    lines = rivals_section(cast("Found", Measured(nll)))
    (said,) = [line for line in lines if "stick-breaking has the lowest NLL" in line]
    verdict, _, rivals = said.partition("The best rival")
    ahead, _, _ = verdict.partition("but not at")
    for multiple in (4, 16):
        own, others = nll[OWN, multiple], {run: nll[run, multiple] for run in runs[1:]}
        best = min(others, key=lambda run: others[run])
        named = multiple_name(multiple) in re.findall(r"\b\d+x\b", ahead) or "at every length" in ahead
        assert named == (own <= others[best])
        assert f"at {multiple_name(multiple)} {NAMES[best]}, {others[best] - own:+.3f} [" in rivals


@given(st.lists(st.floats(0.01, 100), min_size=1), st.floats(1, 64))
def test_factors_rise_within_their_bounds(factors: list[float], stretch: float) -> None:
    found = rising(factors, stretch)
    assert len(found) == len(factors)
    assert found == sorted(found)
    assert 1 <= found[0] <= found[-1] <= 1.25 * stretch


def test_a_search_ends_no_worse_than_it_begins() -> None:
    model = small_model(attention="rope", training_length_tokens=16)
    windows = tokens(2, 65)
    begun = min(longrope_factors.loss(model, windows, factors, 4.0) for factors in beginnings(4, 4.0))
    factors, nats = longrope_factors.search(model, windows, stretch=4.0, rounds=2, tries=4)
    assert nats <= begun
    assert nats == longrope_factors.loss(model, windows, factors, 4.0)


def test_without_rivals_there_is_no_section() -> None:
    assert rivals_section(cast("Found", Measured({(OWN, 1): 2.0}))) == []


@pytest.mark.parametrize("task", [STREAM, FIXED])
def test_the_page_has_a_column_for_every_length_beyond_a_quarter(task: str) -> None:
    assert max(MULTIPLES[task]) == TASKS[task][0]
