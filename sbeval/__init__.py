"""sbeval: what happens to a language model when its context grows past its training length?

Importing this package imports no torch: the public names below are resolved when first used.
"""

from typing import TYPE_CHECKING, Any

from sbeval.errors import UserError

if TYPE_CHECKING:
    from sbeval.attention import StickBreakingOutput, stickbreaking_attention

__version__ = "0.1.0"
__all__ = ["StickBreakingOutput", "UserError", "__version__", "stickbreaking_attention"]


def __getattr__(name: str) -> Any:
    if name in ("StickBreakingOutput", "stickbreaking_attention"):
        import sbeval.attention

        return getattr(sbeval.attention, name)
    raise AttributeError(f"module 'sbeval' has no attribute {name!r}")
