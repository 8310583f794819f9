"""`rolling` equals lm-eval's own wikitext and pile_10k on its own `hf` model, its windows, BOS, words and bytes."""

import math
import re
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from corpus_problems import BOS, CRAWL, EOS, SIZES, WIKITEXT, WIKITEXT_FILE, run_task, tiny_llama, tiny_tokenizer
from lm_eval import evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks._yaml_loader import load_yaml

from sbeval.corpora import split_wikitext_pages
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.models import SbevalConfig, SbevalForCausalLM

LENGTHS = [48, 300]
PAGES = list(split_wikitext_pages(WIKITEXT))


def stickbreaking() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = SbevalConfig(training_length_tokens=64, initializer_range=0.2, bos_token_id=BOS, eos_token_id=EOS, **SIZES)
    return SbevalForCausalLM(config).eval()


MODELS = {"llama": tiny_llama, "stick-breaking": stickbreaking}


def checkpoint(folder: Path, model: str, *, adds_bos: bool) -> Path:
    MODELS[model]().save_pretrained(folder)
    tiny_tokenizer(adds_bos=adds_bos).save_pretrained(folder)
    return folder


def theirs(name: str, rows: dict[str, list[str]], checkpoint: Path, length: int) -> dict[str, Any]:
    """Runs lm-eval's own task, its documents replaced, on its own model."""
    folder = Path(next(iter(lm_eval.tasks.__path__)))
    config = load_yaml(folder / name / f"{name}.yaml")
    split = config["test_split"]
    for key in ("dataset_path", "dataset_name", "training_split", "validation_split", "should_decontaminate"):
        config.pop(key, None)
    config["custom_dataset"] = lambda **_: {split: datasets.Dataset.from_dict(rows)}
    task = ConfigurableTask(config=config | {"num_fewshot": 0})
    model = HFLM(pretrained=str(checkpoint), dtype="float32", max_length=length, device="cpu", batch_size=1)
    whole = evaluate(lm=model, task_dict={"tasks": {name: task}, "groups": {}}, bootstrap_iters=0)
    return {"values": whole["results"][name], "samples": whole["samples"][name]}


def compare(name: str, task: str, rows: dict[str, list[str]], checkpoint: Path, metadata: dict[str, Any]) -> None:
    ours = StickBreakingLM(str(checkpoint), dtype="float32", device="cpu")
    found = run_task(task, ours, {"pretrained": str(checkpoint), "context_lengths": LENGTHS, **metadata})
    (column,) = rows
    for length in LENGTHS:
        expected = theirs(name, rows, checkpoint, length)
        for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
            value = expected["values"][f"{metric},none"]
            assert found["values"][f"{metric}@{length:07d}"] == pytest.approx(value, rel=1e-5)
        for sample, logged in zip(found["samples"], expected["samples"], strict=True):
            ((_, nats, tokens, words, size),) = sample[f"nll@{length:07d}"]
            assert -nats == pytest.approx(logged["resps"][0][0], rel=1e-5)
            assert tokens == len(ours.tok_encode(logged["arguments"][0][0]))
            text = logged["doc"][column]
            assert (words, size) == (len(re.split(r"\s+", text)), len(text.encode()))
    short, long = (found["values"][f"nll@{length:07d}"] for length in LENGTHS)
    assert not math.isclose(short, long, rel_tol=1e-4), "the lengths have to differ for the windows to be tested"


@pytest.mark.parametrize("adds_bos", [False, True], ids=["plain", "adds BOS"])
@pytest.mark.parametrize("model", MODELS)
def test_rolling_equals_lm_evals_wikitext(tmp_path: Path, model: str, adds_bos: bool) -> None:
    folder = checkpoint(tmp_path / model, model, adds_bos=adds_bos)
    compare("wikitext", "sb_wikitext_rolling", {"page": PAGES}, folder, {"data_path": str(WIKITEXT_FILE)})


@pytest.mark.parametrize("model", MODELS)
def test_rolling_equals_lm_evals_pile_10k(tmp_path: Path, model: str) -> None:
    folder = checkpoint(tmp_path / model, model, adds_bos=False)
    data = tmp_path / "NeelNanda" / "pile-10k"
    (data / "data").mkdir(parents=True)
    rows = {"text": CRAWL, "meta": [{"pile_set_name": "x"}] * len(CRAWL)}
    pq.write_table(pa.table(rows), data / "data" / "train-00000-of-00001.parquet")
    compare("pile_10k", "sb_pile_rolling", {"text": CRAWL}, folder, {"dataset": str(data)})


def test_the_pages_are_pages() -> None:
    assert len(PAGES) == 4
    tokens = [len(tiny_tokenizer().encode(text)) for text in (*PAGES, *CRAWL)]
    assert min(tokens) < LENGTHS[0] < LENGTHS[1] < sorted(tokens)[-5]
