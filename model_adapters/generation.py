"""Prompts and continuations of `generate_until`: tokens, what does not fit, batches, and the text that comes back."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lm_eval.models.utils import has_bos_prefix
from numpy.typing import NDArray
from torch import Tensor

from sbeval.errors import UserError

logger = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """One prompt as the model reads it.

    Attributes:
        tokens: int64 [P], cut to what fits.
        budget_tokens: most tokens to generate.
        cut_tokens: how many were cut on the left.
    """

    tokens: NDArray[np.int64]
    budget_tokens: int
    cut_tokens: int


def encode_prompt(tokenizer: Any, text: str, *, add_bos_token: bool | None, prefix_token_id: int) -> list[int]:
    """Returns a prompt's tokens: BOS as the tokenizer or `add_bos_token` has it, unless the text holds it already."""
    options: dict[str, bool] = {}
    if has_bos_prefix(text, getattr(tokenizer, "bos_token", None)):
        options = {"add_special_tokens": False}
    elif add_bos_token is not None:
        options = {"add_special_tokens": add_bos_token}
    tokens: list[int] = tokenizer(text, **options)["input_ids"]
    return tokens or [prefix_token_id]


def fit_prompts(
    prompts: Sequence[list[int]],
    budgets: Sequence[int],
    task_names: Sequence[str | None],
    *,
    max_length: int,
    cut: bool,
) -> list[Prompt]:
    """Cuts prompts on the left so that prompt and budget fit into `max_length`.

    Raises:
        UserError: a prompt of one of our own tasks is too long, any prompt is and `cut` is false, or a generation
            budget leaves no room for a prompt.
    """
    over = [index for index in range(len(prompts)) if len(prompts[index]) + budgets[index] > max_length]
    ours = [index for index in over if (task_names[index] or "").startswith("sb_")]
    refused = over if not cut else ours
    if refused:
        needed = max(len(prompts[index]) + budgets[index] for index in refused)
        names = ", ".join(sorted({task_names[index] or "unnamed" for index in refused}))
        raise UserError(
            f"Expected the prompts of {names} and the tokens to generate to fit into max_length={max_length}, found "
            f"{len(refused)} of {len(prompts)} longer: pass max_length={needed} in --model_args."
        )
    if over:
        smallest = max_length - max(budgets[index] for index in over)
        if smallest <= 0:
            raise UserError(
                f"Expected max_gen_toks to be less than max_length={max_length}, found {max_length - smallest}: lower "
                "it with --gen_kwargs max_gen_toks=..., or raise max_length in --model_args."
            )
        most = max(len(prompts[index]) + budgets[index] - max_length for index in over)
        logger.warning(
            "%d of %d prompts do not fit beside the tokens to generate into max_length=%d: up to %d tokens were cut on "
            "their left (truncation=error refuses this)",
            len(over),
            len(prompts),
            max_length,
            most,
        )
    fitted = []
    for tokens, budget in zip(prompts, budgets, strict=True):
        kept = min(len(tokens), max_length - budget) if budget < max_length else len(tokens)
        array = np.asarray(tokens[len(tokens) - kept :], dtype=np.int64)
        fitted.append(Prompt(array, budget, len(tokens) - kept))
    return fitted


def pad_left(prompts: Sequence[Prompt], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns input ids and attention mask, both int64 [B, longest prompt], padded on the left."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    input_ids = np.full((len(prompts), longest), pad_token_id, dtype=np.int64)
    mask = np.zeros((len(prompts), longest), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt.tokens) :] = prompt.tokens
        mask[row, longest - len(prompt.tokens) :] = 1
    return torch.from_numpy(input_ids).to(device), torch.from_numpy(mask).to(device)
