"""Which KV caches suit a model, read from its configuration."""

from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sbeval.caches.choice import CacheChoice
from sbeval.checkpoints.facts import text_config


def why_unsuited(config: Any, choice: CacheChoice) -> str | None:
    """Returns why a cache does not work with models of this configuration, with the remedy; None if it does.

    The sentence has no full stop. A user's function can still fail, and a quantized cache needs the package of its
    backend.
    """
    decoder: Any = text_config(config)
    if getattr(decoder, "model_type", None) == "sbeval":
        if choice.kind == "static":
            return (
                "cache=static does not work with models of this project, whose attention takes every cached position "
                "for a token: use another cache"
            )
        if "forgetting" in decoder.schemes or decoder.key_shift or decoder.value_shift:
            return (
                f"cache={choice} does not work with forgetting attention or token shifts, which read the position "
                "before from the cache: use a model without them"
            )
    if choice.kind == "quantized" and not all(type(layer) is DynamicLayer for layer in _layers(config)):
        return (
            f"cache={choice} works only if every layer attends to the whole text, but this model has layers with a "
            "sliding window or a recurrent state: use another cache"
        )
    return None


def sliding_windows(config: Any) -> set[int]:
    """Returns the lengths in tokens of the sliding windows and chunks of a model's layers."""
    windows = (getattr(layer, "sliding_window", None) for layer in _layers(config))
    return {window for window in windows if isinstance(window, int)}


def _layers(config: Any) -> list[Any]:
    """Returns the layers of transformers' default cache, which a configuration decides; none if it is not known."""
    try:
        return list(DynamicCache(config=config).layers)
    except Exception:  # configurations of unknown classes; making the run's cache fails with a sentence
        return []
