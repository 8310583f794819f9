"""The published page of the demo is what its archive of results says."""

import tarfile
from pathlib import Path

from source_tree import ROOT

from research.published_results.write_demo_page import page
from sbeval.corpora.archives import unpack

DEMO = ROOT / "docs" / "results" / "demo"


def test_the_demo_page_is_what_its_archive_says(tmp_path: Path) -> None:
    with tarfile.open(DEMO / "results.tar.xz") as archive:
        unpack(archive, tmp_path)
    assert page(tmp_path) == (DEMO / "README.md").read_text(encoding="utf-8")
