"""Writes are atomic; temporary files of killed processes are removed, those of running processes are not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from folders import room_for, snapshot

from sbeval.errors import UserError
from sbeval.keeping.cache import cache_folder, keep_table, read_table
from sbeval.keeping.writing import alone_in, set_aside, whole_file, written_beside
from sbeval.processes.ending import no_room

WRITER = """
import sys, time
from pathlib import Path
from sbeval.keeping.writing import whole_file, written_beside
place = Path(sys.argv[2])
how = whole_file(place, "x") if sys.argv[1] == "file" else written_beside(place)
with how as part:
    (part if sys.argv[1] == "file" else part / "a").write_text("half")
    print("written", flush=True)
    time.sleep(600)
"""


def write(kind: str, place: Path) -> None:
    if kind == "file":
        with whole_file(place, "x") as part:
            part.write_text("new")
    else:
        with written_beside(place) as part:
            (part / "a").write_text("new")


@pytest.fixture(params=["file", "folder", "folder that holds something"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder that holds something":
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("mine")
    return "file" if request.param == "file" else "folder"


@pytest.mark.exhaustive
def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(kind: str, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    processes = []
    for _ in range(2):
        command = [sys.executable, "-c", WRITER, kind, str(tmp_path / "out")]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert processes[-1].stdout.readline() == b"written\n"  # type: ignore[union-attr]
    try:
        processes[0].kill()
        processes[0].wait()
        left = [path for path in tmp_path.rglob("*") if ".part" in path.name]
        assert len(left) == 2
        write(kind, tmp_path / "out")
        (living,) = [path for path in tmp_path.rglob("*") if ".part" in path.name]
        assert living in left
    finally:
        processes[1].send_signal(signal.SIGKILL)
        processes[1].wait()
    write(kind, tmp_path / "out")
    new = {"out"} if kind == "file" else {"out", "out/a"}
    assert snapshot(tmp_path).keys() == before.keys() | new


def test_a_block_that_fails_leaves_what_was_there_and_nothing_else(kind: str, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    how = whole_file(tmp_path / "out", "x") if kind == "file" else written_beside(tmp_path / "out")

    def write_half() -> None:
        with how as new:
            (new if kind == "file" else new / "a").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert snapshot(tmp_path) == before
    write(kind, tmp_path / "out")
    assert snapshot(tmp_path) != before


def test_a_full_disk_leaves_what_was_there(kind: str, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    room = 0
    while True:
        try:
            with room_for(room, tmp_path):
                write(kind, tmp_path / "out")
            break
        except (OSError, UserError) as error:
            found = error
        assert no_room(found)
        assert snapshot(tmp_path) == before
        room += 1
    assert room > 1


def test_an_empty_folder_stays_the_same_and_is_filled_by_one_process(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o700)
    before = (tmp_path / "out").stat()

    def write_both() -> None:
        with written_beside(tmp_path / "out") as second:
            (second / "b").write_text("second")
            with written_beside(tmp_path / "out") as first:
                (first / "a").write_text("first")

    with pytest.raises(UserError, match="not empty"):
        write_both()
    assert snapshot(tmp_path).keys() == {"out", "out/a"}
    after = (tmp_path / "out").stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)


def test_a_file_that_is_to_be_first_is_in_place_before_any_other(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("mine")

    def write_three() -> None:
        with written_beside(tmp_path, first="z") as part:
            for name in ("a", "b", "z"):
                (part / name).write_text("new")

    with pytest.raises(UserError):
        write_three()
    assert snapshot(tmp_path).keys() == {"a", "b", "b/mine", "kept", "z"}


@pytest.mark.parametrize("place", ["file/out", "/proc/sbeval/out"])
def test_where_nothing_can_be_written_is_one_sentence(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(UserError, match="cannot be written to, for files"), written_beside(tmp_path / place):
        pass
    cannot = pytest.raises(UserError, match=r"cannot be written to, for text .*: set SBEVAL_CACHE")
    with cannot, whole_file(tmp_path / place / "x", "text"):
        pass


def test_what_is_set_aside_moves_in_one_step_and_never_onto_something(tmp_path: Path) -> None:
    kept = []
    for number in range(3):
        (tmp_path / "notes").write_text(str(number))
        kept.append(set_aside(tmp_path / "notes"))
    assert [path.read_text() for path in kept] == ["0", "1", "2"]
    with pytest.raises(UserError, match="could not"):
        set_aside(tmp_path / "absent")


def test_what_lies_above_the_current_folder_is_never_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "beside").write_text("mine")
    monkeypatch.chdir(tmp_path / "here")
    for place in (".", "", "..", "/", "../here", str(tmp_path)):
        with pytest.raises(UserError, match="which this command reads or runs in"):
            set_aside(Path(place))
    assert set_aside(Path("../beside")).read_text() == "mine"


@pytest.mark.exhaustive
def test_a_folder_is_held_by_one_process_and_free_once_that_is_dead(tmp_path: Path) -> None:
    code = "import os, pathlib, sys, sbeval.keeping.writing as writing\n"
    code += "with writing.alone_in(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    with alone_in(tmp_path), pytest.raises(UserError, match="Another process is writing"), alone_in(tmp_path):
        pass
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -signal.SIGKILL
    with alone_in(tmp_path):
        assert os.path.isdir(tmp_path)


def test_the_folder_is_the_one_named_or_lies_beside_the_user_s_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBEVAL_CACHE", "~/kept")
    assert cache_folder("targets") == Path.home() / "kept" / "targets"
    monkeypatch.setenv("SBEVAL_CACHE", "~nobodyxx/kept")
    with pytest.raises(UserError, match="Expected a home folder for '~nobodyxx', found none"):
        cache_folder("targets")
    monkeypatch.delenv("SBEVAL_CACHE")
    assert cache_folder("ruler") == Path(datasets.config.HF_DATASETS_CACHE) / "sbeval" / "ruler"


def test_a_table_that_cannot_be_kept_or_read_is_no_error(tmp_path: Path) -> None:
    table = pa.table({"tokens": [1, 2]})
    keep_table(tmp_path / "kept" / "table.arrow", table)
    assert read_table(tmp_path / "kept" / "table.arrow") == table
    (tmp_path / "file").touch()
    keep_table(tmp_path / "file" / "table.arrow", table)
    assert read_table(tmp_path / "file") is None
    assert read_table(tmp_path / "nothing.arrow") is None
