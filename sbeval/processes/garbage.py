"""Python's garbage collector, paused while a command imports its packages and switched off for the exit.

torch, transformers and lm-eval leave half a million objects, which stay until the process ends. Each full collection
walks all of them, and this walk takes up to 0.3 seconds. An evaluation's imports cause eight full collections, and the
exit of Python causes several.
"""

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


def skip_collections_at_exit() -> None:
    """Makes Python exit without collecting reference cycles, whose memory the operating system frees anyway.

    The methods `__del__` of objects in reference cycles do not run then. Functions registered with `atexit` or
    `weakref.finalize` run as always. Call it as early as possible: `atexit` calls the functions registered first last.
    """
    # a collection leaves frozen objects out
    atexit.register(gc.freeze)


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """Inside this context, the garbage collector is paused; objects without references are freed as always.

    If modules were imported, later collections leave out all objects that exist at the end of the context. Garbage in
    reference cycles, such as an earlier model, then stays in memory until the process ends. So use it before a model is
    loaded. In a process that evaluates several times, such as a benchmark, later runs leave objects out only if they
    import more modules.
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
