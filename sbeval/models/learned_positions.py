"""The number of positions of models with learned position embeddings, which limits the length of their input."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from sbeval.hub_names import local_path
from sbeval.keeping.content import cached_by_content, content_of

_POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "positions_embed")


def learned_positions(model: nn.Module) -> int | None:
    """Returns the number of positions of a model with learned position embeddings, None for any other model."""
    config: Any = getattr(model, "config", None)
    stated = getattr(getattr(config, "text_config", None) or config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES:
            entries = int(module.num_embeddings)
            # some tables have more entries than positions: OPT's begin at index 2
            return min(entries, stated) if isinstance(stated, int) and stated > 0 else entries
    return None


def _configuration(pretrained: str) -> Hashable:
    return content_of(local_path(pretrained) / "config.json")


@cached_by_content(4, content=_configuration)
def checkpoint_learned_positions(pretrained: str, revision: str | None = None) -> int | None:
    """Returns `learned_positions` of a checkpoint; None if it has none or transformers cannot build its model.

    The model is built on the meta device from its configuration, so no weights are loaded or allocated.
    """
    try:
        config = AutoConfig.from_pretrained(pretrained, revision=revision or "main")
        if config.model_type == "sbeval":
            return None
        build: Any = AutoModelForCausalLM.from_config
        with torch.device("meta"):
            return learned_positions(build(config))
    except (OSError, ValueError, KeyError, AttributeError, ImportError):
        # a format that transformers does not know, or a fault that loading the model reports more clearly
        return None
