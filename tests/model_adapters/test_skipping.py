"""What `sb` skips when nobody says: keys of spent sticks, in stick-breaking models alone, and the run records it."""

import pytest

from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.model_adapters.options import DEFAULT_SKIP_THRESHOLD
from sbeval.models.attention import StickBreakingMixer
from tests.model_adapters.small import Checkpoints


@pytest.mark.parametrize(
    ("architecture", "given", "in_force"),
    [
        ("stickbreaking", {}, DEFAULT_SKIP_THRESHOLD),
        ("stickbreaking", {"skip_threshold": 1e-3}, 1e-3),
        ("stickbreaking", {"skip_threshold": 0}, None),
        ("stickbreaking", {"skip_threshold": None}, None),
        ("rope", {}, None),
        ("llama", {}, None),
    ],
)
def test_stick_breaking_skips_by_default_and_the_run_records_it(
    checkpoint: Checkpoints, architecture: str, given: dict[str, float | None], in_force: float | None
) -> None:
    lm = StickBreakingLM(str(checkpoint(architecture)), device="cpu", dtype="float32", batch_size=1, **given)
    mixers = [module for module in lm.model.modules() if isinstance(module, StickBreakingMixer)]
    assert bool(mixers) == (architecture == "stickbreaking")
    assert {mixer.kernels.skip_threshold for mixer in mixers} <= {in_force}
    assert lm.get_model_info()["sbeval"]["skip_threshold"] == in_force
