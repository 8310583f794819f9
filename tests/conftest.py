"""Runs the Triton kernels in Triton's interpreter where there is no GPU; must be set before triton is imported."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
