"""One-time studies of the kernels; they share the measuring code of `benchmarks/`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
