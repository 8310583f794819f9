"""The settings of a run that its answers depend on, for the stamp of the response cache."""

import hashlib
from collections.abc import Mapping
from typing import Any

from sbeval.model_adapters.model_facts import kernels_in_use, weights_sha256
from sbeval.model_adapters.options import AdapterOptions
from sbeval.model_adapters.response_cache import parameters_sha256


def run_settings(lm: Any, options: AdapterOptions, rope_scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the settings by name, JSON-ready.

    Args:
        lm: lm-eval's Hugging Face model, loaded.
        options: our own arguments.
        rope_scaling: the scaling in force.
    """
    hub_id = f"{lm.pretrained}@{lm.revision}" if isinstance(lm.pretrained, str) else None
    weights = weights_sha256(lm.pretrained) if hub_id else parameters_sha256(lm.model)
    return {
        "model": weights or hub_id,
        "tokenizer": hashlib.sha256(str(sorted(lm.tokenizer.get_vocab().items())).encode()).hexdigest(),
        "dtype": str(lm.model.dtype),
        "mixed_precision_dtype": str(lm.mixed_precision_dtype) if lm.mixed_precision_dtype else None,
        "peft": lm.peft,
        "delta": lm.delta,
        "max_length": lm.max_length,
        "training_length": options.training_length,
        "rope_scaling": dict(rope_scaling) if rope_scaling else None,
        "kernels": kernels_in_use(lm.model, options.kernels, lm.device),
        "skip_threshold": options.skip_threshold,
        "kv_expand": options.kv_expand,
        "add_bos_token": lm.add_bos_token,
        "prefix_token_id": lm.prefix_token_id,
        "think_end_token": lm.think_end_token,
    }
