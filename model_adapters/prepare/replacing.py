"""Replaces and restores modules, forwards, attributes, or global names that a forward uses, in a loaded model."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers.utils import deprecation

Forward = Callable[..., Any]
Changes = list[tuple[Any, dict[str, Any]]]
"""Pairs of an object, such as a module, and the attribute values that it has inside `temporary_attributes`."""


def replace_modules(model: nn.Module, stand_in: Callable[[nn.Module], nn.Module | None]) -> dict[str, nn.Module]:
    """Replaces every module for which `stand_in` returns a new module, and returns the old modules by name."""
    replaced: dict[str, nn.Module] = {}
    for name, module in list(model.named_modules()):
        if (other := stand_in(module)) is not None:
            model.set_submodule(name, other)
            replaced[name] = module
    return replaced


def give_back_modules(model: nn.Module, replaced: Mapping[str, nn.Module]) -> Callable[[], None] | None:
    """Returns a function that restores the replaced modules, None if none was replaced."""

    def give_back() -> None:
        for name, module in replaced.items():
            model.set_submodule(name, module)

    return give_back if replaced else None


def with_name(forward: Any, name: str, stand_in: Callable[[Any], Any | None]) -> Forward | None:
    """Returns a copy of a function in which the global `name` means the result of `stand_in`.

    `stand_in` gets the original value of the global. Returns None if the function does not use the name, or if
    `stand_in` returns None. The original function and its module are not changed.
    """
    body = _without_deprecation(forward)
    if not isinstance(body, types.FunctionType) or name not in body.__code__.co_names:
        return None
    original = body.__globals__.get(name)
    replacement = None if original is None else stand_in(original)
    if replacement is None:
        return None
    names = {**body.__globals__, name: replacement}
    names.pop("__name__", None)  # with `__name__`, torch.compile would look globals up in the original module
    copied = types.FunctionType(body.__code__, names, body.__name__, body.__defaults__, body.__closure__)
    copied.__kwdefaults__ = body.__kwdefaults__
    return functools.update_wrapper(copied, forward)


def _without_deprecation(forward: Any) -> Any:
    """Returns the function inside transformers' `deprecate_kwarg`, which 5.24 puts around the forward of attention.

    The decorator only renames arguments, and transformers itself passes them by their new names.
    """
    while isinstance(forward, types.FunctionType) and forward.__code__.co_filename == deprecation.__file__:
        forward = vars(forward)["__wrapped__"]
    return forward


def with_forwards(model: nn.Module, stand_in: Callable[[nn.Module], Forward | None]) -> list[nn.Module]:
    """Sets the forward of every module for which `stand_in` returns a new forward, and returns these modules."""
    changed = []
    for module in model.modules():
        if (forward := stand_in(module)) is not None:
            module.forward = types.MethodType(forward, module)
            changed.append(module)
    return changed


def give_back_forwards(modules: list[nn.Module]) -> None:
    """Removes the replaced forwards, so that modules use the forward of their class again."""
    for module in modules:
        vars(module).pop("forward", None)


@contextlib.contextmanager
def temporary_attributes(changes: Changes) -> Iterator[None]:
    """Inside this context, attributes of objects have other values; afterwards they have the old values again."""
    before = [dict(each.__dict__) for each, _ in changes]
    try:
        for each, values in changes:
            each.__dict__.update(values)
        yield
    finally:
        for (each, values), attributes in zip(changes, before, strict=True):
            for name in values:
                each.__dict__.pop(name)
                if name in attributes:
                    each.__dict__[name] = attributes[name]
