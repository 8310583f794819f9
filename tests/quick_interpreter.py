"""Triton's interpreter without what it does again at every call of a function in a kernel: more than half of its time.

`tests/test_kernels_without_gpu.py` compares the two: no bit of a result differs.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_launch, _patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
_numpy_type, _reduce = interpreter._get_np_dtype, interpreter.ReduceOps.generic_reduce
_patch_tensor = interpreter._patch_lang_tensor
_patched: set[str] = set()
_numpy_types: dict[str, Any] = {}


def _call(self: Any, *arguments: Any, **options: Any) -> None:
    _patched.clear()
    _launch(self, *arguments, **options)


def _patch_lang(fn: Any) -> Any:
    """Puts what interprets the language in its place: for each module once a launch, which takes it away at its end."""
    module = fn.__globals__["__name__"]
    if module in _patched:
        return None
    _patched.add(module)
    return _patch(fn)


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Makes a tensor of one number an index: Triton 3.6 calls `int` on its array, which NumPy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _get_np_dtype(kind: Any) -> Any:
    name = kind.scalar.name
    if name not in _numpy_types:
        _numpy_types[name] = _numpy_type(kind)
    return _numpy_types[name]


def _generic_reduce(self: Any, given: Any) -> Any:
    """Reduces by exclusive or, as `tl.flip` does many times, all elements at once."""
    if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
        return _reduce(self, given)
    found = np.bitwise_xor.reduce(given[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
    return [self.to_tensor(found, given[0].dtype)]


def install() -> None:
    interpreter._patch_lang_tensor = _patch_lang_tensor  # `uninstall` keeps it: no kernel runs without
    interpreter.GridExecutor.__call__, interpreter._patch_lang = _call, _patch_lang
    interpreter._get_np_dtype, interpreter.ReduceOps.generic_reduce = _get_np_dtype, _generic_reduce


def uninstall() -> None:
    interpreter.GridExecutor.__call__, interpreter._patch_lang = _launch, _patch
    interpreter._get_np_dtype, interpreter.ReduceOps.generic_reduce = _numpy_type, _reduce
