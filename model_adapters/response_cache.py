"""lm-eval's response cache: a stamp of what made it.

The cache's keys hold a request's arguments only, so a database used with two models, or one model at two lengths,
would silently return the first one's answers.
"""

import json
from collections.abc import Mapping
from typing import Any

from sbeval.errors import UserError
from sbeval.fingerprint.evaluation import KEPT_IN
from sbeval.fingerprint.parts import changes, versions
from sbeval.model_adapters.loading import loading
from sbeval.model_adapters.record import kernels_in_use, model_parts

STAMP_KEY = "sbeval:settings"
_INPUTS = "inputs"
# arguments that answers do not depend on, or that have a setting or an input of their own
APART = KEPT_IN | {
    *("batch_size", "max_batch_size", "device", "parallelize", "max_memory_per_gpu", "max_cpu_memory"),
    *("trust_remote_code", "tokenizer", "revision", "subfolder", "dtype"),
    *("mixed_precision_dtype", "peft", "delta", "max_length", "add_bos_token", "prefix_token_id", "think_end_token"),
}


def stamp(database: Any, settings: Mapping[str, Any]) -> None:
    """Writes the settings into an empty response cache, or compares them with those of a used one.

    Args:
        database: the mapping behind the cache.
        settings: JSON-ready values that answers depend on, by name; `inputs` are the parts of a fingerprint.

    Raises:
        UserError: the cache was made with other settings or inputs, by an earlier version, or by a model that leaves no
            stamp.
    """
    given = json.loads(json.dumps(settings))
    found = database.get(STAMP_KEY)
    if found is None:
        if len(database) > 0:
            raise UserError(
                "Expected a response cache made by the model sb, found one without its settings: name another file "
                "with --use_cache."
            )
        database[STAMP_KEY] = given
        database.commit()
        return
    if _INPUTS not in found:
        raise UserError(
            "Expected a response cache that says what it was made on, found one of an earlier version, which does not: "
            "name another file with --use_cache."
        )
    differences = [
        f"{name}={found.get(name)!r} instead of {given.get(name)!r}"
        for name in {**found, **given}
        if found.get(name) != given.get(name) and name != _INPUTS
    ]
    if changed := changes(found[_INPUTS], given[_INPUTS]):
        differences.append(f"other inputs ({changed})")
    if differences:
        raise UserError(
            f"Expected a response cache made with this run's settings, found one made with {', '.join(differences)}: "
            "use the same settings and inputs, or name another file with --use_cache."
        )


def run_settings(lm: Any) -> dict[str, Any]:
    """Returns the settings of a loaded `StickBreakingLM` by name, JSON-ready, with its inputs.

    Raises:
        UserError: a file of the checkpoint cannot be read.
    """
    with loading(lm.pretrained, "files that can be read for --use_cache"):
        parts = model_parts(lm)
    options, arguments, rope_scaling = lm.options, lm.arguments, lm.session.rope.in_force
    return {
        _INPUTS: versions() | parts,
        "device": lm.device.type,
        "dtype": str(lm.model.dtype),
        "mixed_precision_dtype": str(lm.mixed_precision_dtype) if lm.mixed_precision_dtype else None,
        "max_length": lm.max_length,
        "training_length": options.training_length,
        "rope_scaling": dict(rope_scaling) if rope_scaling else None,
        "extrapolation": str(lm.session.rope.extrapolation) if lm.session.rope.extrapolation else None,
        "kernels": kernels_in_use(lm.model, options.kernels, lm.device),
        "skip_threshold": lm.skip_threshold,
        "kv_expand": options.kv_expand,
        "truncation": options.truncation,
        "non_finite": options.non_finite,
        "add_bos_token": lm.add_bos_token,
        "prefix_token_id": lm.prefix_token_id,
        "think_end_token": lm.think_end_token,
        "arguments": {name: _json_ready(value) for name, value in sorted(arguments.items()) if name not in APART},
    }


def _json_ready(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__))
