"""Two processes on CPUs, their weights sharded (FSDP) or not: the same training as in one process."""

import json

import numpy as np
import pytest
import torch
from training_problems import copy_tokenizer, save_tiny_llama, tiny_extension, tiny_model, tiny_recipe, weights

from sbeval.errors import UserError
from sbeval.training.command import extend_command
from sbeval.training.extend import extend
from sbeval.training.recipe import OptimizationSettings
from sbeval.training.train import train
from tests.training.training_processes import run_processes


@pytest.fixture(scope="module")
def parent(tmp_path_factory, data_folder):
    folder = tmp_path_factory.mktemp("parents") / "parent_rope"
    tiny_model("rope", tie_word_embeddings=True).save_pretrained(folder)
    copy_tokenizer(data_folder, folder)
    return folder


def losses(run) -> list[float]:
    return [json.loads(line)["loss_nats"] for line in (run / "training_log.jsonl").read_text().splitlines()]


def test_sharded_weights_learn_the_same_stop_and_resume_and_leave_the_same_checkpoint(tmp_path, parent, data_folder):
    optimization = OptimizationSettings(
        learning_rate=3e-3,
        total_tokens=12 * 512,
        batch_tokens=512,
        micro_batch_tokens=128,
        warmup_steps=1,
        schedule="extension",
    )
    one = extend(
        tiny_extension(parent, data_folder, optimization=optimization, rope_scaling="dynamic:4"), tmp_path / "one"
    )
    options = [str(parent), "--data", str(data_folder), "--context", "128", "--rope-scaling", "dynamic:4"]
    options += ["--steps", "12", "--batch-tokens", "512", "--micro-batch-tokens", "128", "--warmup-steps", "1"]
    options += ["--learning-rate", "3e-3", "--precision", "float32", "--log-every-steps", "1"]
    options += ["--out", str(tmp_path / "two"), "--fsdp", "--gradient-checkpointing"]
    run_processes("extend", [*options, "--max-seconds", "0"], options, sharded=True)
    two = tmp_path / "two" / "checkpoint"
    parts = [json.loads(line) for line in (tmp_path / "two" / "runs.jsonl").read_text().splitlines()]
    assert [(part["first_step"], part["last_step"]) for part in parts] == [(0, 10), (10, 12)]
    assert [part["processes"] for part in parts] == [2, 2]
    assert (tmp_path / "two" / "states" / "checkpoint-12" / "pytorch_model_fsdp.bin").is_file()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    found = weights(two)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-2, atol=2e-4)
    assert (two / "config.json").read_text() == (one / "config.json").read_text()


def test_one_process_has_nothing_to_share_out(tmp_path, data_folder):
    with pytest.raises(UserError, match="accelerate launch"):
        train(tiny_recipe(steps=2), tmp_path, data_folder=data_folder, fsdp=True)


def test_a_run_begun_with_sharded_weights_is_not_gone_on_with_whole_ones(tmp_path, data_folder):
    recipe = tiny_recipe(steps=4)
    assert train(recipe, tmp_path, data_folder=data_folder, max_seconds=0.0) is None
    (tmp_path / "states" / "checkpoint-1" / "pytorch_model_fsdp.bin").touch()
    with pytest.raises(UserError, match=r"launch it with --fsdp"):
        train(recipe, tmp_path, data_folder=data_folder)


def test_processes_whose_documents_fill_different_numbers_of_batches_wait_for_each_other(tmp_path, data_folder):
    save_tiny_llama(tmp_path / "llama", data_folder)
    draw = np.random.default_rng(0)
    (tmp_path / "texts").mkdir()
    for index in range(120):
        letters = draw.choice(list("abcdef"), int(draw.choice([5, 30, 90, 400])))
        (tmp_path / "texts" / f"{index:03d}.txt").write_text("".join(letters))
    options = [str(tmp_path / "llama"), "--data", str(tmp_path / "texts"), "--context", "256", "--steps", "4"]
    options += ["--batch-tokens", "1024", "--micro-batch-tokens", "256", "--warmup-steps", "1"]
    options += ["--learning-rate", "3e-3", "--precision", "float32", "--log-every-steps", "1"]
    extend_command([*options, "--out", str(tmp_path / "one")])
    run_processes("extend", [*options, "--out", str(tmp_path / "two")])
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)


def test_processes_that_share_windows_learn_the_same(tmp_path, data_folder):
    parent = tmp_path / "parent"
    tiny_model("stickbreaking").save_pretrained(parent)
    copy_tokenizer(data_folder, parent)
    options = [str(parent), "--data", str(data_folder), "--context", "128", "--documents", "joined"]
    options += ["--steps", "4", "--batch-tokens", "512", "--micro-batch-tokens", "128", "--warmup-steps", "1"]
    options += ["--learning-rate", "3e-3", "--precision", "float32", "--log-every-steps", "1"]
    extend_command([*options, "--out", str(tmp_path / "one")])
    shared = [*options, "--out", str(tmp_path / "four"), "--context-parallel", "2", "--gradient-checkpointing"]
    run_processes("extend", shared, processes=4)
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    found = weights(tmp_path / "four" / "checkpoint")
    for name, tensor in weights(tmp_path / "one" / "checkpoint").items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "degree", "processes", "message"),
    [
        ({}, 2, 1, "groups of --context-parallel 2, found 1"),
        ({"documents": "joined"}, 3, 3, "--context to be a multiple of 6"),
        ({"documents": "separate"}, 2, 2, "--documents joined"),
    ],
)
def test_windows_that_cannot_be_shared_are_refused_before_anything_is_written(
    tmp_path, data_folder, monkeypatch, changes, degree, processes, message
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(UserError, match=message):
        extend(tiny_extension(tmp_path, data_folder, **changes), tmp_path / "out", context_parallel=degree)
    assert not (tmp_path / "out").exists()
