"""What a run's limits are, as the session tells them to scoring and generation."""

from typing import Any

import pytest
import torch

from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.model_adapters.session import GPU_BATCH_TOKENS, Session
from tests.model_adapters.small import Checkpoints


class OnGpu:
    """An lm-eval model that says it is on a GPU."""

    device = torch.device("cuda")

    def __init__(self, lm: StickBreakingLM) -> None:
        self._lm = lm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)


@pytest.mark.parametrize("tokens", [None, 300])
@pytest.mark.parametrize("batch_size", ["auto", 5])
def test_on_a_gpu_tokens_of_slots_are_limited_where_the_user_limits_a_batch(
    batch_size: int | str, tokens: int | None, checkpoint: Checkpoints
) -> None:
    lm = StickBreakingLM(str(checkpoint("llama")), device="cpu", batch_size=batch_size, max_batch_tokens=tokens)
    session = Session.of(OnGpu(lm), lm.options)
    assert session.slots.max_tokens == tokens
    assert session.own_batches.max_tokens == (tokens or GPU_BATCH_TOKENS)
