"""Prompts and continuations of `generate_until`: the tokens that go in, and the text that comes back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.models.utils import has_bos_prefix, postprocess_generated_text
from torch import Tensor

from sbeval.model_adapters.truncation import Prompt


def encode_prompt(tokenizer: Any, text: str, *, add_bos_token: bool | None, prefix_token_id: int) -> list[int]:
    """Returns a prompt's tokens: BOS as the tokenizer or `add_bos_token` has it, unless the text holds it already."""
    options: dict[str, bool] = {}
    if has_bos_prefix(text, getattr(tokenizer, "bos_token", None)):
        options = {"add_special_tokens": False}
    elif add_bos_token is not None:
        options = {"add_special_tokens": add_bos_token}
    tokens: list[int] = tokenizer(text, **options)["input_ids"]
    return tokens or [prefix_token_id]


def pad_left(prompts: Sequence[Prompt], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns input ids and attention mask, both int64 [B, longest prompt], padded on the left."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    input_ids = np.full((len(prompts), longest), pad_token_id, dtype=np.int64)
    mask = np.zeros((len(prompts), longest), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt.tokens) :] = prompt.tokens
        mask[row, longest - len(prompt.tokens) :] = 1
    return torch.from_numpy(input_ids).to(device), torch.from_numpy(mask).to(device)


def up_to_end(tokens: list[int], ends: int | Sequence[int] | None) -> list[int]:
    """Returns a row of generated tokens without the padding that fills it while other rows of its batch go on.

    Args:
        tokens: what was generated.
        ends: the tokens that end an answer; the first of them is kept.
    """
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    first = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: first + 1]


def answer_text(tokenizer: Any, tokens: list[int], stop: list[str], think_end_token: str | int | None) -> str:
    """Returns the text of a continuation up to its first stop sequence, without what a model thinks before it.

    Args:
        tokenizer: decodes the tokens; special tokens are left out.
        tokens: what the model generated.
        stop: stop sequences.
        think_end_token: where thinking ends, as text or as a token id; None where the model does not think.
    """
    thinks = isinstance(think_end_token, int)
    if thinks and think_end_token in tokens:
        tokens = tokens[len(tokens) - tokens[::-1].index(think_end_token) :]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    answer: str = postprocess_generated_text(
        generation=text.lstrip() if thinks else text,
        stop=stop,
        think_end_token=think_end_token if isinstance(think_end_token, str) else None,
    )
    return answer
