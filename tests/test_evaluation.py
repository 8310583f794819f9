"""Models in memory: the numbers of `sb` on files, nothing about the model or the process changed, sentences."""

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.registry import get_model
from ranks import run_ranks
from source_tree import ROOT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import sbeval
from sbeval.attn_implementation import NAME
from sbeval.demo.evaluation import shipped_checkpoints
from sbeval.evaluation import run_tasks
from sbeval.models import SbevalForCausalLM
from sbeval.reports import draw, load_results
from sbeval.reports.publish import curves_of
from tests.marks import exhaustive

DEVICE = os.environ.get("SBEVAL_TEST_DEVICE", "cpu")  # not asked of CUDA: two processes are without it
TASK = "sb_text_fixed_target"
CHECKPOINT = str(shipped_checkpoints()[0])
ASKED: dict[str, Any] = {"targets_per_window": 32, "data_path": str(ROOT / "tests/support/texts/wikitext.txt")}
TOKENIZER = AutoTokenizer.from_pretrained(CHECKPOINT)


def small_nope(device: str = DEVICE) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": len(TOKENIZER)}
    torch.manual_seed(0)
    config = AutoConfig.for_model("smollm3", **sizes, **ids, num_hidden_layers=1, no_rope_layers=[0])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    return model.to(device)


def numbers(model: Any, **more: Any) -> dict[int, float]:
    asked = {"tasks": TASK, "lengths": [64, 32], "limit": 2, "metadata": ASKED, **more}
    curve = sbeval.evaluate(model, TOKENIZER, **asked)
    return {length: measured[f"{TASK}/nll"] for length, measured in curve.by_length.items()}


def test_numbers_are_those_of_the_same_model_in_files(tmp_path: Path) -> None:
    model = SbevalForCausalLM.from_pretrained(CHECKPOINT, dtype="float32")
    metadata = {"pretrained": CHECKPOINT, "context_lengths": [32, 64], **ASKED}
    arguments = {"pretrained": CHECKPOINT, "dtype": "float32"}
    run_tasks("sb", [TASK], output=str(tmp_path), metadata=metadata, model_args=arguments, limit=2, device="cpu")
    (of_files,) = curves_of(load_results(tmp_path)).values()
    assert numbers(model) == {length: measured[f"{TASK}/nll"] for length, measured in of_files.items()}


def test_a_model_is_left_as_it_was_and_so_are_its_tokenizer_and_random_numbers() -> None:
    model = SbevalForCausalLM.from_pretrained(CHECKPOINT).to(DEVICE)
    tokenizer, parts = AutoTokenizer.from_pretrained(CHECKPOINT), [type(module) for module in model.modules()]
    model.train().model.norm.eval()
    model.set_kernels("reference")
    tokenizer.pad_token = None
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.random(), np.random.rand(), float(torch.rand(()))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    sbeval.evaluate(model, tokenizer, tasks=[TASK], lengths=[32], limit=1, metadata=ASKED)
    assert before == (random.random(), np.random.rand(), float(torch.rand(())))
    assert (model.training, model.model.norm.training, tokenizer.pad_token) == (True, False, None)
    assert model.model.layers[0].self_attn.mixer.kernels == ("reference", None)
    assert parts == [type(module) for module in model.modules()]


def test_a_model_is_left_as_it_was_where_the_evaluation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **asked: Any) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr("sbeval.evaluation.run_tasks", fails)
    model, log = small_nope().train(), logging.getLogger("lm_eval.models.huggingface")
    before = random.getstate(), [*log.filters]
    with pytest.raises(RuntimeError, match="no more"):
        numbers(model)
    assert (random.getstate(), log.filters, model.training) == (*before, True)


def test_a_pattern_stands_for_the_tasks_it_matches() -> None:
    assert numbers(small_nope(), tasks="sb_text_*target")


def test_attention_by_name_is_the_model_s_definition_and_no_fault() -> None:
    model = small_nope()
    stickbreaking = numbers(model)
    assert model.config._attn_implementation == NAME
    assert stickbreaking == pytest.approx(numbers(model, model_args={"self_test": False}))
    model.set_attn_implementation("sdpa")
    assert stickbreaking != pytest.approx(numbers(model))


def sharded(rank: int, expected: dict[int, float]) -> None:
    torch.distributed.init_process_group("gloo")
    model, mesh = small_nope("cpu"), init_device_mesh("cpu", (2,))  # whatever device there is
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    assert numbers(fully_shard(model, mesh=mesh)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.exhaustive
def test_every_process_of_a_sharded_model_has_the_curve() -> None:
    run_ranks(sharded, numbers(small_nope()), processes=2)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "tokenizer": (lambda: callback(every_steps=1, tasks=TASK, tokenizer=None), "There is no tokenizer"),
    "steps": (lambda: callback(every_steps=0, tasks=TASK), "every_steps"),
    "callback's task": (lambda: callback(every_steps=1, tasks="sb_text_fixed"), "'sb_text_fixed'"),
    "task": (lambda: numbers(torch.nn.Linear(1, 1), tasks="sb_text_fixed"), "'sb_text_fixed'"),
    "model": (lambda: numbers(CHECKPOINT), "a model in memory"),
    "layer": (lambda: numbers(torch.nn.Linear(1, 1)), "of transformers, found Linear"),
    "wrapped": (lambda: numbers(torch.nn.DataParallel(small_nope())), "found DataParallel"),
    "no task": (lambda: numbers(small_nope(), tasks=[]), "holds an empty name"),
    "limit": (lambda: callback(every_steps=1, tasks=TASK, limit=0), "limit"),
    "words": (lambda: callback(every_steps=1, tasks=TASK, model_args="dtype=float32"), "dictionary for model_args"),
    "files": (lambda: numbers(small_nope(), model_args={"pretrained": CHECKPOINT}), "model_args contains pretrained"),
    "lengths": (lambda: numbers(small_nope(), lengths="long"), "context_lengths"),
    "figure": (lambda: draw(SimpleNamespace(), "c.gif"), "c.gif is no name for a figure: .* .png, .svg, .pdf"),  # type: ignore[arg-type]
}


def callback(**asked: Any) -> sbeval.LengthsCallback:
    return sbeval.LengthsCallback(SimpleNamespace(processing_class=None), **{"tokenizer": TOKENIZER, **asked})


class Logging:
    """A Trainer's part that the callback uses."""

    processing_class = None

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log(self, numbers: dict[str, float]) -> None:
        self.logged.append(numbers)


def stepped(lengths: sbeval.LengthsCallback, step: int, model: PreTrainedModel) -> None:
    lengths.on_step_end(None, SimpleNamespace(global_step=step), None, model=model)


def with_text(file: Path, **more: Any) -> tuple[Logging, sbeval.LengthsCallback]:
    trainer, asked = Logging(), {"lengths": [32], "limit": 1, "metadata": {**ASKED, "data_path": str(file)}, **more}
    return trainer, sbeval.LengthsCallback(trainer, TOKENIZER, every_steps=1, tasks=TASK, **asked)  # type: ignore[arg-type]


def test_an_evaluation_that_fails_is_left_out_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, model = Path(ASKED["data_path"]).read_text(), small_nope()
    (file := tmp_path / "text.txt").write_text(text)
    trainer, lengths = with_text(file)
    stepped(lengths, 1, model)
    file.unlink()
    stepped(lengths, 2, model)
    file.write_text(text)
    weight = model.get_output_embeddings().weight.detach()
    before = weight.clone()
    stepped(lengths, 3, model)
    weight.fill_(float("nan"))
    stepped(lengths, 4, model)
    weight.copy_(before)
    stepped(lengths, 5, model)
    assert [*lengths.curves] == [1, 3, 5]
    assert len(trainer.logged) == 3
    assert trainer.logged[0] == trainer.logged[1] == trainer.logged[2]
    said = [record.getMessage() for record in caplog.records if "the evaluation at step" in record.getMessage()]
    assert [line.partition(" failed")[0] for line in said] == [f"the evaluation at step {step}" for step in (2, 4)]
    assert "found nothing there" in said[0]


def test_an_evaluation_that_fails_ends_training_where_that_is_asked_for(tmp_path: Path) -> None:
    _, lengths = with_text(tmp_path / "gone.txt", raise_errors=True)
    with pytest.raises(sbeval.UserError, match="found nothing there"):
        stepped(lengths, 1, small_nope())


def one_fails(rank: int, raise_errors: bool) -> None:
    torch.distributed.init_process_group("gloo")
    gone = rank == 1
    _, lengths = with_text(Path("gone.txt") if gone else Path(ASKED["data_path"]), raise_errors=raise_errors)
    if raise_errors:
        with pytest.raises(sbeval.UserError, match="found nothing there"):
            stepped(lengths, 1, small_nope("cpu"))
        return
    stepped(lengths, 1, small_nope("cpu"))
    assert not lengths.curves


@pytest.mark.parametrize("raise_errors", exhaustive(False, True))
def test_every_process_leaves_out_an_evaluation_that_failed_in_one(raise_errors: bool) -> None:
    run_ranks(one_fails, raise_errors, processes=2)


NUL: dict[str, Callable[[], object]] = {
    "data_path": lambda: numbers(small_nope(), metadata={**ASKED, "data_path": "a\0b"}),
    "half a surrogate pair": lambda: numbers(small_nope(), metadata={**ASKED, "data_path": "a\udc00b"}),
    "examples_file": lambda: numbers(small_nope(), tasks="sb_many_shot_file", metadata={"examples_file": "a\0b"}),
    "results": lambda: load_results("a\0b"),
    "figure": lambda: draw(SimpleNamespace(), "a\0b.svg"),  # type: ignore[arg-type]
    "pretrained": lambda: get_model("sb")("a\0b"),
    "tokenizer": lambda: get_model("sb")(CHECKPOINT, tokenizer="a\0b"),
}


@pytest.mark.parametrize("argument", NUL)
def test_a_path_that_no_file_can_have_is_one_sentence(argument: str) -> None:
    with pytest.raises(sbeval.UserError, match=r"^(--metadata: )?Expected a .*a\\(x00|udc00)b.*: .*[.]$"):
        NUL[argument]()


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_one_sentence(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(sbeval.UserError, match=rf"^(?=.*{words}).+: .+[.]$"):
        call()


def test_an_argument_that_evaluate_does_not_know_is_refused_before_training() -> None:
    with pytest.raises(TypeError, match="lenghts"):
        callback(every_steps=1, tasks=TASK, lenghts=[32])
