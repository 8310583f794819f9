"""Seeds of schemes: what is trained and evaluated, and intervals over documents and seeds."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from research.paper_experiments import algorithm_data, algorithm_grid, scheme_grid
from research.paper_experiments.extrapolation import RECIPES
from research.paper_experiments.scheme_tables import FIXED, Model, difference, nll_figure
from sbeval.models import SbevalConfig
from sbeval.reports.read.samples import SumsByDocument
from sbeval.tasks.packaged import definitions
from sbeval.tasks.recall.algorithms import ALGORITHMS, END, VOCABULARY, solved
from sbeval.training.arrays import load_arrays
from sbeval.training.recipe import read_recipe


def options(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    values = {"data": tmp_path, "held_out": tmp_path / "text", "out": tmp_path, "seeds": 2, "gpus": 1, "shrink": 1}
    values |= {"schemes": ["rope", "nape"], "learning_rates": [1e-3, 2e-3], "tokens": 10**6, "search_tokens": 10**5}
    return argparse.Namespace(**values | {"stream_blocks": 8, "target_blocks": 120, "samples": 25, **changes})


def test_known_rates_are_not_searched_and_seeds_come_after_every_scheme_s_first(tmp_path: Path) -> None:
    rates = scheme_grid.known_rates(Path(__file__).parents[2] / scheme_grid.KNOWN_RATES)
    assert (rates["rope"], rates["fire"]) == (3e-3, 1.5e-3)
    plan = scheme_grid.plan_of(options(tmp_path))
    jobs = scheme_grid.jobs_of(plan, {"rope": rates["rope"]}, ["train", "evaluate"], ["fixed", "recall"])
    names = [job.name for job in sorted(jobs, key=lambda job: -job.urgency)]
    assert [name for name in names if name.startswith("search")] == ["search_nape_0.001", "search_nape_0.002"]
    assert names.index("scheme_nape") < names.index("scheme_rope_seed1")
    assert "scheme_rope_seed1-recall" in names
    command = next(job for job in jobs if job.name == "scheme_rope_seed1").command()
    assert "optimization.learning_rate=0.003" in command
    assert "seed=1" in command
    tasks = next(job for job in jobs if job.name == "scheme_nape-recall").command()[6].split(",")
    assert {"sb_mqrar", "sb_flipflop", "sb_niah_single_1", "sb_copy"} <= set(tasks) <= definitions().keys()
    # nothing is there to evaluate
    assert scheme_grid.jobs_of(plan, {}, ["evaluate"], ["fixed"]) == []


def models(nll: list[float], noise: float, seed: int) -> dict[int, Model]:
    """A model for each seed: 40 documents of 100 tokens, all of them better or worse by the seed."""
    draw = np.random.default_rng(seed).normal(0, noise, 40)
    made = {}
    for number, mean in enumerate(nll):
        sums = {f"d{index}": np.array([100 * (mean + draw[index]), 100, 400.0]) for index in range(40)}
        total = sum(value[0] for value in sums.values()) / 4000
        made[number] = Model({FIXED: {"nll@0001024": total}}, {FIXED: SumsByDocument({1024: sums})})
    return made


def test_an_interval_counts_documents_and_seeds() -> None:
    first, second = models([2.0, 2.0, 2.0], 0.1, 1), models([1.9, 1.9, 1.9], 0.1, 2)
    over_documents = difference(first, second, FIXED, 1024)
    assert over_documents is not None
    assert over_documents.low < 0.1 < over_documents.high
    same_documents = difference(models([2.0, 2.0, 2.0], 0.1, 1), models([1.8, 1.9, 2.0], 0.1, 1), FIXED, 1024)
    assert same_documents is not None
    # Welch's t interval of (2.0, 2.0, 2.0) and (1.8, 1.9, 2.0): 4.303 * 0.1 / sqrt(3)
    assert same_documents.estimate == pytest.approx(0.1)
    assert same_documents.high - same_documents.estimate == pytest.approx(0.2484, abs=1e-3)
    both = difference(models([2.0, 2.0, 2.0], 0.1, 1), models([1.8, 1.9, 2.0], 0.1, 2), FIXED, 1024)
    assert both is not None
    assert both.high - both.estimate > max(0.2484, over_documents.high - over_documents.estimate)
    single = difference(models([2.0], 0.1, 1), models([1.8, 1.9, 2.0], 0.1, 1), FIXED, 1024)
    assert single is not None
    assert (both.seeds, single.seeds) == (True, False)


def test_the_figure_has_each_scheme_s_mean_and_its_lowest_and_highest_seed() -> None:
    spec = nll_figure({"stickbreaking": models([1.8, 1.9, 2.0], 0.0, 1), "rope": models([5.0], 0.0, 1)})
    rows = {row["setting"]: row for row in spec["data"]["values"]}
    assert rows.keys() == {"stick-breaking", "RoPE"}
    ends = [rows["stick-breaking"][field] for field in ("y", "seed_low", "seed_high")]
    assert ends == pytest.approx([1.9, 1.8, 2.0])
    assert rows["RoPE"]["y"] == pytest.approx(5.0)
    assert "seed_low" not in rows["RoPE"]


def test_training_windows_are_whole_sequences_with_other_seeds_than_the_tasks(tmp_path: Path) -> None:
    algorithm_data.write_arrays(tmp_path, ALGORITHMS, windows=60, length_tokens=64)
    arrays = load_arrays(tmp_path)
    assert arrays.recall.shape == (60, 65)
    lengths: dict[str, set[int]] = {}
    for index, row in enumerate(arrays.recall):
        algorithm = ALGORITHMS[index % len(ALGORITHMS)]
        for tokens in range(65, 0, -2):
            if (row[tokens:] == END).all():
                made = solved(algorithm, tokens, algorithm_data.TRAINING_SEED, index).tokens_T
                if np.array_equal(made, row[:tokens]):
                    lengths.setdefault(algorithm, set()).add(tokens)
                    break
        else:
            raise AssertionError(f"row {index} is no sequence of {algorithm}")
    assert all(len(found) > 1 and max(found) <= 65 for found in lengths.values())
    assert len(lengths) == len(ALGORITHMS)


@pytest.mark.parametrize("scheme", algorithm_grid.SCHEMES)
def test_models_of_algorithms_differ_in_attention_alone(scheme: str) -> None:
    recipe = read_recipe(algorithm_grid.RECIPE)
    assert recipe.model["vocab_size"] == VOCABULARY
    assert recipe.length_tokens == algorithm_data.LENGTH_TOKENS
    config = SbevalConfig(**recipe.model | algorithm_grid.SCHEMES[scheme])
    assert config.attention == algorithm_grid.SCHEMES[scheme]["attention"]


@pytest.mark.parametrize(("recipe", "scheme"), [("ssmax", "rope-ssmax"), ("nape_asentmax", "nape-asentmax")])
def test_new_schemes_have_the_names_of_their_recipes(recipe: str, scheme: str) -> None:
    assert SbevalConfig(**read_recipe(RECIPES / f"scheme_{recipe}.yaml").model).scheme == scheme
