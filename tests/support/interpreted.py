"""Switches Triton to its interpreter; import it before triton."""

import contextlib
import os

os.environ.setdefault("TRITON_INTERPRET", "1")
with contextlib.suppress(ModuleNotFoundError, AttributeError):  # no triton, or one with other private names
    from tests import quick_interpreter

    quick_interpreter.install()
