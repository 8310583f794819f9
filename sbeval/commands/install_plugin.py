"""Puts the start-up line of an editable install where Python reads it; wheels bring their own copy."""

import importlib.resources
import sysconfig
from pathlib import Path

from sbeval.errors import UserError

FILE_NAME = "sbeval_autoload.pth"


def install(site_packages: Path | None = None) -> Path:
    """Writes `sbeval_autoload.pth`, which does nothing once sbeval is uninstalled, by default for this interpreter.

    Raises:
        UserError: the folder cannot be written to.
    """
    # beside the package, in a checkout and where a wheel was installed
    line = importlib.resources.files("sbeval").joinpath("..", FILE_NAME).read_text(encoding="utf-8")
    target = (site_packages or Path(sysconfig.get_path("purelib"))) / FILE_NAME
    try:
        target.write_text(line, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"Expected to write {target}, and could not ({error.strerror}): install sbeval into a virtual "
            "environment of your own, or use `sbeval run` in place of `lm_eval --model sb`."
        ) from error
    return target
