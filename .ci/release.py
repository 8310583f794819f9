"""Says what a tag still lacks to be published: `python .ci/release.py v0.1.0 https://github.com/NAME/sbeval`."""

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lacking(tag: str, repository: str, root: Path = ROOT) -> list[str]:
    """Returns a sentence for each thing that has to change before the tag is published from that repository."""
    texts = {name: (root / name).read_text(encoding="utf-8") for name in ("CITATION.cff", "CHANGELOG.md")}
    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    version, address = pyproject["project"]["version"], pyproject["tool"]["sbeval"]["repository"]
    counted = json.loads((root / "tests" / "measures" / "released.json").read_text(encoding="utf-8"))["version"]
    code = (root / "sbeval" / "__init__.py").read_text(encoding="utf-8")
    expected = [
        (tag == f"v{version}", f"Expected the tag v{version}, as pyproject.toml's version, found {tag}."),
        (address != "", "Expected [tool.sbeval] of pyproject.toml to say where the repository is, found nothing."),
        (address in ("", repository), f"Expected the repository {address} of pyproject.toml, found {repository}."),
        (f'__version__ = "{version}"' in code, f"Expected __version__ of sbeval/__init__.py to be {version}."),
        (f"\nversion: {version}\n" in texts["CITATION.cff"], f"Expected CITATION.cff to have the version {version}."),
        (re.search(r"^date-released: ", texts["CITATION.cff"], re.M), "Expected a date-released in CITATION.cff."),
        (f"\n## {version}\n" in texts["CHANGELOG.md"], f"Expected CHANGELOG.md to have a section {version}."),
        (
            counted == version,
            f"tests/measures/released.json holds the counts of {counted}: "
            f"run python tests/measures/census.py --release {version}.",
        ),
        ("\n## Unreleased\n" not in texts["CHANGELOG.md"], "Expected no section Unreleased in CHANGELOG.md."),
    ]
    return [sentence for holds, sentence in expected if not holds]


if __name__ == "__main__":
    sys.exit("\n".join(lacking(*sys.argv[1:3])) or 0)
