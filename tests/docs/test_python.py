"""The programs of the page on Python run, each alone, and do what the words around them say."""

import re
import tarfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from source_tree import ROOT
from transformers import AutoModelForCausalLM, Trainer

import sbeval
from sbeval.attn_implementation import NAME
from sbeval.corpora.archives import unpack
from sbeval.demo.evaluation import shipped_checkpoints

pytestmark = pytest.mark.exhaustive

PAGE = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TEXT = (ROOT / "tests/support/texts/wikitext.txt").read_text(encoding="utf-8")
TASK = "sb_text_fixed_target"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "checkpoint").symlink_to(shipped_checkpoints()[0])
    (tmp_path / "text.txt").write_text(TEXT * (1 + 20_000 // len(TEXT)), encoding="utf-8")
    with tarfile.open(ROOT / "docs/results/demo/results.tar.xz") as archive:
        unpack(archive, tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(first_words: str) -> dict[str, Any]:
    (program,) = [program for program in PROGRAMS if first_words in program]
    names: dict[str, Any] = {}
    exec(program, names)
    return names


def test_the_page_has_five_programs_and_one_that_names_an_attention() -> None:
    assert len(PROGRAMS) == 6


def test_the_operation(folder: Path) -> None:
    assert ran("stickbreaking_attention(q, k, v)")["q"].grad.isfinite().all()


def test_attention_by_name(folder: Path) -> None:
    assert ran("SmolLM3Config")["model"].config._attn_implementation == NAME


def test_a_curve_in_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve: sbeval.Curve = ran("curve = ")["curve"]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["64", "128"]
    assert set(curve.table["context_length_tokens"]) == {64, 128}
    assert {file.name for file in folder.iterdir()} == {"checkpoint", "text.txt", "results"}
    assert curve.figure("curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_table(folder: Path) -> None:
    nll: pd.DataFrame = ran("pivot_table")["nll"]
    assert len(nll.columns) == 2
    assert nll.notna().all(axis=None)


def test_a_figure(folder: Path) -> None:
    ran("stream.svg")
    assert (folder / "stream.svg").read_text().startswith("<svg")


def test_lengths_while_training(folder: Path) -> None:
    names = ran("LengthsCallback")
    history = names["trainer"].state.log_history
    key = f"eval_{TASK}/nll/128"
    assert [entry["step"] for entry in history if key in entry] == [2, 4]
    assert (folder / "after_4_steps.png").exists()
    plain = AutoModelForCausalLM.from_pretrained("checkpoint")
    Trainer(plain, names["arguments"], train_dataset=names["rows"]).train()
    for weight, other in zip(names["model"].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight, other)
