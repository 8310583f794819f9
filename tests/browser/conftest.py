import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent / "reports")]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves the browser tests out unless they are named: they need chromium and playwright."""
    return None if any("browser" in argument for argument in config.args) else True
