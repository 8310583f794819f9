"""A report replaces only files of an earlier report: every folder is compared before and after."""

import os
import shutil
from pathlib import Path

import pytest
from folders import room_for, snapshot, unchanged
from result_files import CURVES, model_record, perplexity_task, write_run
from typer.testing import CliRunner

from sbeval.commands.cli import app
from sbeval.errors import UserError
from sbeval.processes.ending import no_room
from sbeval.reports import build_report, check_output_folder
from sbeval.reports.write.exports import MANIFEST
from tests.marks import exhaustive

LENGTHS = [256, 512]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    write_run(folder, model_record("rope"), [perplexity_task("stream", CURVES["rope"][:2], lengths=LENGTHS)])
    return folder


def report(results: Path, folder: Path, title: str | None = None, *, replace: bool = False) -> Path:
    return build_report([results], folder, image_formats=(), title=title, replace=replace)


@pytest.fixture(scope="module")
def written(results: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of all files of the report but figures and LaTeX, of which there are many: one of each."""
    folder = build_report([results], tmp_path_factory.mktemp("written"), image_formats=("svg",)).parent
    names = [name for name, (size, _) in snapshot(folder).items() if size >= 0]
    one_of_each = {name.partition("/")[0]: name for name in names if "/" in name}
    return [*(name for name in names if "/" not in name), *one_of_each.values()]


@pytest.fixture(scope="module")
def first(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a report, to be copied."""
    return report(results, tmp_path_factory.mktemp("first"), title="The first").parent


@pytest.mark.exhaustive
def test_a_user_s_file_of_a_report_s_name_is_named_and_stays(results: Path, written: list[str], tmp_path: Path) -> None:
    assert {Path(name).parent.name for name in written} == {"", "figures", "latex"}
    for number, name in enumerate(written):
        mine = tmp_path / str(number) / name
        mine.parent.mkdir(parents=True)
        mine.write_text("<html>mine</html>")
        with pytest.raises(UserError, match=f"{mine} is in the way; no report wrote it"):
            build_report([results], tmp_path / str(number), image_formats=("svg",))
        assert [path for path in (tmp_path / str(number)).rglob("*") if path.is_file()] == [mine]
        assert mine.read_text() == "<html>mine</html>"


@pytest.mark.parametrize("name", exhaustive("figures", "latex"))
def test_a_file_in_place_of_a_folder_is_named_before_writing(results: Path, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with unchanged(tmp_path), pytest.raises(UserError, match=f"{tmp_path / name} is in the way; no report wrote it"):
        build_report([results], tmp_path, image_formats=("svg",))
    build_report([results], tmp_path, image_formats=("svg",), replace=True)
    (aside,) = tmp_path.glob(f"{name}.old-*")
    assert aside.read_text() == "mine"


@pytest.mark.parametrize("kind", ["a folder", "a link"])
def test_a_page_s_name_taken_by_something_else_is_named(results: Path, kind: str, tmp_path: Path) -> None:
    page = tmp_path / "out" / "index.html"
    page.parent.mkdir()
    if kind == "a folder":
        page.mkdir()
    else:
        page.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no report wrote it"):
        report(results, tmp_path / "out")
    assert page.is_dir() or page.is_symlink()


@pytest.mark.parametrize("kind", ["a pipe", "twenty megabytes of lines"])
def test_a_manifest_of_no_report_is_neither_waited_for_nor_read(results: Path, kind: str, tmp_path: Path) -> None:
    manifest = tmp_path / MANIFEST
    os.mkfifo(manifest) if kind == "a pipe" else manifest.write_text(f"{'0' * 64}  index.html\n" * 2**18)
    with pytest.raises(UserError, match=f"{manifest} is in the way; no report wrote it"):
        check_output_folder(tmp_path)
    report(results, tmp_path, replace=True)
    assert [path.name.partition(".old-")[0] for path in tmp_path.glob("*.old-*")] == [MANIFEST]


@pytest.mark.exhaustive
def test_a_report_replaces_an_earlier_one_and_leaves_all_else(results: Path, first: Path, tmp_path: Path) -> None:
    shutil.copytree(first, tmp_path, dirs_exist_ok=True)
    mine = ["notes.md", "figures/mine.svg", "latex/mine.tex", "own/index.html"]
    for name in mine:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = snapshot(tmp_path)
    with unchanged(results):
        page = report(results, tmp_path, title="The second")
    after = snapshot(tmp_path)
    assert "The second" in page.read_text()
    assert after.keys() == before.keys()
    assert all(after[name] == before[name] for name in mine)


def test_a_report_of_other_results_is_moved_aside_whole_and_named(
    results: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "report"
    shutil.copytree(first, folder)
    (folder / "notes.md").write_text("mine")
    before = {name: read for name, read in snapshot(folder).items() if name != "notes.md"}
    task = perplexity_task("stream", CURVES["nope"][:2], lengths=LENGTHS)
    write_run(tmp_path / "other", model_record("nope"), [task])
    with unchanged(results):
        page = report(tmp_path / "other", folder, title="The second")
    (aside,) = tmp_path.glob("report.old-*")
    moved = {name: read for name, read in snapshot(aside).items() if read[0] >= 0}
    assert moved == {name: read for name, read in before.items() if read[0] >= 0}
    assert f"is now in {aside}" in capsys.readouterr().out
    assert ("The second" in page.read_text(), (folder / "notes.md").read_text()) == (True, "mine")
    assert "The first" in (aside / "index.html").read_text()
    report(results, aside, title="The third")  # also recorded there as a report's file
    assert len(list(tmp_path.glob("*.old-*"))) == 1


@pytest.mark.exhaustive
def test_a_report_of_the_same_results_or_more_replaces_in_place(
    results: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "report"
    shutil.copytree(first, folder)
    shutil.copytree(results, moved := tmp_path / "moved")
    task = perplexity_task("stream", CURVES["nope"][:2], lengths=LENGTHS)
    write_run(tmp_path / "more", model_record("nope"), [task])
    for paths in ([results], [moved], [results, tmp_path / "more"], [tmp_path / "more", moved]):
        build_report(paths, folder, image_formats=())
    build_report(paths, folder, image_formats=(), only=["demo-rope"])
    assert not list(tmp_path.rglob("*.old-*"))
    assert "is now in" not in capsys.readouterr().out
    report(results, folder)
    assert len(list(tmp_path.glob("report.old-*"))) == 1


@pytest.mark.parametrize("name", ["index.html", *exhaustive("summary.md", "latex/speed.tex")])
def test_a_file_that_was_changed_or_put_beside_the_page_is_named_and_moved_aside_where_asked(
    results: Path, first: Path, name: str, tmp_path: Path
) -> None:
    shutil.copytree(first, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text("mine")
    with (
        unchanged(tmp_path),
        pytest.raises(UserError, match=f"{name} is in the way; no report wrote it, or it was changed"),
    ):
        report(results, tmp_path, title="The second")
    report(results, tmp_path, replace=True)
    (aside,) = tmp_path.rglob("*.old-*")
    assert (aside.name.partition(".old-")[0], aside.read_text()) == (Path(name).name, "mine")
    assert (tmp_path / name).read_text() != "mine"
    report(results, tmp_path, title="The third")


@pytest.mark.exhaustive
def test_a_disk_full_at_any_write_leaves_the_old_or_the_new_files(results: Path, first: Path, tmp_path: Path) -> None:
    shutil.copytree(first, tmp_path, dirs_exist_ok=True)
    (tmp_path / "mine.txt").write_text("mine")
    before = snapshot(tmp_path)
    report(results, tmp_path, "The second")
    second, room, built = snapshot(tmp_path), 0, False
    while not built:
        found: BaseException | None = None
        with room_for(room, tmp_path):
            try:
                report(results, tmp_path, "The first")
                built = True
            except (OSError, UserError) as error:
                found = error
        assert built or no_room(found)
        now = snapshot(tmp_path)
        assert now.keys() == before.keys()
        assert now["mine.txt"] == before["mine.txt"]
        assert {now[name] in (before[name], second[name]) for name in before if name.endswith(".tex")} == {True}
        room += 4
    assert room > 8


def test_a_report_that_fails_leaves_the_earlier_one_whole(
    results: Path, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(first, tmp_path, dirs_exist_ok=True)

    def fail(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sbeval.reports.build.write_page", fail)
    with unchanged(tmp_path), pytest.raises(OSError, match="No space left"):
        report(results, tmp_path, title="The second")


@pytest.mark.parametrize("place", ["index.html", "extension/summary.md"])
def test_the_demo_refuses_a_folder_before_it_evaluates_anything(place: str, tmp_path: Path) -> None:
    mine = tmp_path / "out" / place
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    arguments = ["demo", "-o", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    with unchanged(tmp_path):
        found = CliRunner().invoke(app, arguments)
    assert isinstance(found.exception, UserError)
    assert str(mine) in str(found.exception)
