import errno
import os
import re
import shlex
import shutil
import signal
import time

import pytest
import safetensors.torch
import torch
import yaml
from ranks import sbeval, start
from training_problems import STEPS, assert_same_weights, losses, parts_of, record_of, tiny_recipe
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from sbeval.errors import UserError
from sbeval.harness.options import parse
from sbeval.training.arrays import load_arrays
from sbeval.training.command import train_command
from sbeval.training.record import COMPLETE_MARK, full_disk_named
from sbeval.training.train import train
from sbeval.training.trainer import last_complete_state, passes_of_a_step
from tests.marks import exhaustive


def test_twenty_steps_lower_the_loss_and_leave_a_checkpoint_with_its_record(tmp_path, data_folder):
    checkpoint = train(tiny_recipe(), tmp_path, data_folder=data_folder, command="sbeval train tiny")
    record = record_of(checkpoint)
    curve = record["loss_curve"]
    assert [point["step"] for point in curve] == [5, 10, 15, 20]
    assert curve[-1]["loss_nats"] < curve[0]["loss_nats"] - 0.3
    assert (record["tokens_seen"], record["commands"]) == (STEPS * 256, ["sbeval train tiny"])
    assert AutoTokenizer.from_pretrained(checkpoint).eos_token == "<|endoftext|>"


@pytest.mark.exhaustive
def test_a_killed_run_loses_and_repeats_no_step(tmp_path, data_folder):
    recipe = tiny_recipe(steps=100, save_every_steps=10)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    command = ["train", str(tmp_path / "tiny.yaml"), "--data", str(data_folder), "--out"]
    log, whole, out = tmp_path / "log.txt", tmp_path / "whole", tmp_path / "killed"
    for folder, ends in ((whole, 0), (out, -signal.SIGKILL), (out, 0)):
        process = start(sbeval, *command, str(folder), environment=os.environ, folder=tmp_path, log=log)
        try:
            while process.is_alive() and (not ends or not any(out.glob(f"states/checkpoint-*/{COMPLETE_MARK}"))):
                time.sleep(0.01)
        finally:
            process.kill()
            process.join()
        assert process.exitcode == ends, log.read_text()
    before, after = parts_of(out)
    assert 0 == before[0] < before[1] == after[0] < after[1] == 100
    assert_same_weights(out / "tiny_stickbreaking", whole / "tiny_stickbreaking")
    assert losses(out) == losses(whole)


def test_the_last_line_of_a_training_run_evaluates_its_checkpoint(tmp_path, data_folder, capsys):
    recipe = tiny_recipe(steps=1)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    train_command([str(tmp_path / "tiny.yaml"), "--data", str(data_folder), "--out", str(tmp_path / "a run")])
    last = capsys.readouterr().out.splitlines()[-1]
    program, *arguments = shlex.split(last.removeprefix("Next: sbeval "))
    assert (program, parse(arguments).model_args["pretrained"]) == ("run", str(tmp_path / "a run" / recipe.name))


def test_training_prints_steps_and_losses_with_the_time_left_and_no_bars(tmp_path, data_folder, capsys, monkeypatch):
    monkeypatch.setattr("sbeval.training.watch.SECONDS_BETWEEN_SIGNS", -1.0)
    transformers_logging.enable_progress_bar()
    train(tiny_recipe(steps=12, save_every_steps=5), tmp_path / "whole", data_folder=data_folder)
    printed = capsys.readouterr()
    assert "steps 1 to 12 of 256 tokens each, with the loss every 5 steps" in printed.out
    lines = [line for line in printed.out.splitlines() if line.startswith("step ")]
    assert [line.split()[1].split(",")[0] for line in lines] == [f"{step}/12" for step in range(1, 13)]
    loss, left = r"  loss \d\.\d{4}  \d+ s", r"(, about [\d.]+ (s|min) left)?"
    for step, line in enumerate(lines, start=1):
        assert re.fullmatch(rf"step {step}/12{'' if step % 5 and step < 12 else loss}{left}", line)
    assert "it/s" not in printed.err
    assert transformers_logging.is_progress_bar_enabled()


def test_a_batch_that_processes_cannot_share_evenly_is_refused():
    optimization = tiny_recipe().optimization  # four windows of 64
    assert passes_of_a_step(optimization, 64, processes=1) == (4, 1)
    assert passes_of_a_step(optimization, 64, processes=2) == (2, 1)
    assert passes_of_a_step(optimization.changed(micro_batch_tokens=64), 64, processes=2) == (1, 2)
    for processes, micro in ((3, None), (8, None), (3, 64), (4, 128)):
        with pytest.raises(UserError, match=f"evenly over {processes} ranks"):
            passes_of_a_step(optimization.changed(micro_batch_tokens=micro), 64, processes=processes)


STOPPED = tiny_recipe(steps=4).changed(log_every_steps=1)


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory, data_folder):
    out = tmp_path_factory.mktemp("stopped")
    assert train(STOPPED, out, data_folder=data_folder, max_seconds=0.0) is None
    return out


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """The folder of a run after the first of four steps."""
    return shutil.copytree(stopped_once, tmp_path / "run")


@pytest.mark.parametrize("name", ["training_log.jsonl", "runs.jsonl", "run.json"])
@pytest.mark.parametrize("content", ["{}\n", "null\n", "[" * 100_000 + "\n", '{"step": "1", "seconds": null}\n', "\n"])
def test_a_damaged_record_is_one_sentence(stopped, data_folder, name, content):
    (stopped / name).write_text(content)
    with pytest.raises(UserError, match=name):
        train(STOPPED, stopped, data_folder=data_folder)


def test_a_loss_curve_and_a_save_that_were_cut_off_are_gone_on_with(stopped, data_folder):
    with (stopped / "training_log.jsonl").open("a") as log:
        log.write('{"step": 2, "tok')
    (stopped / "states" / "checkpoint-3").mkdir()
    (stopped / "states" / "checkpoint-3" / "model.safetensors").write_bytes(b"cut off")
    curve = record_of(train(STOPPED, stopped, data_folder=data_folder))["loss_curve"]
    assert ([point["step"] for point in curve], parts_of(stopped)) == ([1, 2, 3, 4], [(0, 1), (1, 4)])


def test_sharded_weights_need_processes_and_a_run_begun_with_them_goes_on_with_them(stopped, data_folder):
    with pytest.raises(UserError, match="accelerate launch"):
        train(STOPPED, stopped, data_folder=data_folder, fsdp=True)
    (stopped / "states" / "checkpoint-1" / "pytorch_model_fsdp.bin").touch()
    with pytest.raises(UserError, match="launch it with --fsdp"):
        train(STOPPED, stopped, data_folder=data_folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("writer", "own", "place", "message", "parts"),
    [
        ("torch.save", torch.save, "checkpoint-3", "resumes from its last state", [(0, 2), (2, 4)]),
        *exhaustive(
            ("transformers.modeling_utils.safe_save_file", safetensors.torch.save_file, "partial", "", [(0, 4)])
        ),
    ],
    ids=["a state", "the checkpoint"],
)
def test_a_full_disk_leaves_a_state_to_go_on_with(
    tmp_path, data_folder, monkeypatch, writer, own, place, message, parts
):
    recipe, out = tiny_recipe(steps=4, save_every_steps=1), tmp_path / "run"
    whole = train(recipe, tmp_path / "whole", data_folder=data_folder)

    def save_while_there_is_room(value, file, *arguments, **options):
        if place in str(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return own(value, file, *arguments, **options)

    with monkeypatch.context() as full_disk:
        full_disk.setattr(writer, save_while_there_is_room)
        with pytest.raises(UserError, match=f"disk is full.*{message}"):
            train(recipe, out, data_folder=data_folder)
    assert not (out / recipe.name).exists()
    resumed = train(recipe, out, data_folder=data_folder)
    assert parts_of(out) == parts
    assert not list(out.glob("*.partial"))
    assert_same_weights(resumed, whole)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(tmp_path, data_folder):
    recipe = tiny_recipe(steps=12, save_every_steps=1)
    steep = recipe.optimization.changed(learning_rate=1e30, gradient_clip=1e30, warmup_steps=1)
    broken = recipe.changed(optimization=steep)
    with pytest.raises(UserError, match=r"NaN or infinity at step \d+; the last complete state is .*checkpoint-\d+"):
        train(broken, tmp_path, data_folder=data_folder)
    with pytest.raises(UserError, match="no state had been saved before"):
        train(broken.changed(save_every_steps=100), tmp_path / "other", data_folder=data_folder)
    assert not (tmp_path / "tiny_stickbreaking").exists()
    state = safetensors.torch.load_file(last_complete_state(tmp_path / "states") / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in state.values())


def test_a_folder_that_cannot_be_written_is_refused_in_one_sentence(tmp_path, data_folder, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=r"cannot be written to, .*: choose another --out"):
            train(tiny_recipe(steps=2), out, data_folder=data_folder)

    def no_room(file, *arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    with monkeypatch.context() as full_disk:
        full_disk.setattr("pathlib.Path.write_text", no_room)
        with pytest.raises(UserError, match=r"disk is full.*no state had been saved before"):
            train(tiny_recipe(steps=2), tmp_path / "run", data_folder=data_folder)


def test_more_steps_than_there_is_text_for_must_be_asked_for(tmp_path, data_folder):
    recipe = tiny_recipe()
    steps = 2 * len(load_arrays(data_folder).tokens) // recipe.optimization.batch_tokens
    long = recipe.changed(optimization=recipe.optimization.changed(total_tokens=steps * 256))
    with pytest.raises(UserError, match=r"1\.[78]\d times; .*--allow-repeat"):
        train(long, tmp_path / "once", data_folder=data_folder)
    repeated = long.changed(data=long.data.changed(allow_repeat=True))
    assert train(repeated, tmp_path / "often", data_folder=data_folder, max_seconds=0.0) is None


def test_a_mistake_in_the_model_does_not_spoil_the_folder(tmp_path, data_folder):
    recipe = tiny_recipe(steps=2)
    for wrong, words in ({"atention": "rope"}, "atention"), ({"vocab_size": 100}, "but vocab_size in the recipe"):
        with pytest.raises(UserError, match=words):
            train(recipe.changed(model=recipe.model | wrong), tmp_path, data_folder=data_folder)
    assert train(recipe, tmp_path, data_folder=data_folder) is not None


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs a device that is always full")
def test_the_words_of_torch_s_own_writer_on_a_full_disk_are_known(tmp_path):
    with pytest.raises(UserError, match=r"disk is full.*no state had been saved before"), full_disk_named(tmp_path):
        torch.save(torch.zeros(2**20), "/dev/full")
    with pytest.raises(ValueError, match="other"), full_disk_named(tmp_path):
        raise ValueError("other")


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_weights_are_saved_in_the_precision_asked_for(tmp_path, data_folder, precision):
    checkpoint = train(tiny_recipe(steps=2).changed(precision=precision), tmp_path, data_folder=data_folder)
    saved = safetensors.torch.load_file(checkpoint / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {getattr(torch, precision)}
