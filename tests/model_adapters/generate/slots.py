"""An adapter that generates in slots, and prompts for it."""

from typing import Any

import torch

from sbeval.model_adapters.lm import StickBreakingLM
from tests.model_adapters.small import LINES as ALL_LINES
from tests.model_adapters.small import generated, load_lm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LINES = ALL_LINES[3:10]  # in others, two tokens are as likely but for rounding
SETTING: dict[str, Any] = {"until": ["\n\n"], "max_gen_toks": 20}


def answers(lm: Any, setting: dict[str, Any] = SETTING, prompts: list[str] = LINES) -> list[str]:
    return generated(lm, [(prompt, setting) for prompt in prompts])


def adapter(folder: Any, ends: range | None = None, **options: Any) -> StickBreakingLM:
    """An adapter, with the tokens that end a text: some make answers of many lengths."""
    lm = load_lm(folder, **{"device": DEVICE, "batch_size": 3, **options})
    if ends is not None:
        lm.model.generation_config.eos_token_id = list(ends)
    return lm
