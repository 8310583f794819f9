"""An adapter that generates in slots, and prompts for it."""

from typing import Any

import torch

from sbeval.model_adapters.lm import StickBreakingLM
from tests.model_adapters.small import english, instances

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LINES = [line for line in english().splitlines() if line][3:10]  # in others, two tokens are as likely but for rounding
SETTING: dict[str, Any] = {"until": ["\n\n"], "max_gen_toks": 20}


def answers(lm: Any, setting: dict[str, Any] = SETTING, prompts: list[str] = LINES) -> list[str]:
    found: list[str] = lm.generate_until(
        instances("generate_until", [(p, setting) for p in prompts]), disable_tqdm=True
    )
    return found


def adapter(folder: Any, **options: Any) -> StickBreakingLM:
    return StickBreakingLM(str(folder), device=DEVICE, dtype="float32", **{"batch_size": 3, **options})
