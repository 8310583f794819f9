"""The recipes of the experiment on position schemes: the same tokens for all, and the lengths that it shrinks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from research.other_models import fla_table
from research.other_models.fla_table import read, with_table
from research.paper_experiments.extrapolation import LENGTH_TOKENS, RECIPES, SCHEMES
from research.paper_experiments.recall_batches import recall_batch
from sbeval.models import SbevalConfig
from sbeval.tasks.recall.sequences import Mqrar
from sbeval.training.recipe import TrainRecipe, read_recipe

pytestmark = pytest.mark.exhaustive


def recipe_of(scheme: str) -> TrainRecipe:
    return read_recipe(RECIPES / f"scheme_{scheme}.yaml")


def test_every_recipe_is_in_the_experiment() -> None:
    assert {f"scheme_{scheme}" for scheme in SCHEMES} == {file.stem for file in RECIPES.iterdir()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_share_their_tokens_and_differ_in_attention_alone(scheme: str) -> None:
    base, recipe = recipe_of("stickbreaking"), recipe_of(scheme)
    assert recipe.name == f"scheme_{scheme}"
    assert (recipe.data, recipe.optimization, recipe.seed) == (base.data, base.optimization, base.seed)
    config = SbevalConfig(**recipe.model)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    assert all(getattr(config, size) == base.model[size] for size in sizes)
    lengths = {"training_length_tokens": LENGTH_TOKENS} | SCHEMES[scheme]
    for key in ("training_length_tokens", "sliding_window"):
        assert recipe.model.get(key) == lengths.get(key)
    original = recipe.model.get("rope_parameters", {}).get("original_max_position_embeddings")
    assert original == lengths.get("rope_parameters.original_max_position_embeddings")


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 12), st.integers(6, 11), st.integers(0, 2**31))
@settings(max_examples=60)
def test_each_target_is_the_value_its_key_had_n_assignments_ago(pairs, n_back, extra, keys, seed):
    slots, half = pairs * n_back + extra, keys + 1
    setting = Mqrar(length_tokens=2 * slots, pairs=pairs, vocabulary=2 * half, n_back=n_back)
    batch = recall_batch(setting, np.random.default_rng(seed), 3)
    for inputs, positions, targets in zip(batch["input_ids"], batch["positions"], batch["targets"], strict=True):
        asked = dict(zip(positions.tolist(), targets.tolist(), strict=True))
        assert len(asked) == extra
        past: dict[int, list[int]] = {}
        for place in range(0, 2 * slots, 2):
            key, value = inputs[place : place + 2].tolist()
            assert 1 <= key < half <= value < 2 * half
            had = past.setdefault(key, [])
            assert (place in asked) == (place >= 2 * pairs * n_back)
            if place in asked:
                assert asked[place] == had[-n_back]
            assert not had or had[-1] != value
            had.append(value)
        assert len(past) == pairs
        assert sorted(inputs[0 : 2 * pairs * n_back : 2]) == sorted([*past] * n_back)


def test_the_page_holds_what_the_kept_rows_say() -> None:
    page = fla_table.PAGE.read_text(encoding="utf-8")
    assert with_table(page, read([fla_table.ROWS])) == page
    with pytest.raises(SystemExit, match="put them where the table goes"):
        with_table("no marks", [])
