"""What pages keep of generated tables is what would be generated now."""

import sys
from pathlib import Path

import pytest
from source_tree import ROOT

sys.path.insert(0, str(ROOT / "docs" / "generate"))

import parts


@pytest.mark.parametrize("page", parts.pages(), ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == parts.rewritten(text), "python docs/generate/parts.py"
