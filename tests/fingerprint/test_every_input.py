"""A change of anything that a number depends on is named, and nothing else makes a number anew."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from sqlitedict import SqliteDict
from sweep_inputs import sweep_over, write_inputs

from sbeval.errors import UserError
from sbeval.fingerprint import parts
from sbeval.fingerprint.evaluation import run_inputs
from sbeval.fingerprint.tasks import data_sha256
from sbeval.model_adapters.record import model_parts, stamp
from sbeval.sweep.definition import plan
from sbeval.sweep.execute import run_sweep

Change = Callable[[Path], None]


def put(name: str, text: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return change


def edit(name: str, before: str, after: str) -> Change:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert before in text
        (folder / name).write_text(text.replace(before, after))

    return change


def one_byte(name: str) -> Change:
    """Changes one byte in the middle of a file, whose size and time stay."""

    def change(folder: Path) -> None:
        file = folder / name
        stat, raw = file.stat(), bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert file.stat().st_mtime_ns == stat.st_mtime_ns

    return change


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def rename(name: str, other: str) -> Change:
    return lambda folder: (folder / name).rename(folder / other) and None


CONFIG, INDEX = "ckpt/config.json", "ckpt/model.safetensors.index.json"
OF_THE_MODEL: dict[str, tuple[Change, str]] = {
    "weights, size and time kept": (one_byte("ckpt/model-1.safetensors"), "weights changed"),
    "a shard below the folder, size and time kept": (one_byte("ckpt/parts/model-2.safetensors"), "weights changed"),
    "an index of other shards": (edit(INDEX, "model-1.safetensors", "another.safetensors"), "index.json changed"),
    "a key of the configuration": (edit(CONFIG, "10000.0", "20000.0"), "config.json changed"),
    "code of another repository": (put("hub/models--someone--code/refs/main", "d" * 40), "code: revision changed"),
    "repetition_penalty": (edit("ckpt/generation_config.json", "1.0", "1.2"), "generation_config.json changed"),
    "no generation configuration": (remove("ckpt/generation_config.json"), "generation_config.json is gone"),
    "merges": (edit("ckpt/tokenizer.json", '["a", "b"]', '["b", "a"]'), "tokenizer.json changed"),
    "split_special_tokens": (
        edit("ckpt/tokenizer_config.json", '"split_special_tokens": false', '"split_special_tokens": true'),
        "tokenizer_config.json changed",
    ),
    "added tokens": (put("ckpt/added_tokens.json", '{"<x>": 9}'), "added_tokens.json is new"),
    "the checkpoint's own code": (edit("ckpt/modeling_own.py", "1", "2"), "modeling_own.py changed"),
    "code that its code imports": (edit("ckpt/layers/norm.py", "1", "2"), "layers/norm.py changed"),
    "an adapter's weights": (one_byte("adapter/adapter_model.safetensors"), "peft: weights changed"),
    "an adapter's configuration": (edit("adapter/adapter_config.json", "2", "3"), "peft: adapter_config.json changed"),
    "delta weights on the hub": (put("hub/models--someone--delta/refs/main", "e" * 40), "delta: revision changed"),
    "another tokenizer's merges": (edit("tokenizer/tokenizer.json", '"c"', '"e"'), "tokenizer: tokenizer.json changed"),
}
OF_THE_TASKS: dict[str, tuple[Change, str]] = {
    "a text, size and time kept": (one_byte("texts/a.txt"), "metadata.data_path changed"),
    "lines": (put("texts/b.jsonl", '{"text": "anothes"}\n'), "metadata.data_path changed"),
    "a further text": (put("texts/d/e.txt", "more"), "metadata.data_path changed"),
    "a text renamed": (rename("texts/a.txt", "texts/z.txt"), "metadata.data_path changed"),
    "the evaluator's weights": (one_byte("evaluator/model.safetensors"), "longppl_evaluator: weights changed"),
    "the evaluator's configuration": (edit("evaluator/config.json", "llama", "gemma"), "evaluator: config.json"),
    "a task": (edit("tasks/own.yaml", "[mine]", "[yours]"), "own.yaml changed"),
    "what a task includes": (put("tasks/base.yaml", "output_type: loglikelihood\n"), "base.yaml changed"),
    "a task's code": (edit("tasks/utils.py", "'text'", "'texx'"), "utils.py changed"),
    "the data a task names": (put("own.jsonl", '{"text": "two"}\n'), "own.jsonl changed"),
    "a group of the task's name": (put("tasks/group.yaml", "group: t\ntask: [other]\n"), "group.yaml is new"),
    "a task that a pattern matches": (put("matched/some.yaml", "task: matched\ntag: x\n"), "some.yaml changed"),
    "a further file that it matches": (put("matched/more.yaml", "task: more\n"), "more.yaml is new"),
    "a task behind a comma": (put("comma/two.yaml", "task: two\ntag: x\n"), "two.yaml changed"),
    "a task in a folder that is named": (put("given/three.yaml", "task: three\ntag: x\n"), "three.yaml changed"),
    "data of the hub": (put("hub/datasets--someone--questions/refs/main", "f" * 40), "questions revision changed"),
}
SETTINGS: dict[str, tuple[Any, str]] = {
    "limit": (3, "limit was not set and is 3"),
    "device": ("cpu", 'device was not set and is "cpu"'),
    "model_args": ({"rope_scaling": "linear:2"}, 'model_args.rope_scaling was not set and is "linear:2"'),
    "metadata": ({"stride": 512}, "metadata.stride was not set and is 512"),
    "run.num_fewshot": (2, "num_fewshot was not set and is 2"),
    "run.context_lengths": ((64,), "metadata.context_lengths was [64, 128] and is [64]"),
    "run.tasks": (("t", "u"), '"given"] and is ["t", "u"]'),
    "metadata.seed": (2, "metadata.seed was 1 and is 2"),
    "metadata.dataset": ("someone/answers", 'metadata.dataset was "someone/questions" and is "someone/answers"'),
    "metadata.t": ({"stride": 512}, 'metadata.t was not set and is {"stride": 512}'),
    "model.dtype": ("bfloat16", 'model_args.dtype was "float32" and is "bfloat16"'),
    "model.skip_threshold": (1e-3, "model_args.skip_threshold was not set and is 0.001"),
    "model.trust_remote_code": (True, "model_args.trust_remote_code was not set and is true"),
    "model.delta": ("someone/else", 'model_args.delta was "someone/delta" and is "someone/else"'),
    "model.revision": ("v2", 'model_args.revision was not set and is "v2"'),
    "checkpoint.model": ("hf", 'model was "sb" and is "hf"'),
    "checkpoint.pretrained": ("someone/other", 'model_args.pretrained was "a local file or folder" and is "someone/ot'),
}


def test_a_file_of_factors_counts_by_its_content(tmp_path):
    def inputs() -> Any:
        return run_inputs({"model_args": {"extrapolation": f"longrope:{tmp_path / 'factors.json'}"}})

    (tmp_path / "factors.json").write_text('{"factor": 4, "long_factor": [1.0, 2.0]}')
    before = inputs()
    assert str(tmp_path) not in str(before)
    (tmp_path / "factors.json").write_text('{"factor": 4, "long_factor": [1.0, 3.0]}')
    assert parts.changes(before.parts, inputs().parts) == "extrapolation changed"


# the YAML of a task in the folder tasks, and a file
READ = {
    "a file beside its code": ("task: t", "tasks/prompts.json"),
    "a file below them": ("task: t", "tasks/rows/test.txt"),
    "a YAML file and a page that the code names": ("task: t", "tasks/shots.yaml", "tasks/shots.md"),
    "a bare name of a folder": ("task: t\ndataset_path: mine", "mine/rows.jsonl"),
    "a URL of a file": ("task: t\ndataset_kwargs: {{data_files: {{test: 'file://{here}/u.json'}}}}", "u.json"),
    "what lies in an archive": ("task: t\ndataset_kwargs: {{data_files: 'zip://a.csv::a.zip'}}", "a.zip"),
    "an include of a group's own task": ("group: t\ntask: [{{task: x, include: ../base}}]", "base"),
    "rows of a group's own task": ("group: t\ntask: [{{task: x, dataset_path: mine}}]", "mine/rows.jsonl"),
    "a file in its metadata": ("task: t\nmetadata: {{shots: shots.txt, data_path: texts}}", "shots.txt"),
    "a folder in its metadata": ("task: t\nmetadata: {{data_path: texts}}", "texts/__pycache__/a.txt"),
    "a folder that a link leads to": ("task: t", "far/rows.bin"),
    "a folder of a tracker's name that the code names": ("task: t", "tasks/mlruns/rows.bin"),
    "code below a YAML that has none": ("include: ../alone/code\ntask: t", "alone/deep/utils.py", "alone/rows.bin"),
    "a folder of a builder's name elsewhere": ("task: t\ndataset_path: ./json", "json/rows.jsonl"),
    "a file of one name elsewhere": ("task: t\nmetadata: {{shots: both.txt}}", "tasks/both.txt", "both.txt"),
}
UNREAD = {
    "other tasks and sweeps": ("task: t", "tasks/other.yaml", "tasks/sweep.yml"),
    "compiled code and pages": ("task: t", "tasks/__pycache__/utils.cpython-311.pyc", "tasks/LICENSE"),
    "what lies beside a YAML alone": ("include: ../alone/code\ntask: t", "alone/rows.bin"),
    "others' results": ("task: t", "tasks/results/results_1.json", "tasks/results/samples.bin"),
    "another run without results": ("task: t", "tasks/r/inputs.json", "tasks/r/run.yaml", "tasks/r/log.bin"),
    "a checkpoint": ("task: t", "tasks/trained/config.json", "tasks/trained/deep/model.bin"),
    "an environment": ("task: t", "tasks/environment/pyvenv.cfg", "tasks/environment/lib/some.py"),
    "a page": ("task: t", "tasks/page/summary.md", "tasks/page/index.html", "tasks/page/rows.bin"),
    "logs": ("task: t", "tasks/slurm-1.out", "tasks/wandb/run/a", "tasks/responses_rank0.db", "tasks/results_1.json"),
    "endings that the code holds within words": ("task: t", "tasks/train.log", "tasks/shots.pdf"),
    "a folder of a builder's name": ("task: t\ndataset_path: json", "json/rows.jsonl"),
    "where its data are kept": ("task: t\ndataset_kwargs: {{cache_dir: kept/}}", "kept/rows.arrow"),
    "where data are kept beside its code": ("task: t\ndataset_kwargs: {{cache_dir: tasks/kept}}", "tasks/kept/rows"),
    "compiled code among its data": ("task: t\ndata_dir: tasks", "tasks/__pycache__/utils.cpython-311.pyc"),
    "the run's own output among its data": ("task: t\ndata_dir: ./tasks/../tasks", "tasks/out/one/x.jsonl"),
    "folders that words, slashes and dots are called": ("task: t\nmetadata: [words, /, ./]", "words/a.txt", "a.txt"),
}


@pytest.mark.parametrize("case", [*READ, *UNREAD])
def test_every_file_that_a_task_may_read_counts(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, *files = (READ | UNREAD)[case]
    put("tasks/t.yaml", text.format(here=tmp_path))(tmp_path)
    put("tasks/utils.py", "READS = ['shots.yaml', '.md', 'mlruns/rows']\nmath.log(shots.pdfs)\n")(tmp_path)
    put("alone/code", "doc_to_text: !function deep.utils.text")(tmp_path)
    (tmp_path / "tasks/linked").symlink_to("../far")
    (tmp_path / "tasks/above").symlink_to("..")
    (tmp_path / "tasks/memory").symlink_to("/proc/self/mem")
    config = {"tasks": ["t"], "include_path": "tasks", "output_path": "tasks/out" if "output" in case else "out"}
    for name in ("both.txt", *files):
        put(name, "task: other\n" if name == "tasks/other.yaml" else "before")(tmp_path)
    for name in files:
        before = run_inputs(config).parts
        put(name, "task: other\ntag: x\n" if name == "tasks/other.yaml" else "after")(tmp_path)
        changed = parts.changes(before, run_inputs(config).parts)
        assert (changed is not None and changed.endswith(" changed")) == (case in READ), changed


@pytest.mark.parametrize("place", ["here", "output", "model"])
def test_in_a_folder_where_a_run_writes_a_task_reads_the_files_its_code_names(place, tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / ("" if place == "here" else "cwd"))
    put("utils.py", "READS = '.json'\n")(tmp_path)
    put("t.yaml", "task: t")(tmp_path)
    (tmp_path / "ckpt").mkdir()
    config: dict[str, Any] = {"tasks": ["t"], "include_path": str(tmp_path)}
    config |= {"output": {"output_path": str(tmp_path / "results/a")}}.get(place, {})
    config |= {"model": {"model_args": {"pretrained": str(tmp_path / "ckpt")}}}.get(place, {})
    counted = {name: f"{name} is new" for name in ("prompts.json", "data/deep/prompts.json")}
    for name in (*counted, "out.txt", "data/out.txt", "sweep.yaml"):
        before = run_inputs(config).parts
        put(name, "a: b")(tmp_path)
        put(f"results/a/{'more' if place == 'output' else 'results_1'}.json", name)(tmp_path)
        put(f"ckpt/deep/{'more' if place == 'model' else 'config'}.json", name)(tmp_path)
        assert parts.changes(before, run_inputs(config).parts) == counted.get(name)


def test_a_link_that_leads_to_another_folder_of_the_data_changes_them(tmp_path):
    for name in ("one/rows", "two/rows", "one/zero/rows"):
        put(name, name)(tmp_path)
    hashes = set()
    for target in ("one", "two", ".", "one/zero"):
        (tmp_path / "used").unlink(missing_ok=True)
        (tmp_path / "used").symlink_to(target)
        hashes.add(data_sha256(str(tmp_path)))
    assert len(hashes) == 4


def test_code_compiled_among_its_task_s_data_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    put("t.yaml", f"task: t\ndata_dir: {tmp_path}\ndoc_to_text: !function utils.f")(tmp_path)
    put("utils.py", "def f(doc): pass\n")(tmp_path)
    before = run_inputs({"tasks": ["t"], "include_path": str(tmp_path)})
    subprocess.run([sys.executable, "-c", "import utils"], cwd=tmp_path, check=True)
    assert list(tmp_path.rglob("*.pyc"))
    assert run_inputs({"tasks": ["t"], "include_path": str(tmp_path)}) == before


def said(folder: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    capsys.readouterr()
    run_sweep(sweep_over(folder, **changes), dry_run=True)
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with inputs and the complete results of a sweep over them."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        patch.chdir(folder)
        write_inputs(folder)
        assert run_sweep(sweep_over(folder)) == []
    return folder


@pytest.fixture
def inputs(made, tmp_path, monkeypatch) -> Path:
    """A copy of that folder at another place."""
    folder = Path(shutil.copytree(made, tmp_path / "elsewhere"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.chdir(folder)
    return folder


def adapter_settings(folder: Path) -> dict[str, Any]:
    """What the response cache is stamped with for the sweep's model, as far as it lies in files."""
    (planned,) = plan(sweep_over(folder))
    arguments = planned.config["model_args"]
    return {"inputs": model_parts(arguments["pretrained"], arguments, model=None, tokenizer=None)}


@pytest.mark.parametrize("change", [*OF_THE_MODEL, *OF_THE_TASKS, *SETTINGS])
def test_a_change_is_named_by_a_sweep_and_one_of_the_model_by_the_response_cache(change, inputs, capsys):
    database = SqliteDict(":memory:", autocommit=True)
    for _ in range(2 if change in OF_THE_MODEL else 0):
        stamp(database, adapter_settings(inputs))
    made, words = (OF_THE_MODEL | OF_THE_TASKS | SETTINGS)[change]
    if change not in SETTINGS:
        made(inputs)
    printed = said(inputs, capsys, **({change: made} if change in SETTINGS else {}))
    assert "one/r: not run: its folder holds results of other settings (" in printed
    assert words in printed
    if change in OF_THE_MODEL:
        with pytest.raises(UserError, match="Expected a response cache made with this run's settings") as raised:
            stamp(database, adapter_settings(inputs))
        assert words in str(raised.value)


@pytest.mark.parametrize("package", ["sbeval", "lm_eval", "transformers", "tokenizers", "torch"])
def test_another_version_is_named_by_a_sweep(package, inputs, capsys, monkeypatch):
    version = parts.installed_version
    monkeypatch.setattr(parts, "installed_version", lambda name: "0.0.7" if name == package else version(name))
    assert f"{package} was {version(package)} and is 0.0.7" in said(inputs, capsys)


UNCHANGED: dict[str, Change] = {
    "nothing": lambda folder: None,
    "times": lambda folder: [os.utime(file) for file in folder.rglob("*") if file.is_file()] and None,
    "what people write beside a model": put("ckpt/README.md", "more about it"),
    "what training leaves beside a model": put("ckpt/training_record.json", '{"seconds": 1}'),
    "logs": put("ckpt/logs/events.out", "y"),
    "a folder called as a split": put("test/rows.jsonl", "{}"),
    "hidden files": put("texts/.cache", "y"),
    "a task that does not run": put("tasks/others/other.yaml", "task: other\ntag: [some]\n"),
    "what lies in a folder to keep things in": put("hub/some.lock", ""),
    "a group of other tasks": put("tasks/group.yaml", "group: g\ntask: [other]\n"),
    "compiled code": put("tasks/__pycache__/utils.pyc", "y"),
    "another data set of the hub": put("hub/datasets--someone--answers/refs/main", "0" * 40),
    "the same bytes written anew": lambda folder: put("own.jsonl", (folder / "own.jsonl").read_text())(folder),
}


@pytest.mark.parametrize("change", UNCHANGED)
def test_what_no_number_rests_on_makes_none_anew(change, inputs, capsys):
    database = SqliteDict(":memory:", autocommit=True)
    stamp(database, adapter_settings(inputs))
    UNCHANGED[change](inputs)
    assert "one/r: complete" in said(inputs, capsys)
    stamp(database, adapter_settings(inputs))


def test_checkpoint_and_text_under_other_names_are_the_same(inputs, capsys):
    for name, other in (("ckpt", "trained"), ("texts", "corpus"), ("adapter", "lora"), ("tasks", "mine")):
        (inputs / name).rename(inputs / other)
    changes = {"checkpoint.pretrained": str(inputs / "trained"), "metadata.data_path": "corpus", "model.peft": "lora"}
    (inputs / "mine").rename(inputs / "tasks")
    assert "one/r: complete" in said(inputs, capsys, **changes)


def test_what_changes_in_a_run_fails_it_and_its_results_stay(inputs, capsys):
    shutil.rmtree(inputs / "results")
    launcher = inputs / "launcher.py"
    launcher.write_text(
        "import runpy, sys\n"
        f"open({str(inputs / CONFIG)!r}, 'a').write(' ')\n"
        f"runpy.run_path({sweep_over(inputs).launcher[1]!r}, run_name='__main__')\n"
    )
    python, _, behaviour = sweep_over(inputs).launcher
    (failure,) = run_sweep(sweep_over(inputs).changed(launcher=(python, str(launcher), behaviour)))
    assert failure.reason == "it ended with exit code 0, but its inputs changed while it ran (config.json changed)"
    assert len(list((inputs / "results").rglob("results_*.json"))) == 1
    assert "not run: its folder holds results of other settings (config.json changed)" in said(inputs, capsys)


def test_what_changes_after_the_last_look_is_named_by_the_next_sweep(inputs, capsys, monkeypatch):
    shutil.rmtree(inputs / "results")

    def look_and_change(config: Any) -> Any:
        found = run_inputs(config)
        if any((inputs / "results").rglob("results_*.json")):
            (inputs / CONFIG).write_text(f"{(inputs / CONFIG).read_text()} ")
        return found

    with monkeypatch.context() as patch:
        patch.setattr("sbeval.sweep.results.run_inputs", look_and_change)
        assert run_sweep(sweep_over(inputs)) == []
    assert "not run: its folder holds results of other settings (config.json changed)" in said(inputs, capsys)


def test_results_of_an_earlier_version_are_named_and_stay(inputs, capsys):
    (inputs / "results/one/r/inputs.json").rename(inputs / "results/one/r/weights.json")
    before = sorted((inputs / "results").rglob("*"))
    assert "without a record of their inputs (inputs.json)" in said(inputs, capsys)
    (failure,) = run_sweep(sweep_over(inputs))
    assert "--replace" in failure.reason
    assert sorted((inputs / "results").rglob("*")) == before


def test_an_input_that_cannot_be_read_is_one_sentence(inputs, capsys):
    if os.geteuid() == 0:
        (inputs / "ckpt/tokenizer.model").unlink()
        (inputs / "ckpt/tokenizer.model").symlink_to("/proc/self/mem")
    else:
        (inputs / "ckpt/tokenizer.model").chmod(0)
    assert "which the run depends on, cannot be read" in said(inputs, capsys)


def test_a_hub_model_is_complete_also_without_its_revision(inputs, capsys):
    settings = {"checkpoint.pretrained": "someone/new", "checkpoint.label": "new"}
    assert run_sweep(sweep_over(inputs, **settings)) == []
    put("hub/models--someone--new/refs/main", "1" * 40)(inputs)
    assert "new/r: complete" in said(inputs, capsys, **settings)


def test_a_model_given_as_an_object_is_known_by_every_value(inputs):
    import torch

    from sbeval.model_adapters.record import _tensors_sha256

    model = torch.nn.Linear(100, 100, dtype=torch.bfloat16)
    before = _tensors_sha256(model)
    with torch.no_grad():
        model.weight[99, 99] += 1
    assert _tensors_sha256(model) != before


def test_a_file_whose_name_is_no_text_is_named_and_printed(inputs, capsys):
    Path(os.fsdecode(os.fsencode(inputs) + b"/ckpt/tok\xff.model")).write_bytes(b"1")
    assert "tok\\udcff.model is new" in said(inputs, capsys)
    Path(os.fsdecode(os.fsencode(inputs) + b"/ckpt/w\xff.bin")).write_bytes(b"1")
    assert "weights changed" in said(inputs, capsys)


def test_the_record_is_readable(made):
    record = json.loads((made / "results/one/r/inputs.json").read_text())
    assert {"weights", "peft: weights", "metadata.data_path", "own.yaml", "torch"} <= record["parts"].keys()
    assert str(made) not in json.dumps(record)
