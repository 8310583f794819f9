"""Checks that the installed transformers is new enough for a feature."""

import transformers
from packaging.version import Version

from sbeval.errors import UserError


def check_transformers(oldest: tuple[int, ...], feature: str, *, remedy: str) -> None:
    """Checks the version of transformers.

    Args:
        oldest: the oldest release that has the feature, such as (5, 21).
        feature: the feature, as the subject of the message.
        remedy: what to do instead of upgrading.

    Raises:
        UserError: an older release is installed.
    """
    installed = transformers.__version__
    if Version(installed).release < oldest:
        raise UserError(
            f"{feature} needs transformers {'.'.join(map(str, oldest))} or newer, and {installed} is installed: "
            f"upgrade transformers, or {remedy}."
        )
