"""What `sb` skips when nobody says: keys of spent sticks, in stick-breaking models alone, and the run records it."""

from typing import Any

import pytest

from sbeval.errors import UserError
from sbeval.model_adapters.options import DEFAULT_SKIP_THRESHOLD
from sbeval.models.attention import StickBreakingMixer
from tests.model_adapters.small import Checkpoints, load_lm


@pytest.mark.parametrize(
    ("architecture", "given", "in_force"),
    [
        ("stickbreaking", {}, DEFAULT_SKIP_THRESHOLD),
        ("stickbreaking", {"skip_threshold": 1e-3}, 1e-3),
        ("stickbreaking", {"skip_threshold": 0}, None),
        ("stickbreaking", {"skip_threshold": None}, None),
        ("stickbreaking", {"kernels": "blockwise"}, DEFAULT_SKIP_THRESHOLD),
        ("stickbreaking", {"kernels": "reference"}, None),
        ("rope", {}, None),
        ("llama", {}, None),
    ],
)
def test_stick_breaking_skips_by_default_and_the_run_records_it(
    checkpoint: Checkpoints, architecture: str, given: dict[str, Any], in_force: float | None
) -> None:
    lm = load_lm(checkpoint(architecture), batch_size=1, **given)
    mixers = [module for module in lm.model.modules() if isinstance(module, StickBreakingMixer)]
    assert bool(mixers) == (architecture == "stickbreaking")
    assert {mixer.kernels.skip_threshold for mixer in mixers} <= {in_force}
    assert lm.get_model_info()["sbeval"]["skip_threshold"] == in_force


def test_a_threshold_for_the_reference_is_refused(checkpoint: Checkpoints) -> None:
    with pytest.raises(UserError, match="reference, which visits every key"):
        load_lm(checkpoint("stickbreaking"), kernels="reference", skip_threshold=1e-5)
