"""Lays out stick-breaking attention as a package of the kernels hub, from the one source: `sbeval/attention`.

    python hub/lay_out.py FOLDER

FOLDER then holds what `kernel-builder` takes (build.toml, flake.nix, CARD.md, torch-ext, tests), and in `build` what it
would make of that for each backend of build.toml, so that `kernels.get_local_kernel(FOLDER)` loads it without nix.
"""

import argparse
import base64
import hashlib
import json
import re
import shutil
import tomllib
from pathlib import Path

HUB = Path(__file__).parent
SOURCE = HUB.parent / "sbeval" / "attention"
COPIED = ("build.toml", "flake.nix", "CARD.md", "tests")
OPERATORS = """\
import torch

ops = torch.ops.{identity}


def add_op_namespace_prefix(op_name: str) -> str:
    return "{identity}::" + op_name
"""
# for readers that look for the package in a folder of its own name
BELOW_ITS_NAME = """\
import importlib.util
import sys
from pathlib import Path

_above = Path(__file__).parent.parent / "__init__.py"
_name = "{identity}_below_its_name"
_spec = importlib.util.spec_from_file_location(_name, _above)
_module = importlib.util.module_from_spec(_spec)
sys.modules[_name] = _module
_spec.loader.exec_module(_module)
__all__ = list(_module.__all__)
globals().update((name, getattr(_module, name)) for name in __all__)
"""


def lay_out(folder: Path) -> None:
    """Writes the package into a folder, which must not hold anything else.

    Raises:
        FileExistsError: the folder holds files of other names than an earlier call has made.
    """
    general = tomllib.loads((HUB / "build.toml").read_text())["general"]
    name = general["name"]
    sources = {str(file.relative_to(SOURCE)): _as_package(file) for file in sorted(SOURCE.rglob("*.py"))}
    if folder.exists() and not {file.name for file in folder.iterdir()} <= {
        *COPIED,
        "torch-ext",
        "build",
        ".pytest_cache",
    }:
        raise FileExistsError(
            f"Expected an empty folder, or one laid out before, found files in {folder}: name another."
        )
    shutil.rmtree(folder, ignore_errors=True)
    _write(folder / "torch-ext" / name, sources)
    for copied in COPIED:
        copy = shutil.copytree if (HUB / copied).is_dir() else shutil.copyfile
        copy(HUB / copied, folder / copied)
    # two revisions of the source can be loaded into one process
    revision = hashlib.sha256("".join(sources.values()).encode()).hexdigest()[:7]
    for backend in general["backends"]:
        identity = f"_{name}_{backend}_{revision}"
        made = {"_ops.py": OPERATORS, f"{name}/__init__.py": BELOW_ITS_NAME}
        files = sources | {file: text.format(identity=identity) for file, text in made.items()}
        metadata = {
            "name": name,
            "id": identity,
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": {file: _digest(text) for file, text in sorted(files.items())}},
        }
        _write(folder / "build" / f"torch-{backend}", {**files, "metadata.json": json.dumps(metadata, indent=2) + "\n"})


def _as_package(file: Path) -> str:
    """Returns a module's text with imports relative to the package, and operators in the package's own namespace."""
    to_the_package = "." * len(file.relative_to(SOURCE).parts)
    text = re.sub(
        r"(?m)^(\s*from )sbeval\.attention\.?([\w.]*) import", rf"\1{to_the_package}\2 import", file.read_text()
    )
    named, operators = re.subn(r'"sbeval::(\w+)"', r'add_op_namespace_prefix("\1")', text)
    if operators:
        named = re.sub(
            r"(?m)^import torch$", rf"\g<0>\n\nfrom {to_the_package}_ops import add_op_namespace_prefix", named, count=1
        )
    return re.sub(r"sbeval(::|\.)", "", named)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _write(folder: Path, files: dict[str, str]) -> None:
    for place, text in files.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args().folder
    lay_out(chosen)
    print(f"{chosen}: a package of the kernels hub; try its tests with `pytest {chosen}/tests`")
