"""The recipes of docs/adding.md, each followed in a copy of the checkout: their commands succeed."""

import re
import shutil
from pathlib import Path

import pytest
from fresh_process import run_shell
from source_tree import ROOMS, ROOT

GUIDE = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
RECIPES = {part.partition("\n")[0]: part for part in GUIDE.split("\n## ")[1:]}
STEP = re.compile(r"^(?:(New file|In) `([^`]+)`[^\n]*\n\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_leads_to_what_it_says(title: str, tmp_path: Path) -> None:
    checkout = copy_of_the_checkout(tmp_path / "checkout")
    commands = follow(RECIPES[title], checkout)
    environment = {"PYTHONPATH": str(checkout / "build" / "tree"), "SBEVAL_CACHE": str(checkout / "cache")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # recipes evaluate the sources of this project as text
    assert commands, "a recipe ends with commands that try the result"
    for kind, path, _, _ in STEP.findall(RECIPES[title]):
        if kind == "New file" and path.endswith(".py"):
            package_map = (checkout / path).with_name("__init__.py").read_text(encoding="utf-8")
            assert f"\n- `{Path(path).stem}`: " in package_map, path
    for command in commands:
        run_shell(command, checkout, environment)


def test_every_file_a_recipe_changes_is_there_and_every_new_one_is_not() -> None:
    for kind, path, _, _ in STEP.findall(GUIDE):
        assert not path or (ROOT / path).exists() == (kind == "In"), path


def copy_of_the_checkout(folder: Path) -> Path:
    """Copies the packages, and creates the layout of `make tree`, so that they are imported as installed."""
    for name in ("sbeval", *ROOMS):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    tree = folder / "build" / "tree" / "sbeval"
    tree.mkdir(parents=True)
    for path in (*(folder / "sbeval").iterdir(), *(folder / room for room in ROOMS)):
        (tree / path.name).symlink_to(path)
    return folder


def follow(recipe: str, checkout: Path) -> list[str]:
    """Makes the files and changes of a recipe and returns its commands."""
    commands = []
    for kind, path, language, text in STEP.findall(recipe):
        if kind == "New file":
            (checkout / path).parent.mkdir(parents=True, exist_ok=True)
            (checkout / path).write_text(text, encoding="utf-8")
        elif kind == "In":
            change(checkout / path, text)
        elif language == "sh":
            commands.append(text)
    return commands


def change(file: Path, difference: str) -> None:
    """Applies lines that begin with a space, a minus or a plus, at the one place where they fit."""
    lines = difference.splitlines()
    before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
    after = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
    text = file.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{file}: {text.count(before)} places for\n{before}"
    file.write_text(text.replace(before, after), encoding="utf-8")
