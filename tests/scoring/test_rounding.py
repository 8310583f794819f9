"""Random rounding errors are the same however many numbers get them at a time, and take little memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sbeval.scoring import rounding
from sbeval.scoring.rounding import rounded_anew
from tests.scoring.live_bytes import peak_bytes

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def hidden(model: LlamaForCausalLM, length: int) -> Tensor:
    ids = (torch.arange(length) % SIZES["vocab_size"])[None]
    with torch.no_grad():
        return model.model(input_ids=ids, use_cache=False).last_hidden_state


def rounded(model: LlamaForCausalLM, length: int) -> Tensor:
    with rounded_anew(model, seed=3, times=1.0):
        return hidden(model, length)


def test_errors_do_not_depend_on_how_many_numbers_get_them_at_a_time(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rounded(model, 40)
    assert not torch.equal(whole, hidden(model, 40))
    monkeypatch.setattr(rounding, "AT_ONCE_NUMBERS", 1000)
    assert torch.equal(rounded(model, 40), whole)


def test_errors_of_a_long_text_take_two_fp32_copies_of_the_numbers_that_get_them_at_a_time(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "AT_ONCE_NUMBERS", 2**14)
    plain = peak_bytes(lambda: hidden(model, 1024))
    assert peak_bytes(lambda: rounded(model, 1024)) <= plain + 2 * 4 * 2**14
