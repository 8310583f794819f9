"""Calls transformers' `generate` with the same arguments as lm-eval's `hf`."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor

from sbeval.model_adapters.open.opened import Opened


def call_generate(
    opened: Opened, ids_BL: Tensor, *, mask_BL: Tensor, stop: Sequence[str], max_length: int, **settings: Any
) -> Any:
    """Calls the model's `generate` and returns its output; greedy unless `settings` say otherwise.

    Args:
        opened: the model.
        ids_BL: prompts, padded on the left.
        mask_BL: 1 for a prompt's tokens, 0 for padding.
        stop: texts that end an answer.
        max_length: the largest number of tokens of a prompt with its answer.
        settings: further arguments of `generate`.
    """
    temperature, samples = settings.get("temperature", 0.0), settings.get("do_sample")
    if temperature == 0.0 and samples is None:
        settings["do_sample"] = samples = False
    settings["temperature"] = temperature
    if samples is False and temperature == 0.0:
        settings.pop("temperature")  # transformers would warn that it has no effect
    model, tokenizer, mixed = opened.model, opened.tokenizer, opened.mixed_precision_dtype
    criteria = stop_sequences_criteria(tokenizer, list(stop), ids_BL.shape[1], ids_BL.shape[0])
    with torch.autocast(device_type=opened.device.type, dtype=mixed, enabled=mixed is not None):
        return model.generate(
            input_ids=ids_BL,
            attention_mask=mask_BL,
            max_length=max_length,
            stopping_criteria=criteria,
            pad_token_id=tokenizer.pad_token_id,
            use_cache=True,
            **settings,
        )


@contextlib.contextmanager
def without_cache(model: Any) -> Iterator[None]:
    """Inside this context, the model's `generate` has no KV cache: it reads the whole text again for each new token."""
    generate = model.generate
    vars(model)["generate"] = lambda **options: generate(**{**options, "use_cache": False})
    try:
        yield
    finally:
        del vars(model)["generate"]
