"""The settings of a run that its answers depend on, for the stamp of the response cache."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from sbeval.model_adapters.model_facts import kernels_in_use, weights_sha256
from sbeval.model_adapters.options import AdapterOptions
from sbeval.model_adapters.response_cache import parameters_sha256

HASH_CHARACTERS = 16
# keys of a configuration that answers do not depend on, or that have a setting of their own
ELSEWHERE = {"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation"}


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
        "model": weights[:HASH_CHARACTERS] if weights else hub_id,
        "configuration": _sha256(_configuration(lm.model.config)),
        "tokenizer": _sha256(str(sorted(lm.tokenizer.get_vocab().items()))),
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


def _configuration(config: Any) -> str:
    kept = {name: value for name, value in config.to_dict().items() if name not in ELSEWHERE}
    return json.dumps(kept, sort_keys=True, default=str)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]
