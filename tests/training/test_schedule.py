import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbeval.training.recipe import OptimizationSettings
from sbeval.training.trainer import cosine, extension, warmup_stable_decay


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

    assert rate(0) == pytest.approx(1e-5)
    assert rate(75) == pytest.approx((1e-5 + 1.25e-4) / 2)
    assert rate(150) == pytest.approx(1.25e-4)
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
