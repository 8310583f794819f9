"""Training deletes and overwrites nothing that it did not make: every folder is compared before and after."""

import json
import re
import shutil

import numpy as np
import pytest
from folders import below, room_for, snapshot, unchanged
from training_problems import save_parent, tiny_extension, tiny_recipe

from sbeval.checkpoints import convert_checkpoint
from sbeval.errors import UserError
from sbeval.keeping.writing import alone_in
from sbeval.processes.ending import no_room
from sbeval.training.extend import extend
from sbeval.training.recipe import RUN_FILES
from sbeval.training.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory, data_folder):
    """The folder of a run that has ended."""
    out = tmp_path_factory.mktemp("run")
    train(tiny_recipe(steps=2), out, data_folder=data_folder)
    return out


@pytest.mark.parametrize("name", ["..", ".", "", "../models", "/models", "a/b", "States", *sorted(RUN_FILES)])
def test_a_recipe_s_name_is_one_part_of_a_path_and_no_file_of_the_run(name):
    with pytest.raises(UserError, match=r"A recipe cannot be named|name to be a name that a folder can have"):
        tiny_recipe().changed(name=name)


@pytest.mark.parametrize("inputs_recorded", [True, False])  # runs of earlier versions recorded none
def test_a_run_that_has_ended_is_left_as_it_is(inputs_recorded, run, tmp_path, data_folder, capsys):
    out = shutil.copytree(run, tmp_path / "run")
    (out / "notes.txt").write_text("mine")
    identity = json.loads((out / "run.json").read_text())
    if not inputs_recorded:
        del identity["inputs"]
        (out / "run.json").write_text(json.dumps(identity, indent=1, sort_keys=True))
    with unchanged(out):
        assert train(tiny_recipe(steps=2), out, data_folder=data_folder) == out / "tiny_stickbreaking"
    assert "already trained" in capsys.readouterr().out


def test_another_recipe_is_refused_in_the_folder_of_a_run_even_without_its_states(run, data_folder):
    (run / "states").rename(run.parent / "states_kept_elsewhere")
    with unchanged(run), pytest.raises(UserError, match=r"holds another run \(it differs in recipe\.seed\)"):
        train(tiny_recipe(steps=2).changed(seed=1), run, data_folder=data_folder)
    with unchanged(run), pytest.raises(UserError, match=r"differs in recipe\.model\.attention, recipe\.name\)"):
        train(tiny_recipe("rope", steps=2), run, data_folder=data_folder)
    (run.parent / "states_kept_elsewhere").rename(run / "states")


@pytest.mark.parametrize(
    "there",
    [
        *("tiny_stickbreaking/mine.txt", "states/checkpoint-1/mine.txt", "run.json/mine", "run.json"),
        "tiny_stickbreaking/model.safetensors",  # beside the record of a run that did not make it
    ],
)
def test_a_folder_that_holds_something_else_is_refused_before_anything_is_written(run, tmp_path, data_folder, there):
    if there.endswith("safetensors"):
        (tmp_path / "run.json").write_bytes((run / "run.json").read_bytes())
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).write_text("mine")
    with unchanged(tmp_path), pytest.raises(UserError, match=there.partition("/")[0]):
        train(tiny_recipe(steps=2), tmp_path, data_folder=data_folder)


@pytest.mark.parametrize("left", [None, 100])
def test_a_checkpoint_without_its_weights_is_not_called_trained(left, run, tmp_path, data_folder):
    out = shutil.copytree(run, tmp_path / "run")
    weights = out / "tiny_stickbreaking" / "model.safetensors"
    weights.unlink() if left is None else weights.write_bytes(weights.read_bytes()[:left])
    with unchanged(out) as before, pytest.raises(UserError, match="cannot be read"):
        train(tiny_recipe(steps=2), out, data_folder=data_folder)
    assert train(tiny_recipe(steps=2), out, data_folder=data_folder, replace=True) is not None
    (aside,) = tmp_path.glob("run.old-*")
    assert snapshot(aside) == before


def test_a_checkpoint_begun_before_a_kill_is_written_anew_and_folders_of_like_names_stay(run, tmp_path, data_folder):
    for name in ("tiny_stickbreaking.0123456789ab.partial", "tiny_stickbreaking.partial", "states/checkpoint-best"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("mine")
    (tmp_path / "run.json").write_bytes((run / "run.json").read_bytes())
    assert train(tiny_recipe(steps=2), tmp_path, data_folder=data_folder) is not None
    after = snapshot(tmp_path)
    kept = {name for name in after if name.endswith("/file")}
    assert kept == {"tiny_stickbreaking.partial/file", "states/checkpoint-best/file"}
    ours, theirs = (below(found, "tiny_stickbreaking") for found in (after, snapshot(run)))
    assert ours["model.safetensors"] == theirs["model.safetensors"]


@pytest.mark.exhaustive
def test_states_of_a_user_stay_and_older_ones_of_the_run_go(tmp_path, data_folder):
    recipe = tiny_recipe(steps=5, save_every_steps=1)
    assert train(recipe, tmp_path, data_folder=data_folder, max_seconds=0.0) is None
    states = tmp_path / "states"
    shutil.copytree(states / "checkpoint-1", states / "checkpoint-1-good")
    for name in ("checkpoint-1/notes.txt", "checkpoint-2024/model.safetensors", "checkpoint-2024/notes.txt"):
        (states / name).parent.mkdir(exist_ok=True)
        (states / name).write_text("mine")
    good, mine = (snapshot(states / name) for name in ("checkpoint-1-good", "checkpoint-2024"))
    assert train(recipe, tmp_path, data_folder=data_folder) is not None
    (aside,) = states.glob("checkpoint-2024.old-*")
    assert (snapshot(aside), snapshot(states / "checkpoint-1-good")) == (mine, good)
    kept = {f"checkpoint-{name}" for name in ("1", "4", "5", "1-good")}
    assert {folder.name for folder in states.iterdir()} == {*kept, aside.name}


@pytest.mark.parametrize("name", ["parent", "run", "data"])
def test_an_extension_never_writes_into_its_parent_s_folder_or_its_data_s(name, run, parent, data_folder):
    checkpoint = run / "tiny_stickbreaking" if name == "run" else parent
    out = {"parent": parent, "run": run, "data": data_folder}[name]
    with unchanged(out), pytest.raises(UserError, match="choose another --out"):
        extend(tiny_extension(checkpoint, data_folder), out)


def test_a_checkpoint_named_as_the_parent_of_its_own_folder_is_not_replaced(tmp_path, parent, data_folder):
    parent = shutil.copytree(parent, tmp_path / "run" / "checkpoint")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"extension": {}, "tokens_sha256": ""}))
    with unchanged(tmp_path), pytest.raises(UserError, match="holds another run"):
        extend(tiny_extension(parent, data_folder), tmp_path / "run")


def test_what_lies_in_the_way_is_moved_aside_whole_where_asked(run, tmp_path, data_folder, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    before = snapshot(out)
    assert train(tiny_recipe(steps=2), out, data_folder=data_folder, replace=True) is not None
    (aside,) = tmp_path.glob("out.old-*")
    assert snapshot(aside) == before
    assert f"now in {aside}" in capsys.readouterr().out
    ours, theirs = (below(snapshot(folder), "tiny_stickbreaking") for folder in (out, run))
    assert ours["model.safetensors"] == theirs["model.safetensors"]
    trained = snapshot(tmp_path)
    assert train(tiny_recipe(steps=2), out, data_folder=data_folder, replace=True) is not None
    assert snapshot(tmp_path) == trained


def test_what_is_read_is_never_moved_aside(parent, data_folder):
    for write in (
        lambda: extend(tiny_extension(parent, data_folder), parent.parent, replace=True),
        lambda: convert_checkpoint(parent, parent, replace=True),
    ):
        with unchanged(parent.parent), pytest.raises(UserError, match="which this command reads or runs in"):
            write()


def test_a_conversion_moves_what_lies_there_aside_where_asked(parent, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with unchanged(tmp_path) as before, pytest.raises(UserError, match="--replace"):
        convert_checkpoint(parent, tmp_path / "out")
    convert_checkpoint(parent, tmp_path / "out", replace=True)
    (aside,) = tmp_path.glob("out.old-*")
    assert snapshot(aside) == below(before, "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_two_processes_never_train_in_one_folder(tmp_path, data_folder):
    refused = pytest.raises(UserError, match="Another process is writing to")
    with alone_in(tmp_path / "running.lock"), unchanged(tmp_path), refused:
        train(tiny_recipe(steps=2), tmp_path, data_folder=data_folder)
    assert train(tiny_recipe(steps=2), tmp_path, data_folder=data_folder) is not None


@pytest.mark.exhaustive
def test_a_disk_that_is_full_at_any_write_is_named_and_the_run_goes_on_from_there(run, tmp_path, data_folder):
    room, whole = 0, None
    while whole is None:
        found = None
        with room_for(room, tmp_path):
            try:
                whole = train(tiny_recipe(steps=2), tmp_path, data_folder=data_folder)
            except (OSError, UserError) as error:
                found = error
        assert whole or no_room(found)
        assert not list(tmp_path.glob("*.part*"))
        room += 3
    ours, theirs = (below(snapshot(folder), "tiny_stickbreaking") for folder in (tmp_path, run))
    assert ours["model.safetensors"] == theirs["model.safetensors"]


@pytest.mark.parametrize("name", ["recall.npy", "tokens.npy", "tokenizer"])
def test_arrays_that_changed_in_place_are_another_run_s(name, run, tmp_path, data_folder):
    arrays, words = shutil.copytree(data_folder, tmp_path / "data"), f"inputs.{name}"
    assert train(tiny_recipe(steps=2), run, data_folder=arrays) == run / "tiny_stickbreaking"
    if name == "tokenizer":
        (arrays / name / "tokenizer_config.json").write_text('{"split_special_tokens": true}')
        words += ": tokenizer_config.json"
    else:
        np.save(arrays / name, np.load(arrays / name)[::-1])
    with unchanged(run), pytest.raises(UserError, match=re.escape(f"holds another run (it differs in {words})")):
        train(tiny_recipe(steps=2), run, data_folder=arrays)


def test_a_parent_whose_configuration_changed_in_place_is_another_parent(tmp_path, data_folder):
    parent, out = tmp_path / "parent", tmp_path / "run"
    save_parent(parent, data_folder)
    extend(tiny_extension(parent, data_folder), out)
    with unchanged(out):
        assert extend(tiny_extension(parent, data_folder), out) == out / "checkpoint"
    config = json.loads((parent / "config.json").read_text())
    (parent / "config.json").write_text(json.dumps(config | {"norm_eps": 1e-4}))
    with unchanged(out), pytest.raises(UserError, match=r"holds another run \(it differs in inputs\.config\.json\)"):
        extend(tiny_extension(parent, data_folder), out)
