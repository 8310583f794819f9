"""Which of PyTorch's attentions a generation uses."""

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from sbeval.model_adapters.speed.generating import MOST_NEW_TOKENS, steps_without_plans
from tests.model_adapters.small import ARCHITECTURES


class Model(nn.Module):
    """Remembers whether cuDNN's attention was allowed."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.allowed: list[bool] = []

    def forward(self, input_ids: Tensor) -> int:
        self.allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        if len(self.allowed) == 4:
            raise self.error
        return input_ids.shape[-1]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_cudnn_is_left_out_of_steps_alone_and_allowed_again_after_each(error: BaseException) -> None:
    model, token = Model(error), torch.zeros(2, 1)
    prompt = torch.zeros(2, MOST_NEW_TOKENS + 1)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with steps_without_plans(model):
        assert model(input_ids=prompt) == MOST_NEW_TOKENS + 1
        assert model(input_ids=token) == 1
        assert model(token) == 1
        assert torch.backends.cuda.cudnn_sdp_enabled()
        with pytest.raises(type(error)):
            model(token)
    assert model.allowed == [True, False, False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()
    model(token)
    assert model.allowed[-1]


def test_steps_of_a_model_with_a_lora_adapter_are_found() -> None:
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES["llama"](64)).eval()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    allowed: list[bool] = []
    base.lm_head.register_forward_hook(lambda *_: allowed.append(torch.backends.cuda.cudnn_sdp_enabled()))
    with steps_without_plans(model):
        model.generate(input_ids=torch.arange(20)[None], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert allowed == [True, False, False]
