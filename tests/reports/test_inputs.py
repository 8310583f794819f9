from pathlib import Path
from typing import Any

import pytest
from result_files import model_record, ordinary_task, reported, write_run

from sbeval.reports import compare, load_results
from sbeval.reports.analyse.selection import pool_seeds
from sbeval.reports.analyse.statistics import wilson_interval
from sbeval.reports.analyse.suite import SuiteRow, suite_rows
from sbeval.reports.read.runs import text_length
from sbeval.reports.section import Figure


def write(folder: Path, attention: str, longest: int | None, value: float, **changes: Any) -> None:
    text = changes.pop("text", None)
    seconds = changes.pop("seconds", 1_795_000_000.0)
    model = model_record(attention, max_length=longest, **changes)
    name = f"{attention}-{longest}-{text}-{seconds}"
    task = ordinary_task("babilong_qa1", "acc", value, samples=100)
    metadata = {"metadata": {"version": 0.0, "max_seq_lengths": text}} if text else {}
    write_run(folder / name, model, [task], seconds=seconds, extra={"configs": {"babilong_qa1": metadata}})


def found(folder: Path) -> dict[str, dict[str, float]]:
    return {row.name: {label: cell.value for label, cell in row.cells.items()} for row in rows(folder)}


def rows(folder: Path) -> list[SuiteRow]:
    return suite_rows(load_results([folder]))


def drawn(folder: Path) -> list[Figure]:
    sections = [section for section in reported(folder).sections if section.identifier == "inputs"]
    return [figure for section in sections for figure in section.figures]


def test_runs_of_one_task_at_several_max_lengths_are_rows_and_a_curve(tmp_path: Path) -> None:
    for longest, value in ((4096, 0.8), (16384, 0.5), (65536, 0.2)):
        write(tmp_path, "rope", longest, value)
    write(tmp_path, "stickbreaking", 16384, 0.7)
    assert found(tmp_path) == {
        "babilong_qa1, acc, 0-shot, max_length 4K": {"demo-rope": 0.8},
        "babilong_qa1, acc, 0-shot, max_length 16K": {"demo-sb": 0.7, "demo-rope": 0.5},
        "babilong_qa1, acc, 0-shot, max_length 64K": {"demo-rope": 0.2},
    }
    (figure,) = drawn(tmp_path)
    assert figure.caption.finding == "demo-sb 0.700 at 16K; demo-rope 0.800 at 4K and 0.200 at 64K."
    values = figure.variants["score"]["data"]["values"]
    shown = {row["x"]: row["y"] for row in values if row["setting"] == "demo-rope"}
    assert shown == {4096: 0.8, 16384: 0.5, 65536: 0.2}
    assert not load_results([tmp_path]).notes


def test_a_score_of_one_has_the_interval_of_its_number_of_samples(tmp_path: Path) -> None:
    for longest in (4096, 16384):
        write(tmp_path, "rope", longest, 1.0)
    values = drawn(tmp_path)[0].variants["score"]["data"]["values"]
    least = float(wilson_interval(1.0, 100)[0])
    assert [(row["low"], row["high"]) for row in values] == [pytest.approx((least, 1.0), abs=0.02)] * 2


def test_differences_at_one_max_length_are_paired_with_that_length(tmp_path: Path) -> None:
    for longest in (4096, 16384):
        write(tmp_path, "rope", longest, 0.4 + longest / 81920)
        write(tmp_path, "stickbreaking", longest, 0.7)
    differences = [row.difference("demo-sb", "demo-rope") for row in rows(tmp_path)]
    assert [one.samples for one in differences if one] == [100, 100]
    assert [one.estimate for one in differences if one] == pytest.approx([0.25, 0.1])


def test_one_max_length_run_again_is_a_duplicate_and_the_newest_counts(tmp_path: Path) -> None:
    write(tmp_path, "rope", 4096, 0.8)
    write(tmp_path, "rope", 4096, 0.6, seconds=1_795_000_900.0)
    assert found(tmp_path) == {"babilong_qa1, acc, 0-shot": {"demo-rope": 0.6}}
    assert not drawn(tmp_path)
    assert any("was run again later" in note.reason for note in load_results([tmp_path]).notes)


def test_models_of_different_max_length_stay_in_one_row_where_each_ran_once(tmp_path: Path) -> None:
    write(tmp_path, "rope", 4096, 0.6)
    write(tmp_path, "stickbreaking", 65536, 0.7)
    assert found(tmp_path) == {"babilong_qa1, acc, 0-shot": {"demo-sb": 0.7, "demo-rope": 0.6}}


def test_texts_of_several_lengths_are_told_apart_whatever_the_max_length(tmp_path: Path) -> None:
    for text, longest, value in (("0k", 4096, 0.9), ("4k", 16384, 0.8), ("8k", 16384, 0.5)):
        write(tmp_path, "rope", longest, value, text=text)
    write(tmp_path, "stickbreaking", 65536, 0.7, text="8k")
    assert found(tmp_path) == {
        "babilong_qa1, acc, 0-shot, texts of 0": {"demo-rope": 0.9},
        "babilong_qa1, acc, 0-shot, texts of 4K": {"demo-rope": 0.8},
        "babilong_qa1, acc, 0-shot, texts of 8K": {"demo-sb": 0.7, "demo-rope": 0.5},
    }
    assert [row["x"] for row in drawn(tmp_path)[0].variants["score"]["data"]["values"]] == [8192, 4096, 8192]


def test_seeds_are_averaged_at_each_max_length(tmp_path: Path) -> None:
    for seed in (0, 1):
        for longest in (4096, 16384):
            facts = {"recipe": "r", "training_seed": seed, "checkpoint_sha256": str(seed) * 64, "name": f"r-{seed}"}
            write(tmp_path, "rope", longest, 0.4 + seed / 10 + longest / 81920, seconds=1.795e9 + seed, **facts)
    pooled = suite_rows(pool_seeds(load_results([tmp_path])))
    assert [row.cells["r"].value for row in pooled] == pytest.approx([0.5, 0.65])


def test_comparing_two_models_goes_max_length_by_max_length(tmp_path: Path) -> None:
    for longest in (4096, 16384):
        write(tmp_path / "a", "rope", longest, 0.8)
    write(tmp_path / "b", "stickbreaking", 16384, 0.3)
    (score,) = compare(tmp_path / "a", tmp_path / "b").scores
    assert (score.name, score.estimate) == ("babilong_qa1, acc, 0-shot, max_length 16K", pytest.approx(-0.5))


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [("16k", 16384), ("0k", 0), ("1M", 1 << 20), (4096, 4096), ([8192], 8192), ("0k,1k", None), ([1, 2], None)],
)
def test_a_text_length_is_read_as_it_is_asked_for(asked: object, tokens: int | None) -> None:
    assert text_length({"max_seq_lengths": asked}) == tokens
