"""Any model of lm-eval that scores tokens answers this project's requests with the numbers of `sb`, or says why not."""

import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.model import CachingLM, TemplateLM
from lm_eval.api.registry import get_model
from ruler_problems import evaluated, write_labelled
from scoring_servers import CompletionsServer, completions_server, install_vllm

from sbeval import plugin
from sbeval.errors import UserError
from tests.model_adapters.small import Checkpoints, english, t5

plugin.complete_imports()
LENGTHS = [16, 32, 64]
LONGEST = 128
TASKS = {
    "fixed_target": {"targets_per_window": 8},
    "position": {},
    "rolling": {},
    "stream": {},
    "sliding": {"stride": 8},
}
RECALL = ["sb_mqrar_text", "sb_flipflop", "sb_copy_phrase", "sb_many_shot_file", "sb_mqrar"]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Short documents, so that windows hold targets of several."""
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(6):
        (folder / f"{index}.txt").write_text(english()[60 * index : 60 * index + 260])
    return folder


def numbers(lm: Any, tasks: list[str], metadata: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Every number of a run, samples' rows among them."""
    found = evaluated(lm, tasks, metadata, log_samples=True, **options)
    rows = [[sample["resps"], {key: sample[key] for key in sample["metrics"]}] for task in tasks for sample in found["samples"][task]]
    return {"results": found["results"], "samples": json.loads(json.dumps(rows)), "config": found["config"]}


def assert_close(found: Any, expected: Any) -> None:
    """Compares numbers wherever they stand, and everything else for equality."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_close(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_close(*pair)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-7, nan_ok=True)
    else:
        assert found == expected
