"""`sbeval inspect` prints what was found, as text or JSON, and one sentence where there is nothing to find."""

import json
import sys
from pathlib import Path

import pytest

from sbeval.__main__ import main
from sbeval.demo.evaluation import shipped_checkpoints
from tests.checkpoints.layouts import dolomite, save

STICKBREAKING = shipped_checkpoints()[0]


def inspected(*words: object) -> int:
    """Inspects in this process, since imports take most of the time of another one, and returns the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sbeval", "inspect", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_checkpoint_is_printed_for_readers_and_for_scripts(capfd: pytest.CaptureFixture[str]) -> None:
    words = [STICKBREAKING, "--memory", "80GiB"]
    assert inspected(*words, "--lengths", "4096,65536") == 0
    text, complaints = capfd.readouterr()
    assert complaints == ""
    assert inspected(*words, "--json") == 0
    written, complaints = capfd.readouterr()
    assert complaints == ""
    for part in (
        "sbeval; recognised by",
        "stickbreaking",
        "4,328,640 parameters",
        "1,024 tokens, from",
        "65,536",
        "80.0 GiB",
    ):
        assert part in text
    found = json.loads(written)
    assert found["checkpoint"]["format"] == "sbeval"
    assert found["checkpoint"]["problems"] == []
    assert found["memory"]["room"]["memory_bytes"] == 80 * 2**30
    assert [one["length_tokens"] for one in found["memory"]["needs"]] == [1024, 4096, 16384, 65536]
    assert found["tasks"] is None
    assert found["estimate"] is None


def test_what_cannot_be_loaded_is_described_with_the_reason_and_an_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, tensors = dolomite()
    save(tmp_path, {**config, "activation_function": "mish"}, tensors)
    assert inspected(tmp_path) == 1
    text, complaints = capfd.readouterr()
    assert "cannot be loaded; recognised by model_type 'stickbreaking'" in text
    assert "'mish'" in text
    assert "Traceback" not in complaints


def test_an_option_that_is_gone_names_what_takes_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    assert inspected(STICKBREAKING, "--tasks", "sb_stdlib", "--measured", "results.json") == 1
    said = capfd.readouterr().err
    assert "--measure," in said
    assert said.count("\n") == 1
