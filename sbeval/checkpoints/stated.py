"""What the `config.json` of a checkpoint folder states, read without loading anything."""

import json
from pathlib import Path
from typing import Any


def local_config(pretrained: object) -> dict[str, Any]:
    """Returns the configuration of a checkpoint folder, nothing for a hub id, a model, or a folder that has none."""
    path = Path(pretrained) / "config.json" if isinstance(pretrained, str | Path) else None
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}
    return config


def longest_input_tokens(pretrained: object) -> int | None:
    """Returns the longest input that a checkpoint folder's configuration allows, None where it does not say."""
    config = local_config(pretrained)
    stated = (config.get(key) for key in ("n_positions", "max_position_embeddings", "n_ctx"))
    return next((tokens for tokens in stated if type(tokens) is int), None)
