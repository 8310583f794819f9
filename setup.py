"""Puts `sbeval_autoload.pth` at the top of the wheel, where Python reads it at start-up."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

AUTOLOAD = Path("sbeval", "sbeval_autoload.pth")


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


setup(cmdclass={"build_py": BuildWithAutoload})
