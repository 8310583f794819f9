"""What a wheel holds, and that it works outside the checkout."""

import tomllib
import zipfile
from pathlib import Path

import pytest
from fresh_process import run_code
from source_tree import ROOT, modules, package_folders

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_package_list_is_complete() -> None:
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(package_folders())


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    expected = {
        name.replace(".", "/") + ("/__init__.py" if file.name == "__init__.py" else ".py")
        for name, file in modules().items()
    }
    assert expected == {name for name in names_in(wheel) if name.endswith(".py")}


@pytest.mark.parametrize(
    ("folder", "pattern", "place"),
    [
        ("tasks", "**/*.yaml", "sbeval/tasks"),
        ("reports", "write/templates/*", "sbeval/reports"),
        ("sbeval", "training/recipes/*.yaml", "sbeval"),
        ("sbeval", "demo/checkpoints/**/*", "sbeval"),
        ("sbeval", "demo/*.tar.xz", "sbeval"),
        ("sbeval", "py.typed", "sbeval"),
    ],
)
def test_the_wheel_holds_the_data(wheel: Path, folder: str, pattern: str, place: str) -> None:
    files = [path for path in (ROOT / folder).glob(pattern) if path.is_file()]
    assert {f"{place}/{path.relative_to(ROOT / folder).as_posix()}" for path in files} <= names_in(wheel)


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    assert {name.partition("/")[0].partition("-")[0] for name in names_in(wheel)} == {"sbeval", "sbeval_autoload.pth"}
    assert not [name for name in names_in(wheel) if "__pycache__" in name]


def test_the_installed_wheel_serves_code_and_data_outside_the_checkout(wheel_python: Path) -> None:
    lines = run_code(
        "import importlib.resources, sbeval.tasks, sbeval.reports, sbeval.plugin\n"
        "print(sbeval.__file__)\n"
        "print(*(file.name for file in sbeval.plugin.tasks_folder().rglob('*.yaml')))\n"
        "print(importlib.resources.files('sbeval.demo').joinpath('checkpoints').is_dir())",
        python=wheel_python,
    )
    assert Path(lines[0]).is_relative_to(wheel_python.parents[1])
    assert sorted(lines[1].split()) == sorted(file.name for file in (ROOT / "tasks").rglob("*.yaml"))
    assert lines[2] == str((ROOT / "sbeval/demo/checkpoints").is_dir())


def test_torch_and_triton_are_pinned_to_the_tested_pair() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")


def test_every_dependency_is_pinned() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = PYPROJECT["project"]
    wanted = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["dev"]]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = {canonicalize_name(Requirement(line).name): Requirement(line).specifier for line in lines}
    for requirement in wanted:
        (exact,) = pinned[canonicalize_name(requirement.name)]
        assert exact.operator == "=="
        assert requirement.specifier.contains(exact.version), requirement


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")} - {
            name for name in archive.namelist() if ".dist-info/" in name
        }
