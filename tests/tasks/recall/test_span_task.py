"""`sb_span` inside lm-eval, on the adapter and a small random model."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lm_eval.utils import handle_non_serializable, make_table
from ruler_problems import evaluated, write_inputs

from sbeval.errors import UserError
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.models import SbevalConfig


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "cache"))
    write_inputs(tmp_path)
    torch.manual_seed(0)
    sizes = {"vocab_size": 700, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = SbevalConfig(attention="stickbreaking", num_attention_heads=2, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "byte_level_bpe")
    return tmp_path / "byte_level_bpe"


def run(checkpoint: Path, **options: Any) -> dict[str, Any]:
    metadata = {"pretrained": str(checkpoint), "data_path": str(checkpoint.parent / "essays"), "max_length": 4096}
    lm = StickBreakingLM(str(checkpoint), device="cpu", dtype="float32", max_length=4096)
    results = evaluated(lm, ["sb_span"], {**metadata, **options}, limit=3)
    assert "4 heads" in make_table(results)
    return json.loads(json.dumps(results, default=handle_non_serializable))


def test_rows_of_every_head_at_every_length(checkpoint: Path) -> None:
    results = run(checkpoint, context_lengths=[64, 256], queries=8)
    own = results["results"]["sb_span"]
    for length in (64, 256):
        rows = own[f"attention_span@{length:07d},none"]
        assert [row[:2] for row in rows] == [[0, 0], [0, 1], [1, 0], [1, 1]]
        assert all(0 < row[2] <= row[3] <= row[4] < length for row in rows)
        assert own[f"span90@{length:07d},none"] == pytest.approx(sum(row[3] for row in rows) / 4)
        assert 0 <= own[f"remaining_stick@{length:07d},none"] < 1
        assert 0 <= own[f"first_token_weight@{length:07d},none"] < 1
        assert 0 < own[f"attention_entropy@{length:07d},none"] < math.log(length)
    record = results["configs"]["sb_span"]["metadata"]["sbeval"]
    assert (record["family"], record["lengths"]) == ("span", [64, 256])
    assert len(results["samples"]["sb_span"]) == 3


def test_a_text_too_short_is_refused(checkpoint: Path) -> None:
    with pytest.raises(UserError, match="needs a text of at least 4000 tokens and found"):
        run(checkpoint, context_lengths=[4000], data_path=str(checkpoint.parent / "essays" / "essay0.txt"))
