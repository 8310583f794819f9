"""The recipes of the experiment on position schemes: the same tokens for all, and the lengths that it shrinks."""

import pytest

from research.paper_experiments.extrapolation import LENGTH_TOKENS, RECIPES, SCHEMES
from sbeval.models import SbevalConfig
from sbeval.training.recipe import TrainRecipe, read_recipe


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
