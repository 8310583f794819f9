"""Versions that a release was tested with: one line warns outside of them, and page, ranges and packages agree."""

import logging
import re
import tomllib
from pathlib import Path

import pytest

from sbeval.demo.evaluation import shipped_checkpoints
from sbeval.fingerprint import parts
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.model_adapters.open import processes

ROOT = Path(__file__).parents[2]


def given(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> str | None:
    monkeypatch.setattr(parts, "installed_version", lambda name: versions.get(name))
    return parts.untested()


def test_each_version_outside_is_named_with_what_was_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    for inside in ("2.11.0", "2.11.0rc1", "2.13.0+cu130", "2.13.9", None):
        assert given(monkeypatch, torch=inside) is None
    assert given(monkeypatch, torch="2.14.0+cpu", triton="4", transformers="5.9.1", lm_eval="0.5.0.dev2") == (
        "lm_eval 0.5.0.dev2 (tested: 0.4.13), transformers 5.9.1 (tested: 5.16.1 to 5.23), "
        "torch 2.14.0+cpu (tested: 2.11 to 2.13), triton 4 (tested: 3.6 to 3.7)"
    )


def test_a_run_says_it_once_and_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    given(monkeypatch, torch="2.99.0")
    processes.warn_of_versions.cache_clear()
    for _ in range(2):
        assert StickBreakingLM(str(shipped_checkpoints()[1]), device="cpu", max_length=64).session is not None
    [line] = [record for record in caplog.records if "not tested with" in record.getMessage()]
    assert (line.levelno, "\n" in line.getMessage()) == (logging.WARNING, False)
    processes.warn_of_versions.cache_clear()


def test_the_page_the_ranges_and_the_packages_agree() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    project = " ".join(declared["dependencies"] + declared["optional-dependencies"]["dev"])
    pinned = [
        re.findall(r"^(\S+)==(\S+)$", (ROOT / f"constraints{kind}.txt").read_text(), re.M) for kind in ("", "-oldest")
    ]
    page = dict(re.findall(r"^\| (\S+) \| (.+?) \|", (ROOT / "docs/reference/versions.md").read_text(), re.M))
    for package, (oldest, newest) in parts.TESTED.items():
        name = package.replace("_", "-")
        assert page[name] == " to ".join(dict.fromkeys((oldest, newest)))
        assert re.search(rf"\b{name}(\[hf\])?>={re.escape(oldest)}\b", project)
        assert f"{dict(pinned[0])[name]}.".startswith(f"{newest}.")
        assert f"{dict(pinned[1]).get(name, oldest)}.".startswith(f"{oldest}.")
