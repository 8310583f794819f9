import pytest

from sbeval.errors import UserError
from sbeval.training.recipe import read_recipe


def test_the_demo_recipes_differ_in_nothing_but_the_attention():
    stickbreaking = read_recipe("demo_stickbreaking")
    rope = read_recipe("demo_rope")
    assert stickbreaking.model | {"attention": "rope"} == rope.model
    assert stickbreaking.data == rope.data
    assert stickbreaking.optimization == rope.optimization
    assert (stickbreaking.seed, stickbreaking.precision) == (rope.seed, rope.precision)
    assert stickbreaking.optimization.total_tokens >= 150_000_000


def test_numbers_with_exponents_are_read_as_numbers(tmp_path):
    text = (
        "name: x\nmodel: {training_length_tokens: 8}\ndata: {folder: f}\n"
        "optimization: {learning_rate: 3e-3, total_tokens: 64, batch_tokens: 16, warmup_steps: 1}\n"
    )
    (tmp_path / "r.yaml").write_text(text)
    assert read_recipe(tmp_path / "r.yaml").optimization.learning_rate == 0.003


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("extra: 1\n", "unknown key 'extra'"),
        ("seed: many\n", "seed of the recipe to be a whole number of at least 0, found 'many': correct it in r.yaml"),
        ("precision: float8\n", "Expected precision of the recipe to be one of bfloat16, float32"),
        ("model: {attention: rope}\n", "r.yaml: Expected model.training_length_tokens .* found none: add it"),
        ("model: {training_length_tokens: 8, true: 0}\n", "model of the recipe to be a mapping .* whose keys are text"),
        ("model: {training_length_tokens: 8, null: 0}\n", "model of the recipe to be a mapping .* whose keys are text"),
        ("data: {folder: f, recall_share: 2}\n", "data.recall_share of the recipe to be a number from 0 to below 1"),
        ("optimization: {learning_rate: 1, total_tokens: 64, batch_tokens: 12, warmup_steps: 1}\n", "windows of 8"),
        ("optimization: {total_tokens: 64, batch_tokens: 16}\n", "optimization.learning_rate .* add it in r.yaml"),
        ("optimization: {learning_rate: 1, total_tokens: 8, batch_tokens: 16, warmup_steps: 1}\n", "at least one step"),
        ("optimization: [1]\n", "optimization of the recipe to be a mapping"),
    ],
)
def test_a_faulty_recipe_is_one_clear_sentence(tmp_path, change, message):
    parts = {
        "name": "name: x\n",
        "model": "model: {training_length_tokens: 8}\n",
        "data": "data: {folder: f}\n",
        "optimization": "optimization: {learning_rate: 1, total_tokens: 64, batch_tokens: 16, warmup_steps: 1}\n",
    }
    parts[change.partition(":")[0]] = change
    (tmp_path / "r.yaml").write_text("".join(parts.values()))
    with pytest.raises(UserError, match=message):
        read_recipe(tmp_path / "r.yaml")


def test_a_recipe_based_on_another_holds_what_differs(tmp_path):
    (tmp_path / "r.yaml").write_text("based_on: demo_rope\nname: mine\noptimization: {learning_rate: 1e-3}\n")
    base, mine = read_recipe("demo_rope"), read_recipe(tmp_path / "r.yaml")
    optimization = base.optimization.changed(learning_rate=1e-3)
    assert mine == base.changed(name="mine", optimization=optimization)
