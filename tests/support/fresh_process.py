"""Runs Python in a fresh process outside the checkout, without this process's imports."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def run(
    command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SBEVAL"))}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        cwd=folder or tempfile.gettempdir(),
        env={**kept, **offline, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=600,  # of what hangs
    )


def run_shell(commands: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Runs the commands of a page with this interpreter's scripts; a failure shows their output."""
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = run(["bash", "-euo", "pipefail", "-c", commands], environment={**paths, **environment}, folder=folder)
    assert done.returncode == 0, f"{commands}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"


def run_code(
    code: str, *, python: str | Path = sys.executable, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Returns the printed lines; a failure shows the output."""
    process = run([python, "-c", code], environment=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()
