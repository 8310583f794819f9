"""lm-eval's files are written atomically; an incomplete file is an error, another program's file is not."""

import io
import json
import logging
import sqlite3
from pathlib import Path

import pytest
import sweep_launcher
from folders import snapshot

from sbeval.errors import UserError
from sbeval.harness.run import check_response_cache
from sbeval.results.saving import saved_whole


@pytest.mark.parametrize("name", ["out", "out/results.json"])
def test_files_appear_once_all_are_written_and_beside_others(name: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with saved_whole(str(tmp_path / name)) as path:
        if name == "out":
            sweep_launcher.write_results(Path(path))
        else:
            assert Path(path).name == "results.json"
            sweep_launcher.write_results(Path(path).parent)
        assert not list((tmp_path / "out").glob("model*"))
    assert {file.name.partition("_")[0] for file in (tmp_path / "out" / "model").iterdir()} == {"results", "samples"}
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
    assert not list((tmp_path / "out").glob("*.partial"))


@pytest.mark.parametrize("name", ["", "lm_eval"])
def test_the_log_names_the_folder_where_files_will_lie(name: str, tmp_path: Path) -> None:
    logger, shown = logging.getLogger("lm_eval"), io.StringIO()
    logger.setLevel(logging.INFO)
    logger.propagate = name == ""  # lm-eval's logger has its own handler and does not propagate
    logging.getLogger(name).addHandler(logging.StreamHandler(shown))
    with saved_whole(str(tmp_path / "out")) as path:
        logger.info("Saving samples to: %s/samples.jsonl", path)
        sweep_launcher.write_results(Path(path))
    assert shown.getvalue() == f"Saving samples to: {tmp_path}/out/samples.jsonl\n"


@pytest.mark.parametrize(
    ("cut", "words", "kept"),
    [
        (None, "it wrote none", set()),
        ("samples_*", "missing or cut off", {"results", "samples"}),
        ("results_*", "is incomplete", {"samples"}),
    ],
)
def test_what_lm_eval_could_only_warn_about_is_an_error(cut, words: str, kept: set[str], tmp_path: Path) -> None:
    def save() -> None:
        with saved_whole(str(tmp_path / "out")) as path:
            if cut is not None:
                sweep_launcher.write_results(Path(path))
                (file,) = Path(path).rglob(cut)
                file.write_bytes(file.read_bytes()[:-5])

    with pytest.raises(UserError, match=words):
        save()
    assert {file.name.partition("_")[0] for file in tmp_path.rglob("*_*")} == kept


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="cannot be written to, for files"), saved_whole(str(tmp_path / "out")):
        raise AssertionError("the evaluation began")


def test_a_response_cache_is_no_file_of_somebody_else_s(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("text", "other", "ours")]
    text, *databases = (Path(f"{name}_rank0.db") for name in names)
    text.write_text(json.dumps({"mine": 1}) * 100)
    for file, table in zip(databases, ("accounts", "unnamed"), strict=True):
        with sqlite3.connect(file) as database:
            database.execute(f"CREATE TABLE {table} (key TEXT)")
    before = snapshot(tmp_path)
    for name in names[:2]:
        with pytest.raises(UserError, match="a response cache"):
            check_response_cache(name)
    check_response_cache(names[2])
    check_response_cache(str(tmp_path / "absent"))
    assert snapshot(tmp_path) == before
