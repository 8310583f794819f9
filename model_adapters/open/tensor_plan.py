"""Tensor parallelism by a plan of transformers (`tp_plan`): which models and numbers of processes it works for."""

import os
from typing import Any

import torch
from packaging.version import Version

from sbeval.checkpoints.facts import text_config
from sbeval.errors import UserError
from sbeval.fingerprint.parts import installed_version

OLDEST_TRANSFORMERS_OF_PLANS = (5, 21)
"""Older releases keep whole matrices that a plan should split, and fused modules do not give a plan's logits there."""


def check_tensor_plan(config: Any, plan: Any) -> None:
    """Checks that the processes of this run can share each of a model's products by a tensor plan.

    Raises:
        UserError: the installed transformers splits matrices in another way, it knows no plan for the model, the
            key-value heads cannot be dealt out evenly, or there is one process, whose model transformers would leave
            on the CPU.
    """
    installed = installed_version("transformers")
    if installed is not None and Version(installed).release < OLDEST_TRANSFORMERS_OF_PLANS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS_OF_PLANS))
        raise UserError(
            f"tp_plan needs transformers {oldest} or newer, and {installed} is installed: upgrade transformers, or "
            "leave tp_plan out."
        )
    config, processes = text_config(config), int(os.environ.get("WORLD_SIZE", "1"))
    if plan == "auto" and not getattr(config, "base_model_tp_plan", None):
        remedy = "leave tp_plan out (context_parallel shares windows of this project's models)"
        raise UserError(f"Expected a model with a plan for tp_plan=auto, found {config.model_type}: {remedy}.")
    if processes == 1 and torch.cuda.is_available():
        remedy = "start one a GPU, as by sbeval launch --num_processes 2, or leave tp_plan out"
        raise UserError(f"Expected several processes for tp_plan, found one: {remedy}.")
    names = ("num_key_value_heads", "num_attention_heads")
    heads = next((count for name in names if (count := getattr(config, name, None))), processes)
    if heads % processes:
        expected = f"Expected processes that divide the model's {heads} key-value heads for tp_plan"
        raise UserError(f"{expected}, found {processes}: start fewer.")
