"""Parts of a loaded model that another part stands in for."""

from collections.abc import Callable

from torch import nn


def replace_modules(model: nn.Module, stand_in: Callable[[nn.Module], nn.Module | None]) -> dict[str, nn.Module]:
    """Puts what `stand_in` returns in place of each module it does not return None for, and returns those replaced."""
    replaced: dict[str, nn.Module] = {}
    for name, module in list(model.named_modules()):
        other = stand_in(module)
        if other is not None:
            model.set_submodule(name, other)
            replaced[name] = module
    return replaced
