"""Python's garbage collector, paused while a command imports its packages and switched off for the exit.

torch, transformers and lm-eval leave half a million objects, which stay until the process ends. A full collection walks
all of them, which takes up to 0.3 seconds. An evaluation's imports cause eight, and the exit of Python causes several.
"""

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


def exit_without_collections() -> None:
    """Makes Python exit without looking for reference cycles, whose memory the operating system frees anyway."""
    # functions that were registered first run last: those that remove temporary folders come before
    atexit.register(gc.freeze)


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """Inside this context, Python looks for no reference cycles; objects without references are freed as always.

    If modules were imported, later collections leave out all objects that exist at the end of the context. So only a
    command's own process may use it, before it loads a model.
    """
    was_enabled, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if len(sys.modules) > modules:
                gc.freeze()
            gc.enable()
