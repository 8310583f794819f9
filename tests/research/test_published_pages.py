"""Published pages say what their archives of results hold."""

import re
import tarfile
from pathlib import Path
from typing import cast

from hypothesis import given
from hypothesis import strategies as st
from source_tree import ROOT

from research.published_results.found import NAMES, Found
from research.published_results.headline import LEVEL_NATS, SCHEMES, headline
from research.published_results.write_demo_page import page
from sbeval.corpora.archives import unpack

DEMO = ROOT / "docs" / "results" / "demo"


def test_the_demo_page_is_what_its_archive_says(tmp_path: Path) -> None:
    with tarfile.open(DEMO / "results.tar.xz") as archive:
        unpack(archive, tmp_path)
    assert page(tmp_path) == (DEMO / "README.md").read_text(encoding="utf-8")


class Measured:
    """NLL by scheme and multiple of the training length, in place of what an archive holds."""

    def __init__(self, longest: dict[str, float]) -> None:
        self.longest = longest

    def nll(self, scheme: str, task: str, multiple: float) -> float | None:
        return None if scheme not in self.longest else 2.0 if multiple == 1 else self.longest[scheme]


@given(st.dictionaries(st.sampled_from(SCHEMES), st.floats(1, 9)))
def test_the_headline_names_every_scheme_evaluated_once_on_the_side_of_its_change(longest: dict[str, float]) -> None:
    lines = headline(cast("Found", Measured(longest)))
    assert bool(lines) == bool(longest)
    for sentence in lines[0].split(". It ") if lines else ():
        for name, nats in re.findall(r"([A-Za-z-]+(?:, window 1x)?) \(([+-][0-9.]+)\)", sentence):
            low, high = (-9.0, -LEVEL_NATS) if "falls" in sentence else (LEVEL_NATS, 9.0)
            if "stays" in sentence:
                low, high = -LEVEL_NATS, LEVEL_NATS
            assert low - 0.005 <= float(nats) <= high + 0.005
            assert name in {NAMES[scheme] for scheme in longest}
    assert sum(f"{NAMES[scheme]} (" in (lines or [""])[0] for scheme in longest) == len(longest)
