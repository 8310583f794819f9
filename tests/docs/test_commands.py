"""Every command of README.md, CONTRIBUTING.md and docs/ runs, or a comment above it says what runs it or what it needs.

README's blocks run first, then those of the site's pages in their order, in one folder, so that later ones read what
earlier ones made. A block that stands on two pages, alone or within a longer one, runs once.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from fresh_process import run_shell
from source_tree import ROOT

BLOCK = re.compile(r"(?:^<!-- (?P<comment>[^>]+) -->\n)?^```sh\n(?P<commands>.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(?P<language>\S*)", re.MULTILINE)
NOT_RUN = (
    "not run: installs other versions",
    *(f"not run: needs {what}" for what in ("a GPU", "the hub", "a cluster")),
)
TESTED_BY = "tested by: "
# a page with a test of its own, and results whose commands were run on GPUs
WITH_THEIR_OWN = {"docs/adding.md", "docs/results"}


class Block(NamedTuple):
    """Commands of a page, and the comment above them."""

    page: str
    comment: str
    commands: str


def pages() -> list[Path]:
    """Pages in the order of the site, then those that it does not list."""
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    every = [ROOT / "docs" / path for path in listed if (ROOT / "docs" / path).is_file()]
    every += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in dict.fromkeys(every) if not any(page.is_relative_to(ROOT / own) for own in WITH_THEIR_OWN)]


def blocks() -> Iterator[Block]:
    for page in pages():
        for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
            yield Block(page.relative_to(ROOT).as_posix(), found["comment"] or "", found["commands"])


@pytest.mark.exhaustive
def test_commands_that_need_nothing_run(tmp_path: Path) -> None:
    (tmp_path / "sbeval" / "demo").mkdir(parents=True)
    (tmp_path / "sbeval" / "demo" / "checkpoints").symlink_to(ROOT / "sbeval" / "demo" / "checkpoints")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    page = (ROOT / "docs/guides/sweeps.md").read_text()
    (tmp_path / "sweep.yaml").write_text(re.search(r"`sweep.yaml`:\n\n```yaml\n(.*?)^```", page, re.M | re.S)[1])
    # README's commands find what make installs by themselves
    (tmp_path / ".venv").symlink_to(sys.prefix)
    folders = os.environ["PATH"].split(os.pathsep)
    alone = os.pathsep.join(folder for folder in folders if not Path(folder, "sbeval").exists())
    # `python -` would take the folder of checkpoints made above for the package
    environment = {"SBEVAL_CACHE": str(tmp_path / "cache"), "PYTHONSAFEPATH": "1"}
    ran: list[str] = []
    for block in sorted(blocks(), key=lambda block: block.page != "README.md"):
        if block.comment or any(block.commands in other for other in ran):
            continue
        ran.append(block.commands)
        paths = {"PATH": alone} if block.page == "README.md" else {}
        run_shell(block.commands, tmp_path, {**environment, **paths})
    assert len(ran) > 5


@pytest.mark.parametrize("block", [*blocks()], ids=lambda block: block.page)
def test_what_is_not_run_says_why_or_names_its_test(block: Block) -> None:
    if block.comment.startswith(TESTED_BY):
        assert (ROOT / block.comment.removeprefix(TESTED_BY)).is_file()
    else:
        assert block.comment in ("", *NOT_RUN)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_fence_names_its_language_so_that_no_command_hides(page: Path) -> None:
    opened = FENCE.findall(page.read_text(encoding="utf-8"))[::2]
    assert {*opened} <= {"sh", "bash", "yaml", "json", "text", "python"}


def test_what_a_version_brings_is_fifteen_lines_at_most() -> None:
    sections = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:]
    lines = {name: len([line for line in rest if line]) for name, *rest in map(str.splitlines, sections)}
    assert not [name for name, count in lines.items() if name != "Unreleased" and count > 15]


def test_readme_is_read_in_three_minutes_and_links_to_files_that_are_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    links = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
