"""MkDocs hooks: add pages from outside docs/ and generated parts, and resolve links to files of the checkout."""

import posixpath
import re
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import notebooks
import parts
from mkdocs.structure.files import File, Files

from sbeval.corpora.archives import unpack
from sbeval.reports import build_report

ROOT = Path(__file__).parents[2]
# pages of the checkout outside docs/; each has the same path on the site
ELSEWHERE = ("DESIGN.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/NOTES.md")
START = "index.md"
EXAMPLE = "results/example.html"
_MARKER = re.compile(r"^<!-- filled in: (\w+) -->$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Sets the URLs of repository and site from the repository's address in pyproject.toml, if it has one."""
    address = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["sbeval"]["repository"]
    if address:
        owner, name = address.split("/")[-2:]
        config.repo_url, config.site_url = address, f"https://{owner.lower()}.github.io/{name}/"
    return config


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Removes the attribute that makes browsers request the repository's stars from GitHub."""
    return output.replace('data-md-component="source"', "")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside docs/, first README, and one page for every notebook."""
    files.append(File.generated(config, START, abs_src_path=str(ROOT / "README.md")))
    measured = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))]
    for path in (*ELSEWHERE, *measured):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebooks.as_markdown(path)))
    files.append(File.generated(config, EXAMPLE, abs_src_path=str(example())))
    return files


def example() -> Path:
    """Builds a report of the demo's stored results, and returns the path of its page."""
    folder = ROOT / "build" / "example"
    with tarfile.open(ROOT / "docs" / "results" / "demo" / "results.tar.xz") as archive:
        unpack(archive, folder / "results")
    build_report(folder / "results", folder / "report", title="An example report: the demo's two checkpoints")
    return folder / "report" / "index.html"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fills in generated parts, and replaces links to files of the checkout by links to copies on the site."""
    source = page.file.src_uri
    is_elsewhere = source in (START, *ELSEWHERE) or source.startswith("benchmarks/")
    place = posixpath.dirname(source if is_elsewhere else f"docs/{source}")
    filled = _MARKER.sub(lambda marker: parts.PARTS[marker[1]](), markdown)

    def site_link(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(place, link[1]))
        target = _on_site(path, files, config)
        return posixpath.relpath(target, posixpath.dirname(source)) + (link[2] or "") if target else link[0]

    blocks = _FENCE.split(filled)  # every second block is fenced code
    return "".join(block if number % 2 else _LINK.sub(site_link, block) for number, block in enumerate(blocks))


def _on_site(path: str, files: Files, config: Any) -> str | None:
    """Returns the site's path of a file of the checkout, None if the checkout has no such file."""
    for known in (START if path == "README.md" else path.removeprefix("docs/"), path):
        if files.get_file_from_path(known):
            return known
    if not (ROOT / path).is_file():
        return None
    copy = f"checkout/{path}"
    if not files.get_file_from_path(copy):
        files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
    return copy
