"""lm-eval's response cache: a stamp of what made it.

The cache's keys hold a request's arguments only, so a database used with two models, or one model at two lengths,
would silently return the first one's answers.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from sbeval.errors import UserError

STAMP_KEY = "sbeval:settings"
_SAMPLED_VALUES = 1024


def stamp(database: Any, settings: Mapping[str, Any]) -> None:
    """Writes the settings into an empty response cache, or compares them with those of a used one.

    Args:
        database: the mapping behind the cache.
        settings: JSON-ready values that answers depend on, by name.

    Raises:
        UserError: the cache was made with other settings, or by a model that leaves no stamp.
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
    names = [name for name in {**found, **given} if found.get(name) != given.get(name)]
    if names:
        differences = ", ".join(f"{name}={found.get(name)!r} instead of {given.get(name)!r}" for name in names)
        raise UserError(
            f"Expected a response cache made with this run's settings, found one made with {differences}: use the same "
            "settings, or name another file with --use_cache."
        )


def parameters_sha256(model: nn.Module) -> str:
    """Returns a hash over the name, shape and first values of every parameter, for a model that is in no folder."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()[:_SAMPLED_VALUES].double().cpu().numpy()
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + values.tobytes())
    return digest.hexdigest()
