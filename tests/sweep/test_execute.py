"""A sweep goes on after a failed run, skips what is complete, and never takes a part for the whole."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fresh_process import run
from sweep_inputs import TINY_TASK, stub_command, wait_for
from sweep_inputs import stub_sweep as sweep

from sbeval.reports import build_report
from sbeval.sweep.definition import plan
from sbeval.sweep.execute import run_sweep
from sbeval.sweep.results import what_is_missing


def started(folder: Path) -> int:
    return len((folder / "started.txt").read_text(encoding="utf-8").splitlines())


def test_a_failed_run_is_named_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures = run_sweep(sweep(tmp_path, "one", "broken", "two"))
    assert [str(failure.run) for failure in failures] == ["broken/t"]
    assert failures[0].reason == "exit code 3: CUDAError: out of memory on device 0"
    printed = capsys.readouterr().out
    assert "[3/3] two/t" in printed
    assert printed.splitlines()[-1] == f"Next: sbeval report {tmp_path}"
    assert "3 runs: 2 done, 0 complete before, 1 failed" in printed
    assert f"broken/t: exit code 3: CUDAError: out of memory on device 0 (log: {tmp_path}/broken/t/log.txt)" in printed


def test_complete_runs_are_skipped_and_failed_ones_retried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_sweep(sweep(tmp_path, "one", "broken"))
    capsys.readouterr()
    run_sweep(sweep(tmp_path, "one", "broken"))
    assert started(tmp_path) == 3
    assert "[1/2] one/t: complete" in capsys.readouterr().out


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_sweep(sweep(tmp_path), dry_run=True) == []
    assert not list(tmp_path.iterdir())
    printed = capsys.readouterr().out
    assert "1 to run" in printed
    assert printed.splitlines()[-1] == "Next: the same without --dry-run"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"behaviour": "kill"}, "ended by SIGKILL"), ({"launcher": ("/nowhere/launcher",)}, "/nowhere/launcher")],
)
def test_a_run_that_is_killed_or_cannot_start_is_named(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (failure,) = run_sweep(sweep(tmp_path, **changes))
    assert reason in failure.reason


@pytest.mark.exhaustive
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_sweep_that_is_ended_ends_its_run_and_the_runs_own_workers(tmp_path: Path, ending: signal.Signals) -> None:
    command = stub_command(tmp_path, "one", "two", behaviour="hang")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:
        wait_for(tmp_path / "out" / "hanging.txt")
        process.send_signal(ending)
        printed, _ = process.communicate(timeout=600)
    with (tmp_path / "out" / "held.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while a process of the run is left
    assert process.returncode == 128 + ending
    assert "Traceback" not in printed
    assert printed.splitlines()[-1] == f"Ended by {ending.name}; the same command can be run again."
    assert started(tmp_path / "out") == 1
    assert run_sweep(sweep(tmp_path / "out")) == []


def test_a_run_that_ends_well_without_its_samples_has_failed(tmp_path: Path) -> None:
    (failure,) = run_sweep(sweep(tmp_path, behaviour="cut"))
    assert "1 of 2 documents" in failure.reason
    assert run_sweep(sweep(tmp_path)) == []
    assert len(list((tmp_path / "one" / "t").rglob("results_*.json"))) == 1


def test_results_of_other_settings_are_kept_unless_replaced(tmp_path: Path) -> None:
    run_sweep(sweep(tmp_path))
    (failure,) = run_sweep(sweep(tmp_path, limit=3))
    assert "limit was not set and is 3" in failure.reason
    assert started(tmp_path) == 1
    assert run_sweep(sweep(tmp_path, limit=3), replace=True) == []
    assert started(tmp_path) == 2
    assert len(list((tmp_path / "one" / "t").rglob("results_*.json"))) == 1


def test_other_settings_do_not_stand_in_the_way_of_a_run_that_failed(tmp_path: Path) -> None:
    run_sweep(sweep(tmp_path, behaviour="fail"))
    assert run_sweep(sweep(tmp_path, limit=3)) == []


@pytest.mark.parametrize(
    ("what", "content", "message"),
    [
        ("samples", None, "samples file of t is missing"),
        ("samples", '{"doc_id": 0}\n{"doc_id": 1', "cut off"),
        ("samples", '{"doc_id": 0}\n{"doc_id": 1}', "cut off"),
        ("samples", '{"doc_id": 0}\n{"doc_id": 0}\n', "1 of 2"),
        ("results", None, "no results file"),
        ("results", '{"configs": {"t"', "is incomplete"),
        ("results", '{"configs": {}, "n-samples": {}}', "no task"),
    ],
)
def test_a_part_is_not_the_whole(what: str, content: str | None, message: str, tmp_path: Path) -> None:
    settings = sweep(tmp_path)
    run_sweep(settings)
    (planned,) = plan(settings)
    assert what_is_missing(planned) is None
    (file,) = planned.folder.rglob(f"{what}_*")
    file.unlink() if content is None else file.write_text(content, encoding="utf-8")
    assert message in str(what_is_missing(planned))


DAMAGE = (
    *("[" * 100_000, "[" * 5000, '{"a":' * 5000, "", "\0", "null", "[]", "{}", '{"doc_id": []}\n', None),
    *('{"configs": {"t": {}}, "n-samples": []}', '{"configs": {"t": {}}, "n-samples": {"t": null}}'),
    *('{"configs": null, "n-samples": {}}', '{"configs": {"t/\\ud800": {}}, "n-samples": {}}'),
    '{"settings": {"\\ud800": 1}, "parts": {}}',
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["results_", "samples_", "inputs.json", "run.yaml", "log.txt"])
def test_a_damaged_file_of_a_run_ends_no_other(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_sweep(sweep(tmp_path))
    (file,) = (tmp_path / "one").rglob(f"{name}*")
    for content in DAMAGE:
        file.unlink()
        if content is None:
            os.mkfifo(file)
        else:
            file.write_text(content, encoding="utf-8")
        capsys.readouterr()
        run_sweep(sweep(tmp_path, "one", "two"), dry_run=True)
        printed = capsys.readouterr().out
        printed.encode()
        assert "[2/2] two/t: to run" in printed
        assert "one/t: complete" not in printed or name in ("run.yaml", "log.txt")
    assert run_sweep(sweep(tmp_path, "one", "two"), replace=True) == []


def test_a_log_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    run_sweep(sweep(tmp_path, behaviour="fail"))
    (tmp_path / "one/t/log.txt").unlink()
    os.mkfifo(tmp_path / "one/t/log.txt")
    (failure,) = run_sweep(sweep(tmp_path))
    assert "not a regular file" in failure.reason


def write_tiny_task(folder: Path) -> Path:
    (folder / "data.jsonl").write_text(json.dumps({"question": "q"}) + "\n")
    (folder / "tasks").mkdir()
    (folder / "tasks" / "tiny.yaml").write_text(TINY_TASK.format(data=folder / "data.jsonl"))
    return folder / "tasks"


def sweep_command(folder: Path, **settings: Any) -> list[str | Path]:
    settings = {"output": str(folder / "out"), "runs": [{"name": "tiny", "tasks": ["tiny"]}], **settings}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(settings))
    return [Path(sys.executable).with_name("sbeval"), "sweep", folder / "sweep.yaml"]


BLOCKED_RUNS: dict[str, dict[str, Any]] = {
    "There is no task 'sb_wikitex'": {"tasks": ["sb_wikitex"]},
    "nothing there": {"tasks": ["sb_text"], "metadata": {"data_path": "no.txt"}},
    "Expected a text to read": {"tasks": ["sb_text_stream"]},
    "Expected context_lengths": {"tasks": ["sb_stdlib"], "metadata": {"context_lengths": "4k"}},
    "expected context_lengths in": {"tasks": ["sb_stdlib_stream"], "metadata": {"context_length": [512]}},
    "dtype to be auto": {"tasks": ["sb_stdlib"], "model_args": {"dtype": "bf16"}},
}
BLOCKED_CHECKPOINTS = {
    "./none": r"a checkpoint at \./none, found no such folder",
    "someone/missing": "someone/missing, found no such folder, and the hub's cache has no such model",
    "empty": "The checkpoint empty has no config.json",
}


@pytest.mark.exhaustive
def test_a_dry_run_names_each_run_that_cannot_start_and_starts_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "fine").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "fine" / name).write_text("{}")
    runs = [{"name": "good", "tasks": ["sb_stdlib"]}]
    runs += [{"name": f"r{number}", **settings} for number, settings in enumerate(BLOCKED_RUNS.values())]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    for checkpoints, words in (
        (["fine"], ["good: to run", *(f"r{place}: not run: .*{said}" for place, said in enumerate(BLOCKED_RUNS))]),
        ([*BLOCKED_CHECKPOINTS], [f"good: not run: .*{said}" for said in BLOCKED_CHECKPOINTS.values()]),
    ):
        command = sweep_command(tmp_path, checkpoints=checkpoints, runs=runs if checkpoints == ["fine"] else runs[:1])
        process = run([*command, "--dry-run"], environment=offline, folder=tmp_path)
        assert "Next:" not in process.stdout
        assert process.returncode == 1
        for line, said in zip(process.stdout.splitlines(), words, strict=False):
            assert re.search(said, line)
        to_run = checkpoints.count("fine")
        assert f"{len(words)} runs: {to_run} to run, 0 complete, {len(words) - to_run} blocked" in process.stdout
    command = sweep_command(tmp_path, checkpoints=["fine"], runs=runs[:1])
    process = run([*command, "--dry-run"], environment=offline, folder=tmp_path)
    assert (process.returncode, "1 run: 1 to run" in process.stdout) == (0, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
def test_a_suite_offline_advises_an_option_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "fine").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "fine" / name).write_text("{}")
    (tmp_path / "essays.txt").write_text("Words of an essay. " * 100)
    sbeval = Path(sys.executable).with_name("sbeval")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "SBEVAL_CACHE": str(tmp_path / "kept")}
    command = [sbeval, "sweep", "--suite", "paper-ruler", "fine", "--dry-run"]
    refused = run(command, environment=offline, folder=tmp_path)
    assert "--metadata" in refused.stdout
    given = json.dumps({"essays": "essays.txt"})
    answered = run([*command, "--metadata", given], environment=offline, folder=tmp_path)
    assert "essays" not in answered.stdout.partition("not run:")[2].partition("squad")[0]
    assert answered.stdout != refused.stdout


@pytest.mark.exhaustive
def test_a_real_sweep_of_lm_eval_ends_with_one_results_file_each_whose_label_reaches_the_report(tmp_path: Path) -> None:
    tasks, dummy = write_tiny_task(tmp_path), {"pretrained": "a", "model": "dummy", "label": "my own name"}
    command = sweep_command(tmp_path, include_path=str(tasks), checkpoints=[dummy])
    process = run(command, environment={"HF_HOME": str(tmp_path / "cache")}, folder=tmp_path)
    assert process.returncode == 0, process.stdout
    assert "1 run: 1 done" in process.stdout
    (results_file,) = (tmp_path / "out").rglob("results_*.json")
    folder = tmp_path / "out" / "my_own_name" / "tiny"
    assert results_file.is_relative_to(folder)
    assert "tiny" in json.loads(results_file.read_text())["results"]
    assert len(list(folder.rglob("samples_tiny_*.jsonl"))) == 1
    assert f"Next: sbeval report {folder}\n" in (folder / "log.txt").read_text()
    build_report([tmp_path / "out"], tmp_path / "report")
    assert "my own name" in (tmp_path / "report" / "results.csv").read_text()
    settings = json.loads((folder / "inputs.json").read_text())["settings"]
    assert "metadata.label" not in settings, "no number depends on it"
    dry = run([*command, "--dry-run"], folder=tmp_path)
    assert "my_own_name/tiny: complete" in dry.stdout
    (tmp_path / "data.jsonl").write_text(json.dumps({"question": "r"}) + "\n")
    dry = run([*command, "--dry-run"], folder=tmp_path)
    other = f"my_own_name/tiny: not run: its folder holds results of other settings ({tmp_path}/data.jsonl changed)"
    assert other in dry.stdout
