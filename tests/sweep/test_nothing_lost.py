"""A sweep deletes and overwrites only its own files: every folder is compared before and after."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sweep_launcher
from folders import below, room_for, snapshot
from sweep_inputs import stub_sweep as sweep

from sbeval.errors import UserError
from sbeval.reports.read.files import Notes, find_result_files
from sbeval.sweep.definition import SweepCheckpoint, SweepRun
from sbeval.sweep.execute import run_sweep


def set_aside_runs(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "one").iterdir() if ".old-" in path.name)


def of_other_settings_without_samples(folder: Path) -> None:
    run_sweep(sweep(folder, limit=3))
    (samples,) = folder.rglob("samples_*.jsonl")
    samples.unlink()


def of_two_runs(folder: Path) -> None:
    run_sweep(sweep(folder))
    (results,) = folder.rglob("results_*.json")
    results.with_name("results_2025-09-09T09-09-09.000001.json").write_bytes(results.read_bytes())


def with_files(behaviour: str, files: dict[str, str]) -> Callable[[Path], None]:
    """A user's files, and those that a run with this behaviour left, if there was one."""

    def leave(folder: Path) -> None:
        if behaviour:
            run_sweep(sweep(folder, behaviour=behaviour))
        (folder / "one" / "t").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / "one" / "t" / name).write_text(text)

    return leave


FOR_LM_EVAL = {"model": "hf", "model_args": {}, "tasks": ["t"], "output_path": "elsewhere", "log_samples": True}
LEFT = {
    "results of other settings (limit was 3 and is not set)": of_other_settings_without_samples,
    "results of several runs (model/results_2025-": of_two_runs,
    "model/samples_t_2025-01-02T03-04-05.678901.jsonl without a sweep's record (run.yaml)": lambda folder: (
        sweep_launcher.write_results(folder / "one" / "t")
    ),
    "without a record of their inputs (inputs.json)": with_files("cut", {"inputs.json": "[["}),
    "notes.md, which no sweep wrote": with_files("fail", {"notes.md": "mine"}),
    "run.yaml without a sweep's record": with_files("", {"run.yaml": "mine: true"}),
    "log.txt, run.yaml without a sweep's record (inputs.json)": with_files(
        "", {"run.yaml": json.dumps(FOR_LM_EVAL), "log.txt": "mine"}
    ),
}


@pytest.mark.parametrize("words", LEFT)
def test_what_a_sweep_did_not_leave_is_named_and_stays(words: str, tmp_path: Path) -> None:
    LEFT[words](tmp_path)
    before = snapshot(tmp_path)
    for dry_run in (True, False):
        (failure,) = run_sweep(sweep(tmp_path, behaviour="fail"), dry_run=dry_run)
        assert words in failure.reason
        assert "--replace" in failure.reason
        assert snapshot(tmp_path) == before


@pytest.mark.parametrize("behaviour", ["write", "fail"])
@pytest.mark.parametrize("words", LEFT)
def test_what_is_replaced_is_moved_aside_whole(
    words: str, behaviour: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LEFT[words](tmp_path)
    before = below(snapshot(tmp_path), "one/t")
    assert bool(run_sweep(sweep(tmp_path, behaviour=behaviour), replace=True)) == (behaviour == "fail")
    (aside,) = set_aside_runs(tmp_path)
    assert snapshot(aside) == before
    assert f"what was there is now in {aside}" in capsys.readouterr().out


def test_a_run_cut_off_is_moved_aside_and_run_anew_and_attempts_without_results_leave_no_folder(tmp_path: Path) -> None:
    run_sweep(sweep(tmp_path, behaviour="cut"))
    before = below(snapshot(tmp_path), "one/t")
    for _ in range(2):
        assert run_sweep(sweep(tmp_path, behaviour="fail"))
    (aside,) = set_aside_runs(tmp_path)
    assert snapshot(aside) == before
    assert run_sweep(sweep(tmp_path)) == []
    assert set_aside_runs(tmp_path) == [aside]
    complete = snapshot(tmp_path)
    assert run_sweep(sweep(tmp_path), replace=True) == []
    assert snapshot(tmp_path) == complete


def test_a_run_killed_before_its_record_was_whole_goes_on(tmp_path: Path) -> None:
    (tmp_path / "one" / "t").mkdir(parents=True)
    (tmp_path / "one" / "t" / "run.yaml.0123456789ab.part").write_text("model: s")
    run_sweep(sweep(tmp_path, behaviour="fail"))
    for name in ("inputs.json", "log.txt"):
        (tmp_path / "one" / "t" / name).unlink()
    assert run_sweep(sweep(tmp_path, behaviour="fail"))[0].reason.startswith("exit code 3")
    assert run_sweep(sweep(tmp_path)) == []
    assert not list(tmp_path.rglob("*.part"))


def test_a_report_reads_what_was_moved_aside_only_where_it_is_named(tmp_path: Path) -> None:
    run_sweep(sweep(tmp_path, limit=3))
    run_sweep(sweep(tmp_path), replace=True)
    (new,) = (tmp_path / "one" / "t").rglob("results_*.json")
    assert find_result_files([tmp_path], Notes()) == [new.resolve()]
    (aside,) = set_aside_runs(tmp_path)
    assert find_result_files([aside], Notes()) == [next(aside.rglob("results_*.json")).resolve()]


def test_a_folder_that_cannot_be_made_fails_its_run(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("a file")
    before = snapshot(tmp_path)
    (failure,) = run_sweep(sweep(tmp_path))
    assert failure.reason.startswith(f"{tmp_path / 'one' / 't'} cannot be written to (Not a directory)")
    assert snapshot(tmp_path) == before


def test_a_full_disk_is_one_sentence_of_the_run_it_stopped(tmp_path: Path) -> None:
    for files in range(4):
        (tmp_path / str(files)).mkdir()
        settings = sweep(tmp_path / str(files), "one", "two")
        with room_for(files, tmp_path / str(files) / "one"):
            (failure,) = run_sweep(settings)
        assert str(failure.run) == "one/t"
        assert "No space left on device" in failure.reason
        assert "\n" not in failure.reason
        assert run_sweep(settings) == []


def test_a_file_in_place_of_a_run_s_folder_is_moved_aside_where_asked(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "t").write_text("mine")
    (failure,) = run_sweep(sweep(tmp_path))
    assert "is not a folder" in failure.reason
    assert run_sweep(sweep(tmp_path), replace=True) == []
    (aside,) = set_aside_runs(tmp_path)
    assert aside.read_text() == "mine"


def test_what_a_sweep_reads_is_never_moved_aside(tmp_path: Path) -> None:
    text = tmp_path / "one" / "t" / "text.txt"
    text.parent.mkdir(parents=True)
    text.write_text("mine")
    before = snapshot(tmp_path)
    (failure,) = run_sweep(sweep(tmp_path).changed(metadata={"data_path": str(text)}), replace=True)
    assert "which this command reads or runs in" in failure.reason
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["..", ".", "", " ", "../models", "/models", "a/b", "a\\b", "a\0b", "a\nb", "a" * 300])
def test_a_name_is_one_part_of_a_path(name: str) -> None:
    with pytest.raises(UserError, match="label to be a name that a folder can have"):
        SweepCheckpoint(pretrained="one", label=name)
    with pytest.raises(UserError, match="name to be a name that a folder can have"):
        SweepRun(name=name, tasks=("t",))
