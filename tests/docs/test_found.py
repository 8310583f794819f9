"""What is told about sbeval is the same everywhere, and what it is said to have found stands in the archive."""

import json
import re
import tarfile
import tomllib

from source_tree import ROOT

# each number of the page: whose it is, at which length
NLL = {
    **{"1.903": ("stickbreaking", 1024), "1.804": ("stickbreaking", 16384), "9.455": ("nope", 16384)},
    **{"1.915": ("rope", 1024), "5.110": ("rope", 2048), "1.924": ("alibi", 1024), "1.951": ("alibi", 16384)},
    **{"1.977": ("rope_dynamic4", 2048), "3.554": ("rope_dynamic4", 16384)},
    **{"1.904": ("forgetting", 1024), "1.865": ("forgetting", 8192)},
}
NEEDLE = {"0.48": ("stickbreaking", 16384), "1.00": ("rope", 1024), "0.00": ("rope", 2048)}
LENGTHS = [2**power for power in range(10, 15)]


def test_what_was_found_stands_in_the_archive() -> None:
    text = (ROOT / "docs/results/found.md").read_text(encoding="utf-8")
    nll: dict[str, list[float]] = {}
    needle: dict[str, list[float]] = {}
    kinds = (("sb_stdlib_fixed_target", "nll", nll), ("sb_niah_single_1", "score", needle))
    with tarfile.open(ROOT / "docs/results/extrapolation/results.tar.xz") as archive:
        for member in archive:
            if found := re.match(r"results/scheme_(\w+)/.*/results_.*\.json$", member.name):
                results = json.load(archive.extractfile(member))["results"]  # type: ignore[arg-type]
                for task, metric, kept in kinds:
                    if task in results:
                        kept[found[1]] = [results[task][f"{metric}@{length:07d},none"] for length in LENGTHS]
    sentences = re.findall(r"^\d\. (.*?)^   `sbeval report (.*?)`$", text, re.MULTILINE | re.DOTALL)
    assert len(sentences) == 5
    said = {number for sentence, _ in sentences for number in re.findall(r"\d\.\d\d+", sentence)}
    assert said == NLL.keys() | NEEDLE.keys()
    for expected, values in ((NLL, nll), (NEEDLE, needle)):
        for number, (scheme, length) in expected.items():
            assert f"{values[scheme][LENGTHS.index(length)]:.{len(number) - 2}f}" == number
    assert needle["stickbreaking"][:4] == [1] * 4
    schemes = {file.stem for file in (ROOT / "research/paper_experiments/recipes").glob("scheme_*.yaml")}
    ends = {scheme: values[-1] for scheme, values in nll.items() if f"scheme_{scheme}" in schemes}
    assert (len(ends), min(ends, key=ends.__getitem__)) == (13, "stickbreaking")
    gains = [scheme for scheme in ends if all(a > b for a, b in zip(nll[scheme][:3], nll[scheme][1:4], strict=True))]
    assert {scheme for scheme in gains if "stickbreaking" not in scheme} == {"forgetting"}


def test_readme_site_and_package_say_what_this_is_in_the_same_words() -> None:
    paragraph = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")[1]
    words = " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph).split())
    assert tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["description"] == words
    site = re.search(r"^site_description: >-\n((?:  .*\n)+)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert " ".join(site[1].split()) == words  # type: ignore[index]
