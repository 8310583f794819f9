"""What `mkdocs` does beside rendering docs/: pages that lie elsewhere, generated parts, links to the checkout."""

import posixpath
import re
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import notebooks
import parts
from mkdocs.structure.files import File, Files

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
    """Sets the addresses of repository and site, once pyproject.toml has the one they follow from."""
    address = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["sbeval"]["repository"]
    if address:
        owner, name = address.split("/")[-2:]
        config.repo_url, config.site_url = address, f"https://{owner.lower()}.github.io/{name}/"
    return config


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Takes away what has a reader's browser ask GitHub for the repository's stars."""
    return output.replace('data-md-component="source"', "")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie outside docs/, README as the first of them, and one for every notebook."""
    files.append(File.generated(config, START, abs_src_path=str(ROOT / "README.md")))
    measured = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))]
    for path in (*ELSEWHERE, *measured):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebooks.as_markdown(path)))
    files.append(File.generated(config, EXAMPLE, abs_src_path=str(example())))
    return files


def example() -> Path:
    """Returns the page that `sbeval report` makes of the demo's stored results."""
    folder = ROOT / "build" / "example"
    with tarfile.open(ROOT / "docs" / "results" / "demo" / "results.tar.xz") as archive:
        archive.extractall(folder / "results", filter="data")
    build_report(folder / "results", folder / "report", title="An example report: the demo's two checkpoints")
    return folder / "report" / "index.html"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fills in what is generated, and leads links to files of the checkout to copies of them on the site."""
    source = page.file.src_uri
    is_elsewhere = source in (START, *ELSEWHERE) or source.startswith("benchmarks/")
    place = posixpath.dirname(source if is_elsewhere else f"docs/{source}")
    filled = _MARKER.sub(lambda found: parts.PARTS[found[1]](), markdown)

    def lead(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(place, found[1]))
        target = _on_site(path, files, config)
        return posixpath.relpath(target, posixpath.dirname(source)) + (found[2] or "") if target else found[0]

    pieces = _FENCE.split(filled)
    return "".join(piece if number % 2 else _LINK.sub(lead, piece) for number, piece in enumerate(pieces))


def _on_site(path: str, files: Files, config: Any) -> str | None:
    """Returns where a file of the checkout lies on the site, None where the checkout has none of that path."""
    for known in (START if path == "README.md" else path.removeprefix("docs/"), path):
        if files.get_file_from_path(known):
            return known
    if not (ROOT / path).is_file():
        return None
    copy = f"checkout/{path}"
    if not files.get_file_from_path(copy):
        files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
    return copy
