"""Each package's docstring is its map: one line for each module, none missing and none too many."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from source_tree import ROOMS, ROOT, package_folders

PACKAGES = package_folders()
TOP = ("sbeval", *ROOMS, "research", "benchmarks", "tests")
MOST_FILES = 16
ENTRY = re.compile(r"^- `(\w+)`: ", re.MULTILINE)


def members(package: str, folder: Path) -> list[str]:
    """Names of a package's modules and of the packages in it, as one imports them."""
    inside = [name.removeprefix(f"{package}.") for name in PACKAGES if name.startswith(f"{package}.")]
    modules = [file.stem for file in folder.glob("*.py") if file.stem != "__init__"]
    return sorted(modules + [name for name in inside if "." not in name])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_s_docstring_names_each_of_its_modules_once(package: str) -> None:
    folder = PACKAGES[package]
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert sorted(ENTRY.findall(text)) == members(package, folder)


def test_no_folder_holds_more_than_sixteen_python_files() -> None:
    names = (file.relative_to(ROOT) for top in TOP for file in (ROOT / top).rglob("*.py"))
    counts = Counter(name.parent.as_posix() for name in names)
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}
