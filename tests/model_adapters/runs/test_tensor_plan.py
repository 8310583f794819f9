"""`tp_plan`: processes that hold a part of every matrix give the log-probabilities and texts of one, or say why not."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from ranks import run_ranks
from torch.testing import assert_close
from transformers import PretrainedConfig

from sbeval.errors import UserError
from sbeval.model_adapters.batching import SharedDoesNotFit, share_passes
from sbeval.model_adapters.generate.slots.fused_blocks import FusedBlocks
from sbeval.model_adapters.generate.slots.stepper import Stepper
from sbeval.model_adapters.open.tensor_plan import OLDEST_TRANSFORMERS_OF_PLANS, check_tensor_plan
from sbeval.model_adapters.prepare.changes.sums import RowParallelForward, give_back_sums
from sbeval.model_adapters.prepare.trial import Trial
from sbeval.model_adapters.self_test import testing
from tests.model_adapters import small
from tests.model_adapters.prepare.faster import make_faster
from tests.model_adapters.small import english, generated, likelihoods, load_lm

NEEDS_PLANS = pytest.mark.skipif(
    Version(transformers.__version__).release < OLDEST_TRANSFORMERS_OF_PLANS,
    reason="tp_plan is refused with this transformers",
)
MODELS = ("llama", "qwen3", "gemma3")
PAIRS = [(english()[:300], english()[300:420]), (english()[50:90], " and"), (english()[7:200], english()[200:230])]
PROMPTS = [(english()[start : start + 60], {"until": [], "max_gen_toks": 12}) for start in (0, 40, 300)]
WIDE = {"num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 64, "vocab_size": 61}
LATE = {**dict.fromkeys(("gate_proj", "up_proj"), "replicate"), "down_proj": "rowwise_split_input"}
WAYS: dict[str, Any] = {"tp_plan": "auto", "parallelize": True, "context_parallel": 2}
PLANS: dict[str, Any] = {"auto": "auto", "dealt out late": {f"model.layers.*.mlp.{name}": LATE[name] for name in LATE}}


def fused(rank: int, plan: str, folder: Path, out: Path) -> None:
    """One process's logits of a text and of a step in slots, before and after its parts are fused."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan=PLANS[plan]).eval()
    planned = {name: module.forward for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    logits = {}
    with torch.no_grad():
        logits["plan"] = model(torch.arange(9)[None]).logits
        difference, Trial.difference = Trial.difference, lambda _: 1.0  # type: ignore[method-assign]
        assert not make_faster(model)
        assert planned == {name: model.get_submodule(name).forward for name in planned}
        Trial.difference = difference  # type: ignore[method-assign]
        assert make_faster(model)
        logits["fused"] = model(torch.arange(9)[None]).logits
    blocks = FusedBlocks.of(model) if plan == "auto" else None
    if blocks is None:
        with pytest.raises(ValueError, match="shard its linear layers in another way"):
            FusedBlocks.of(model)
    for name, each in (("step", None), ("fused step", blocks)):
        stepper = Stepper(model, slots=1, room_tokens=16, most_new_tokens=3, fused=each)
        stepper.start([0], [np.arange(9)], [3])
        logits[name] = stepper.try_step()
    summed = [module for module in model.modules() if isinstance(module.forward, RowParallelForward)]
    give_back_sums(summed)
    assert planned == {name: model.get_submodule(name).forward for name in planned}
    torch.save((logits, len(summed)), out / f"{rank}.pt")


@pytest.mark.exhaustive
@NEEDS_PLANS
@pytest.mark.parametrize("plan", PLANS)
def test_fused_parts_of_a_plan_have_its_logits(plan, tmp_path):
    small.odd("llama", **WIDE).save_pretrained(tmp_path / "model")
    run_ranks(fused, plan, tmp_path / "model", tmp_path, processes=2)
    expected = small.odd("llama", **WIDE)(torch.arange(9)[None]).logits.detach()
    for rank in range(2):
        logits, summed = torch.load(tmp_path / f"{rank}.pt")
        assert summed == 4
        for name in ("plan", "fused"):
            assert_close(logits[name], expected, rtol=1e-5, atol=1e-5)
        for name in ("step", "fused step"):
            assert_close(logits[name], expected[:, -1], rtol=1e-4, atol=1e-4)


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


@pytest.mark.exhaustive
@NEEDS_PLANS
@pytest.mark.parametrize("model", MODELS)
def test_processes_that_share_matrices_answer_as_one(model, answers, checkpoint):
    alone = load_lm(checkpoint(model), batch_size=2)
    for process in answers:
        np.testing.assert_allclose(process[model]["nats"], likelihoods(alone, PAIRS), rtol=1e-6)
        assert process[model]["texts"] == generated(alone, PROMPTS)
        assert process[model]["numbers"] < 0.6 * sum(map(torch.numel, alone.model.parameters()))


@pytest.mark.parametrize("names", list(itertools.combinations(WAYS, 2)))
def test_ways_to_share_a_model_exclude_each_other_before_it_is_loaded(names, tmp_path):
    with pytest.raises(UserError, match=f"Expected {names[0]} or {names[1]} in --model_args, found both"):
        load_lm(tmp_path / "nothing", **{name: WAYS[name] for name in names})


def test_memory_that_runs_out_in_one_process_is_no_reason_to_try_again(checkpoint, monkeypatch, tmp_path):
    def run_out(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path))
    lm = load_lm(checkpoint("llama"), batch_size=2)
    (tmp_path / "self_tests").rename(tmp_path / "others")
    monkeypatch.setattr("transformers.LlamaModel.forward", run_out)
    share_passes(True)
    try:
        for work in (
            lambda: likelihoods(lm, PAIRS),
            lambda: generated(lm, PROMPTS),
            lambda: testing.tested(lm.session),
        ):
            with pytest.raises(SharedDoesNotFit, match="it ran out in one: use a smaller batch_size"):
                work()
    finally:
        share_passes(False)


def test_no_answers_are_kept_of_processes_that_share_a_model(checkpoint):
    lm = load_lm(checkpoint("llama"))
    lm.opened.arguments["tp_plan"] = "auto"  # which one process could not load where there is a GPU
    with pytest.raises(UserError, match="--use_cache does not work with tp_plan"):
        lm.set_cache_hook(SimpleNamespace(dbdict={}))  # type: ignore[arg-type]


def test_a_plan_is_refused_with_a_transformers_that_splits_matrices_in_another_way(monkeypatch):
    monkeypatch.setattr("sbeval.checkpoints.versions.transformers.__version__", "5.20.2")
    with pytest.raises(UserError, match=r"tp_plan needs transformers 5\.21 or newer, and 5\.20\.2 is installed"):
        check_tensor_plan(transformers.LlamaConfig(), "auto")


@NEEDS_PLANS
def test_what_no_plan_can_share_is_refused(checkpoint, monkeypatch):
    with pytest.raises(
        UserError, match=r"type sbeval has no .* plan for tp_plan=auto: leave tp_plan out \(.*context_par"
    ):
        load_lm(checkpoint("stickbreaking"), tp_plan="auto")
    plan = {"layers.*": "colwise"}
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(
            UserError, match="tp_plan needs several processes, but only one runs: start one for each GPU"
        ):
            check_tensor_plan(PretrainedConfig(num_attention_heads=4), plan)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="divides the model's 4 key-value heads for tp_plan, found 3: start fewer"):
        check_tensor_plan(PretrainedConfig(num_attention_heads=4), plan)
