"""The names under which lm-eval finds this package's model and tasks, and the folder of the task files.

Only the standard library is imported here.
"""

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from sbeval.errors import UserError

MODEL_NAME = "sb"
TASKS_PACKAGE = "sbeval.tasks"
TASK_PREFIX = "sb_"

_own_tasks = True


@contextlib.contextmanager
def packaged_tasks_alone() -> Iterator[None]:
    """Within it, lm-eval's task index leaves lm-eval's own tasks out."""
    global _own_tasks
    _own_tasks = False
    try:
        yield
    finally:
        _own_tasks = True


def includes_own_tasks() -> bool:
    """Whether lm-eval's task index lists lm-eval's own tasks beside the packaged ones."""
    return _own_tasks


def tasks_folder() -> Path:
    """Returns the folder of the packaged task YAML files, found without importing them."""
    spec = importlib.util.find_spec(TASKS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"Expected the package {TASKS_PACKAGE}, found none: install sbeval with `pip install .` "
            "instead of running it from the source folder."
        )
    return Path(next(iter(spec.submodule_search_locations)))


def with_packaged_tasks(include_path: str | Path | Sequence[str | Path] | None) -> list[str | Path]:
    """Puts the packaged task folder before the given ones, unless one of them holds the same task files.

    The same files mean the folder itself, or the `tasks` folder of a checkout beside an installed package: there the
    user's choice wins, and lm-eval has nothing to warn about.
    """
    given: list[str | Path] = [include_path] if isinstance(include_path, str | Path) else list(include_path or ())
    try:
        packaged = tasks_folder()
    except UserError:
        return given
    files = [file.relative_to(packaged) for file in packaged.rglob("*.yaml")]
    if any((Path(folder) / file).exists() for folder in given for file in files):
        return given
    return [packaged, *given]
