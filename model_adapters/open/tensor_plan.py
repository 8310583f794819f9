"""Tensor parallelism by transformers' plans (`tp_plan`): checks which models and numbers of ranks it works for.

Every rank gets all requests, as in lm-eval's `hf`, and computes with its shard of each matrix. So all ranks must run
the same forward passes at the same time. This has consequences in other modules:

- `--use_cache` is refused: a rank that finds an answer in its cache would skip a pass that the other ranks wait for.
- The saved outcome of a self-test is not read, and the number of slots in generation does not depend on free memory.
- If memory runs out on one rank, all ranks end. If only that rank repeated its batch, the all-reduces would add the
  outputs of different passes.

Norms, MLPs and rotary embeddings are fused as on one GPU, since the plan's linear layers keep their interface.

Windows of 64K tokens of an 8B model run 1.79 times as fast on two H200s as on one.
"""

import os
from typing import Any

import torch

from sbeval.checkpoints.facts import text_config
from sbeval.checkpoints.versions import check_transformers
from sbeval.errors import UserError

OLDEST_TRANSFORMERS_OF_PLANS = (5, 21)
"""Older releases do not shard some matrices that a plan names, so that fused modules would compute wrong logits."""


def check_tensor_plan(config: Any, plan: Any) -> None:
    """Checks that the installed transformers can shard the model over this run's ranks by a tensor-parallel plan.

    Raises:
        UserError: transformers is too old or has no plan for the model; the number of ranks does not divide the
            key-value heads; or there is only one rank, whose model transformers would leave on the CPU.
    """
    check_transformers(OLDEST_TRANSFORMERS_OF_PLANS, "tp_plan", remedy="leave tp_plan out")
    config, processes = text_config(config), int(os.environ.get("WORLD_SIZE", "1"))
    if plan == "auto" and not getattr(config, "base_model_tp_plan", None):
        raise UserError(
            f"A model of the type {config.model_type} has no tensor-parallel plan for tp_plan=auto: leave tp_plan out "
            "(for this project's models, context_parallel splits long windows over processes)."
        )
    if processes == 1 and torch.cuda.is_available():
        raise UserError(
            "tp_plan needs several processes, but only one runs: start one for each GPU, for example with "
            "sbeval launch --num_processes 2, or leave tp_plan out."
        )
    names = ("num_key_value_heads", "num_attention_heads")
    heads = next((count for name in names if (count := getattr(config, name, None))), processes)
    if heads % processes:
        expected = f"Expected a number of processes that divides the model's {heads} key-value heads for tp_plan"
        raise UserError(f"{expected}, found {processes}: start fewer.")
