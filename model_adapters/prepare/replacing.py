"""Parts of a loaded model that another part stands in for."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

Forward = Callable[..., Any]
Changes = list[tuple[Any, dict[str, Any]]]
"""Objects such as modules, each with the attributes it is to get."""


def replace_modules(model: nn.Module, stand_in: Callable[[nn.Module], nn.Module | None]) -> dict[str, nn.Module]:
    """Replaces each module for which `stand_in` returns another, not None, and returns those replaced."""
    replaced: dict[str, nn.Module] = {}
    for name, module in list(model.named_modules()):
        if (other := stand_in(module)) is not None:
            model.set_submodule(name, other)
            replaced[name] = module
    return replaced


def give_back_modules(model: nn.Module, replaced: Mapping[str, nn.Module]) -> Callable[[], None] | None:
    """Returns the function that puts modules back by their names, None where none was replaced."""

    def give_back() -> None:
        for name, module in replaced.items():
            model.set_submodule(name, module)

    return give_back if replaced else None


def with_name(forward: Any, name: str, stand_in: Callable[[Any], Any | None]) -> Forward | None:
    """Returns a copy of a function in which a global name means what `stand_in` makes of its value.

    None where the function does not use the name, or `stand_in` returns None.
    """
    if not isinstance(forward, types.FunctionType) or name not in forward.__code__.co_names:
        return None
    own = forward.__globals__.get(name)
    other = None if own is None else stand_in(own)
    if other is None:
        return None
    names = {**forward.__globals__, name: other}
    names.pop("__name__", None)  # by which torch.compile would look names up in the file itself
    copied = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return functools.update_wrapper(copied, forward)


def with_forwards(model: nn.Module, stand_in: Callable[[nn.Module], Forward | None]) -> list[nn.Module]:
    """Gives modules the forward that `stand_in` returns, if not None, and returns those modules."""
    changed = []
    for module in model.modules():
        if (forward := stand_in(module)) is not None:
            module.forward = types.MethodType(forward, module)
            changed.append(module)
    return changed


def give_back_forwards(modules: list[nn.Module]) -> None:
    """Gives modules the forward of their class again."""
    for module in modules:
        vars(module).pop("forward", None)


@contextlib.contextmanager
def held(changes: Changes) -> Iterator[None]:
    """Gives objects their attributes until the block ends."""
    before = [dict(each.__dict__) for each, _ in changes]
    try:
        for each, values in changes:
            each.__dict__.update(values)
        yield
    finally:
        for (each, values), own in zip(changes, before, strict=True):
            for name in values:
                each.__dict__.pop(name)
                if name in own:
                    each.__dict__[name] = own[name]
