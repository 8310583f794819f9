"""`tp_plan`: processes that hold a part of every matrix give the log-probabilities and texts of one, or say why not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from transformers import PretrainedConfig

from sbeval.errors import UserError
from sbeval.model_adapters.loading import check_tensor_plan
from tests.model_adapters.small import english, generated, likelihoods, load_lm

MODELS = ("llama", "qwen3", "gemma3")
PAIRS = [(english()[:300], english()[300:420]), (english()[50:90], " and"), (english()[7:200], english()[200:230])]
PROMPTS = [(english()[start : start + 60], {"until": [], "max_gen_toks": 12}) for start in (0, 40, 300)]


def worker(rank: int, folders: dict[str, Path], out: Path) -> None:
    answers = {}
    for model, folder in folders.items():
        lm = load_lm(folder, tp_plan="auto", batch_size=2)
        held = [getattr(parameter, "_local_tensor", parameter) for parameter in lm.model.parameters()]
        answers[model] = {
            "nats": likelihoods(lm, PAIRS),
            "texts": [str(text) for text in generated(lm, PROMPTS)],
            "numbers": sum(map(torch.numel, held)),
        }
    torch.save(answers, out / f"{rank}.pt")


@pytest.fixture(scope="module")
def answers(checkpoint, tmp_path_factory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(worker, {model: checkpoint(model) for model in MODELS}, out, processes=2)
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("model", MODELS)
def test_processes_that_share_matrices_answer_as_one(model, answers, checkpoint):
    alone = load_lm(checkpoint(model), batch_size=2)
    for process in answers:
        np.testing.assert_allclose(process[model]["nats"], likelihoods(alone, PAIRS), rtol=1e-6)
        assert process[model]["texts"] == generated(alone, PROMPTS)
        assert process[model]["numbers"] < 0.6 * sum(map(torch.numel, alone.model.parameters()))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"parallelize": True}, r"Expected tp_plan or parallelize=True in --model_args, found both"),
        ({"context_parallel": 2}, r"Expected tp_plan or context_parallel in --model_args, found both"),
    ],
)
def test_ways_to_share_a_model_exclude_each_other(options, sentence, checkpoint):
    with pytest.raises(UserError, match=sentence):
        load_lm(checkpoint("llama"), tp_plan="auto", **options)


def test_no_answers_are_kept_of_processes_that_share_a_model(checkpoint):
    lm = load_lm(checkpoint("llama"), tp_plan="auto")
    with pytest.raises(UserError, match="no response cache beside tp_plan, found --use_cache"):
        lm.set_cache_hook(SimpleNamespace(dbdict={}))  # type: ignore[arg-type]


def test_what_no_plan_can_share_is_refused(checkpoint, monkeypatch):
    with pytest.raises(UserError, match=r"a plan for tp_plan=auto, found sbeval: leave tp_plan out \(context_par"):
        load_lm(checkpoint("stickbreaking"), tp_plan="auto")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="divide the model's 4 key-value heads for tp_plan, found 3: start fewer"):
        check_tensor_plan(PretrainedConfig(num_attention_heads=4), {"layers.*": "colwise"})
