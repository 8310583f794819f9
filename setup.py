"""Puts `sbeval_autoload.pth` at the top of the wheel, where Python reads it at start-up, and links into its page."""

import re
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

AUTOLOAD = Path("sbeval_autoload.pth")
PYPROJECT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = PYPROJECT["tool"]["sbeval"]["repository"]
LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?!\w+:|#)")


class BuildWithAutoload(build_py):
    """The usual build plus the `.pth` file; an editable install gets it from `sbeval install-plugin` instead."""

    def run(self) -> None:
        """Copies the packages, then the line."""
        super().run()
        if not self.editable_mode:
            self.copy_file(str(AUTOLOAD), self._autoload_output(), preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Returns the files of the build."""
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, self._autoload_output()]

    def _autoload_output(self) -> str:
        return str(Path(self.build_lib, AUTOLOAD.name))


def readme() -> str:
    """Returns the README whose links to files of the checkout lead to this version of them in the repository."""
    text = Path("README.md").read_text(encoding="utf-8")
    version = PYPROJECT["project"]["version"]
    whole = rf"\1\2{REPOSITORY}/%s/v{version}/"
    return LINK.sub(lambda link: link.expand(whole % ("raw" if link[1] else "blob")), text) if REPOSITORY else text


def links() -> dict[str, str]:
    """Returns what the package's page on an index links to."""
    pages = {"Repository": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
    return {name: REPOSITORY + path for name, path in pages.items()} if REPOSITORY else {}


setup(
    cmdclass={"build_py": BuildWithAutoload},
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls=links(),
)
