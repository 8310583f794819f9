"""Which of PyTorch's attentions a generation uses."""

import pytest
import torch
from torch import Tensor, nn

from sbeval.model_adapters.decoding import MOST_NEW_TOKENS, steps_without_plans


class Model(nn.Module):
    """Remembers whether cuDNN's attention was allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: list[bool] = []

    def forward(self, input_ids: Tensor) -> int:
        self.allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        if len(self.allowed) == 4:
            raise RuntimeError("out of memory")
        return input_ids.shape[-1]


def test_cudnn_is_left_out_of_steps_alone_and_allowed_again_after_each() -> None:
    model, token, prompt = Model(), torch.zeros(2, 1), torch.zeros(2, MOST_NEW_TOKENS + 1)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with steps_without_plans(model):
        assert model(input_ids=prompt) == MOST_NEW_TOKENS + 1
        assert model(input_ids=token) == 1
        assert model(token) == 1
        assert torch.backends.cuda.cudnn_sdp_enabled()
        with pytest.raises(RuntimeError):
            model(token)
    assert model.allowed == [True, False, False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()
    model(token)
    assert model.allowed[-1]
