import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbeval.errors import UserError
from sbeval.training.recipe import OptimizationSettings, read_recipe
from sbeval.training.trainer import cosine, extension, warmup_stable_decay


def test_the_demo_recipes_differ_in_nothing_but_the_attention():
    stickbreaking = read_recipe("demo_stickbreaking")
    rope = read_recipe("demo_rope")
    assert (stickbreaking.model | {"attention": "rope"}, stickbreaking.data) == (rope.model, rope.data)
    assert stickbreaking.optimization == rope.optimization
    assert (stickbreaking.seed, stickbreaking.precision) == (rope.seed, rope.precision)
    assert stickbreaking.optimization.total_tokens >= 150_000_000


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
        (
            "optimization: {learning_rate: 1, total_tokens: 64, batch_tokens: 12, warmup_steps: 1}\n",
            "window length, 8 tokens",
        ),
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
    assert mine == base.changed(name="mine", optimization=base.optimization.changed(learning_rate=1e-3))


@pytest.mark.parametrize("schedule", [cosine, warmup_stable_decay, extension])
@given(warmup=st.integers(1, 50), rest=st.integers(2, 500))
def test_schedules_rise_to_the_peak_then_fall_to_zero(schedule, warmup, rest):
    steps = warmup + rest
    factors = [schedule(step, steps=steps, warmup_steps=warmup) for step in range(steps + 1)]
    assert all(0 <= factor <= 1 + 1e-12 for factor in factors)
    assert max(factors) == pytest.approx(1)
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert factors[-1] == pytest.approx(0, abs=1e-12)


def test_extension_is_the_papers_formula_at_its_lengths():
    def rate(step):
        return 1.25e-4 * extension(step, steps=6250, warmup_steps=150)

    assert [rate(step) for step in (0, 75, 150)] == pytest.approx([1e-5, (1e-5 + 1.25e-4) / 2, 1.25e-4])
    x = (3000 - 150) / 6100
    assert rate(3000) == pytest.approx(1.25e-4 * (math.exp(1 - x) - 1) / (math.e - 1))
    assert rate(6250) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("steps", "schedule", "warmup_steps"),
    [(2, "extension", 0), (40, "extension", 4), (6250, "extension", 150), (40, "cosine", 4), (9000, "cosine", 200)],
)
def test_a_warm_up_that_is_not_asked_for_follows_the_steps(steps, schedule, warmup_steps):
    settings = OptimizationSettings(learning_rate=1, total_tokens=8 * steps, batch_tokens=8, schedule=schedule)
    assert settings.warmup_steps == warmup_steps


def test_what_takes_less_memory_is_a_setting_of_the_recipe():
    recipe = read_recipe("demo_rope")
    first, *rest = recipe.memory_remedies()
    section, key, value = first.rpartition(" ")[2].replace("=", ".").split(".")
    assert (section, key) == ("optimization", "micro_batch_tokens")
    smallest = recipe.changed(optimization=recipe.optimization.changed(micro_batch_tokens=int(value)))
    assert smallest.memory_remedies() == rest
