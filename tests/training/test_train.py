import errno
import json
import os
import re
import shlex
import signal
import time

import pytest
import safetensors.torch
import torch
import yaml
from ranks import sbeval, start
from training_problems import STEPS, tiny_recipe, weights
from transformers.utils import logging as transformers_logging

from sbeval.commands.run import parse
from sbeval.errors import UserError
from sbeval.training.arrays import load_arrays
from sbeval.training.command import train_command
from sbeval.training.full_disk import COMPLETE_MARK, full_disk_named
from sbeval.training.train import train
from sbeval.training.trainer import last_complete_state, passes_of_a_step
from tests.training.training_processes import run_processes


def test_twenty_steps_lower_the_loss_and_leave_a_checkpoint_with_its_record(tmp_path, data_folder):
    checkpoint = train(tiny_recipe(), tmp_path, data_folder=data_folder, command="sbeval train tiny")
    record = json.loads((checkpoint / "training_record.json").read_text())
    losses = [point["loss_nats"] for point in record["loss_curve"]]
    assert [point["step"] for point in record["loss_curve"]] == [5, 10, 15, 20]
    assert losses[-1] < losses[0] - 0.3
    assert record["tokens_seen"] == STEPS * 256
    assert record["commands"] == ["sbeval train tiny"]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.eos_token == "<|endoftext|>"


@pytest.mark.parametrize("attention", ["stickbreaking", "rope"])
def test_a_run_stopped_and_resumed_ends_in_the_same_weights(tmp_path, data_folder, attention):
    recipe = tiny_recipe(attention, steps=4, save_every_steps=3)
    whole = train(recipe, tmp_path / "whole", data_folder=data_folder)
    for _ in range(10):  # each call has time for one step only
        resumed = train(recipe, tmp_path / "parts", data_folder=data_folder, max_seconds=0.0)
        if resumed is not None:
            break
    runs = [json.loads(line) for line in (tmp_path / "parts" / "runs.jsonl").read_text().splitlines()]
    assert [(run["first_step"], run["last_step"]) for run in runs] == [(step, step + 1) for step in range(4)]
    expected = weights(whole)
    for name, tensor in weights(resumed).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


def test_a_killed_run_loses_and_repeats_no_step(tmp_path, data_folder):
    recipe = tiny_recipe(steps=200, save_every_steps=10)
    whole = train(recipe, tmp_path / "whole", data_folder=data_folder)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    out = tmp_path / "killed"
    command = ["train", str(tmp_path / "tiny.yaml"), "--data", str(data_folder), "--out", str(out)]
    environment, log = os.environ | {"CUDA_VISIBLE_DEVICES": ""}, tmp_path / "log.txt"
    process = start(sbeval, *command, environment=environment, folder=tmp_path, log=log)
    try:
        while process.is_alive() and not any(out.glob(f"states/checkpoint-*/{COMPLETE_MARK}")):
            time.sleep(0.01)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL, log.read_text()
    resumed = train(recipe, out, data_folder=data_folder)
    (before, after) = (json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines())
    assert 0 == before["first_step"] < before["last_step"] == after["first_step"] < after["last_step"] == 200
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())
    curves = ([point["loss_nats"] for point in points(folder)] for folder in (tmp_path / "whole", out))
    assert next(curves) == next(curves)


def test_the_last_line_of_a_training_run_evaluates_its_checkpoint(tmp_path, data_folder, capsys):
    recipe = tiny_recipe(steps=1)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    train_command([str(tmp_path / "tiny.yaml"), "--data", str(data_folder), "--out", str(tmp_path / "a run")])
    last = capsys.readouterr().out.splitlines()[-1]
    program, *arguments = shlex.split(last.removeprefix("Next: sbeval "))
    assert (program, parse(arguments).model_args["pretrained"]) == (
        "run",
        str(tmp_path / "a run" / recipe.name),
    )


def test_a_training_run_prints_its_loss_with_the_time_left_and_no_bars(tmp_path, data_folder, capsys):
    train(tiny_recipe(steps=12, save_every_steps=5), tmp_path / "whole", data_folder=data_folder)
    printed = capsys.readouterr()
    assert "steps 1 to 12 of 256 tokens each, the loss every 5" in printed.out
    losses = [line for line in printed.out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in losses] == ["5/12", "10/12"]
    assert all(re.fullmatch(r"step \d+/12  loss \d\.\d{4}  \d+ s, about [\d.]+ s left", line) for line in losses)
    assert "it/s" not in printed.err
    assert transformers_logging.is_progress_bar_enabled()


def points(folder):
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


def test_two_processes_train_what_one_does(tmp_path, data_folder):
    recipe = tiny_recipe(steps=3)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    whole = train(recipe, tmp_path / "one", data_folder=data_folder)
    arguments = [str(tmp_path / "tiny.yaml"), "--data", str(data_folder), "--out", str(tmp_path / "two")]
    run_processes("train", arguments)
    expected = weights(whole)
    for name, tensor in weights(tmp_path / "two" / "tiny_stickbreaking").items():
        torch.testing.assert_close(tensor, expected[name], rtol=2e-2, atol=2e-4)


def test_a_batch_that_processes_cannot_share_evenly_is_refused():
    optimization = tiny_recipe().optimization  # four windows of 64
    assert passes_of_a_step(optimization, 64, processes=1) == (4, 1)
    assert passes_of_a_step(optimization, 64, processes=2) == (2, 1)
    assert passes_of_a_step(optimization.changed(micro_batch_tokens=64), 64, processes=2) == (1, 2)
    for processes, micro in ((3, None), (8, None), (3, 64), (4, 128)):
        with pytest.raises(UserError, match=f"that {processes} processes share evenly"):
            passes_of_a_step(optimization.changed(micro_batch_tokens=micro), 64, processes=processes)


def test_a_loss_curve_cut_off_in_the_middle_of_a_line_is_gone_on_with(tmp_path, data_folder):
    recipe = tiny_recipe(steps=4).changed(log_every_steps=1)
    assert train(recipe, tmp_path, data_folder=data_folder, max_seconds=0.0) is None
    with (tmp_path / "training_log.jsonl").open("a") as log:
        log.write('{"step": 2, "tok')
    checkpoint = train(recipe, tmp_path, data_folder=data_folder)
    curve = json.loads((checkpoint / "training_record.json").read_text())["loss_curve"]
    assert [point["step"] for point in curve] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["training_log.jsonl", "runs.jsonl", "run.json"])
@pytest.mark.parametrize("content", ["{}\n", "null\n", "[" * 100_000 + "\n", '{"step": "1", "seconds": null}\n', "\n"])
def test_a_damaged_record_is_one_sentence(tmp_path, data_folder, name, content):
    recipe = tiny_recipe(steps=4)
    assert train(recipe, tmp_path, data_folder=data_folder, max_seconds=0.0) is None
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=name):
        train(recipe, tmp_path, data_folder=data_folder)


def test_an_interrupted_save_is_passed_over(tmp_path, data_folder):
    recipe = tiny_recipe(steps=4)
    assert train(recipe, tmp_path, data_folder=data_folder, max_seconds=0.0) is None
    (tmp_path / "states" / "checkpoint-3").mkdir()
    (tmp_path / "states" / "checkpoint-3" / "model.safetensors").write_bytes(b"cut off")
    assert train(recipe, tmp_path, data_folder=data_folder) is not None
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [run["first_step"] for run in runs] == [0, 1]


def test_a_full_disk_leaves_the_state_before_it_to_go_on_from(tmp_path, data_folder, monkeypatch):
    recipe = tiny_recipe(steps=4, save_every_steps=1)
    whole = train(recipe, tmp_path / "whole", data_folder=data_folder)
    save = torch.save

    def save_while_there_is_room(value, file, *arguments, **options):
        if "checkpoint-3" in str(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return save(value, file, *arguments, **options)

    with monkeypatch.context() as full_disk:
        full_disk.setattr(torch, "save", save_while_there_is_room)
        with pytest.raises(UserError, match=r"full disk.*goes on from the state saved before"):
            train(recipe, tmp_path / "run", data_folder=data_folder)
    resumed = train(recipe, tmp_path / "run", data_folder=data_folder)
    runs = [json.loads(line) for line in (tmp_path / "run" / "runs.jsonl").read_text().splitlines()]
    assert [(run["first_step"], run["last_step"]) for run in runs] == [(0, 2), (2, 4)]
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(tmp_path, data_folder):
    recipe = tiny_recipe(steps=12, save_every_steps=1)
    broken = recipe.changed(
        optimization=recipe.optimization.changed(learning_rate=1e30, gradient_clip=1e30, warmup_steps=1)
    )
    with pytest.raises(
        UserError, match=r"NaN or infinity at step \d+; the last good state is kept in .*checkpoint-\d+"
    ):
        train(broken, tmp_path, data_folder=data_folder)
    with pytest.raises(UserError, match="no state had been saved before"):
        train(broken.changed(save_every_steps=100), tmp_path / "other", data_folder=data_folder)
    assert not (tmp_path / "tiny_stickbreaking").exists()
    state = last_complete_state(tmp_path / "states")
    assert all(tensor.isfinite().all() for tensor in weights(state).values())


def test_a_disk_full_at_the_end_leaves_no_half_checkpoint_and_nothing_is_trained_again(
    tmp_path, data_folder, monkeypatch
):
    recipe = tiny_recipe(steps=2)
    whole = train(recipe, tmp_path / "whole", data_folder=data_folder)
    save = safetensors.torch.save_file

    def save_while_there_is_room(tensors, file, *arguments, **options):
        if "partial" in str(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return save(tensors, file, *arguments, **options)

    with monkeypatch.context() as full_disk:
        full_disk.setattr("transformers.modeling_utils.safe_save_file", save_while_there_is_room)
        with pytest.raises(UserError, match="full disk"):
            train(recipe, tmp_path / "run", data_folder=data_folder)
    assert not (tmp_path / "run" / recipe.name).exists()
    mended = train(recipe, tmp_path / "run", data_folder=data_folder)
    assert len((tmp_path / "run" / "runs.jsonl").read_text().splitlines()) == 1
    assert [file.name for file in (tmp_path / "run").glob("*.partial")] == []
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(mended).items())


def test_a_folder_that_cannot_be_written_is_refused_in_one_sentence(tmp_path, data_folder, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=r"a folder to write to, .*: choose another --out"):
            train(tiny_recipe(steps=2), out, data_folder=data_folder)

    def no_room(file, *arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    with monkeypatch.context() as full_disk:
        full_disk.setattr("pathlib.Path.write_text", no_room)
        with pytest.raises(UserError, match=r"full disk.*no state had been saved before"):
            train(tiny_recipe(steps=2), tmp_path / "run", data_folder=data_folder)


def test_the_command_line_refuses_an_unknown_setting(tmp_path):
    with pytest.raises(UserError, match=r"unknown key 'learning_rat' in .*did you mean 'learning_rate'"):
        train_command(["demo_rope", "--out", str(tmp_path), "--set", "optimization.learning_rat=1"])


def test_more_steps_than_there_is_text_for_must_be_asked_for(tmp_path, data_folder):
    recipe = tiny_recipe()
    tokens = len(load_arrays(data_folder).tokens)
    steps = 2 * tokens // recipe.optimization.batch_tokens
    long = recipe.changed(optimization=recipe.optimization.changed(total_tokens=steps * 256))
    with pytest.raises(UserError, match=r"that is 1\.[78]\d epochs; .*--allow-repeat"):
        train(long, tmp_path / "once", data_folder=data_folder)
    repeated = long.changed(data=long.data.changed(allow_repeat=True))
    assert train(repeated, tmp_path / "often", data_folder=data_folder, max_seconds=0.0) is None


def test_a_mistake_in_the_model_does_not_spoil_the_folder(tmp_path, data_folder):
    recipe = tiny_recipe(steps=2)
    for wrong, words in ({"atention": "rope"}, "atention"), ({"vocab_size": 100}, "vocab_size of at least"):
        with pytest.raises(UserError, match=words):
            train(recipe.changed(model=recipe.model | wrong), tmp_path, data_folder=data_folder)
    assert train(recipe, tmp_path, data_folder=data_folder) is not None


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs a device that is always full")
def test_the_words_of_torch_s_own_writer_on_a_full_disk_are_known(tmp_path):
    with pytest.raises(UserError, match=r"full disk.*no state had been saved before"), full_disk_named(tmp_path):
        torch.save(torch.zeros(2**20), "/dev/full")
    with pytest.raises(ValueError, match="other"), full_disk_named(tmp_path):
        raise ValueError("other")


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_weights_are_saved_in_the_precision_asked_for(tmp_path, data_folder, precision):
    checkpoint = train(tiny_recipe(steps=2).changed(precision=precision), tmp_path, data_folder=data_folder)
    saved = safetensors.torch.load_file(checkpoint / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {getattr(torch, precision)}
