"""What `sb` does when nobody says: it skips keys of spent sticks, and limits slots where the user limits a batch."""

import dataclasses

import pytest
import torch

from sbeval.errors import UserError
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.model_adapters.options import DEFAULT_SKIP_THRESHOLD
from sbeval.model_adapters.session import GPU_BATCH_TOKENS, Session
from sbeval.models.attention import StickBreakingMixer
from tests.model_adapters.small import load_lm


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
def test_stick_breaking_skips_by_default_and_the_run_records_it(checkpoint, architecture, given, in_force):
    lm = load_lm(checkpoint(architecture), batch_size=1, **given)
    mixers = [module for module in lm.model.modules() if isinstance(module, StickBreakingMixer)]
    assert bool(mixers) == (architecture == "stickbreaking")
    assert {mixer.kernels.skip_threshold for mixer in mixers} <= {in_force}
    assert lm.get_model_info()["sbeval"]["skip_threshold"] == in_force


def test_a_threshold_for_the_reference_is_refused(checkpoint):
    with pytest.raises(UserError, match="reference, which visits every key"):
        load_lm(checkpoint("stickbreaking"), kernels="reference", skip_threshold=1e-5)


@pytest.mark.parametrize("tokens", [None, 300])
@pytest.mark.parametrize("batch_size", ["auto", 5])
def test_on_a_gpu_tokens_of_slots_are_limited_where_the_user_limits_a_batch(batch_size, tokens, checkpoint):
    lm = StickBreakingLM(str(checkpoint("llama")), device="cpu", batch_size=batch_size, max_batch_tokens=tokens)
    session = Session.of(dataclasses.replace(lm.opened, device=torch.device("cuda")), lm.prepared)
    assert session.slots.max_tokens == tokens
    assert session.own_batches.max_tokens == (tokens or GPU_BATCH_TOKENS)
