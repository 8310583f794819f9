"""Chooses the kernels of stick-breaking attention, and the threshold at which they skip older keys.

Stick-breaking attention gives weights to keys from the newest to the oldest. As soon as the weight left for all older
keys is below the threshold, these keys are skipped.
"""

from typing import Any

from sbeval.checkpoints.facts import checkpoint_format, text_config
from sbeval.errors import UserError
from sbeval.model_adapters.prepare.change import Change, Setting


def skip_threshold_in_force(model: Any, setting: Setting) -> float | None:
    """Returns the skip threshold of the run, with "auto" replaced by a number; None if no key is skipped.

    Raises:
        UserError: a threshold was passed together with kernels=reference, which visits every key.
    """
    threshold, kernels = setting.skip_threshold, setting.kernels
    if threshold == "auto":
        return setting.default_skip_threshold if _breaks_sticks(model) and kernels != "reference" else None
    if _breaks_sticks(model) and kernels == "reference" and threshold is not None:
        raise UserError(
            f"skip_threshold={threshold} does not work with kernels=reference, which visits every key: remove one of "
            "them from --model_args."
        )
    return threshold


def choose_kernels(model: Any, setting: Setting) -> None:
    """Sets the kernels and the skip threshold of a model of this project.

    Raises:
        UserError: kernels or a threshold were passed for a model without stick-breaking attention, or a threshold
            together with kernels=reference.
    """
    threshold, kernels = skip_threshold_in_force(model, setting), setting.kernels
    if hasattr(model, "set_kernels"):
        model.set_kernels(kernels, threshold)
    elif kernels != "auto" or threshold is not None:
        raise UserError(
            f"kernels={kernels} and skip_threshold={threshold} are for stick-breaking attention only, and this model "
            f"({checkpoint_format(getattr(model, 'config', None))}) has another: remove them from --model_args."
        )


def _breaks_sticks(model: Any) -> bool:
    config = text_config(getattr(model, "config", None))
    return hasattr(model, "set_kernels") and getattr(config, "attention", "stickbreaking") == "stickbreaking"


CHANGE = Change(name="kernels of stick-breaking attention", apply=choose_kernels)
