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

_includes_lm_eval_tasks = True


@contextlib.contextmanager
def packaged_tasks_alone() -> Iterator[None]:
    """Inside this context, lm-eval's task index contains only the packaged tasks, not lm-eval's own."""
    global _includes_lm_eval_tasks
    _includes_lm_eval_tasks = False
    try:
        yield
    finally:
        _includes_lm_eval_tasks = True


def includes_lm_eval_tasks() -> bool:
    """Whether lm-eval's task index also contains lm-eval's own tasks (see `packaged_tasks_alone`)."""
    return _includes_lm_eval_tasks


def tasks_folder() -> Path:
    """Returns the folder of the packaged task YAML files, without importing the package.

    Raises:
        UserError: sbeval is run from its source folder and not installed.
    """
    spec = importlib.util.find_spec(TASKS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"The package {TASKS_PACKAGE} is missing: install sbeval with `pip install .`, do not run it from the "
            "source folder."
        )
    return Path(next(iter(spec.submodule_search_locations)))


def with_packaged_tasks(include_path: str | Path | Sequence[str | Path] | None) -> list[str | Path]:
    """Returns the packaged task folder, followed by the user's folders.

    If a user's folder holds the same task files (the packaged folder itself, or the `tasks` folder of a checkout), the
    packaged folder is left out, so that lm-eval does not warn about tasks that are defined twice.
    """
    folders: list[str | Path] = [include_path] if isinstance(include_path, str | Path) else list(include_path or ())
    try:
        packaged = tasks_folder()
    except UserError:
        return folders
    files = [file.relative_to(packaged) for file in packaged.rglob("*.yaml")]
    if any((Path(folder) / file).exists() for folder in folders for file in files):
        return folders
    return [packaged, *folders]
