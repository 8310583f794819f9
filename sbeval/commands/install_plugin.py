"""Writes the start-up line of an editable install into site-packages; wheels contain their own copy."""

import importlib.resources
import sysconfig
from pathlib import Path

from sbeval.errors import UserError

FILE_NAME = "sbeval_autoload.pth"


def install(site_packages: Path | None = None) -> Path:
    """Writes `sbeval_autoload.pth` to a site-packages folder, by default this interpreter's, and returns its path.

    The line in it does nothing once sbeval is uninstalled.

    Raises:
        UserError: the folder cannot be written to.
    """
    # the file is beside the package, both in a checkout and in an installed wheel
    line = importlib.resources.files("sbeval").joinpath("..", FILE_NAME).read_text(encoding="utf-8")
    target = (site_packages or Path(sysconfig.get_path("purelib"))) / FILE_NAME
    try:
        target.write_text(line, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{target} could not be written ({error.strerror}): install sbeval into a virtual environment of your own, "
            "or use `sbeval run` in place of `lm_eval --model sb`."
        ) from error
    return target
