from pathlib import Path

import numpy as np
import pytest
from experiment_files import LENGTHS
from result_files import model_record, ordinary_task, ruler_task, write_run

from sbeval.reports import compare, load_results
from sbeval.reports.analyse.paired import ruler_differences, task_difference
from sbeval.reports.analyse.suite import suite_rows
from sbeval.reports.read.samples import SampleScores

ACC = ("acc", "none")


def scores(values: list[float], metric: tuple[str, str] = ACC) -> SampleScores:
    return SampleScores(scores={metric: {(str(place), "hash"): value for place, value in enumerate(values)}})


def test_pairing_takes_out_how_hard_the_questions_are() -> None:
    generator = np.random.default_rng(0)
    level = generator.normal(0.5, 0.3, 200)
    base, own = scores(list(level)), scores(list(level + 0.02 + generator.normal(0, 0.01, 200)))
    found = task_difference(own, base, ACC)
    assert found is not None
    assert 0.015 < found.low < found.estimate < found.high < 0.025


def test_only_questions_both_answered_are_compared() -> None:
    found = task_difference(scores([1.0] * 30), scores([0.0] * 25), ACC)
    assert found is not None
    assert (found.estimate, found.samples) == (1.0, 25)


def test_few_questions_give_a_difference_without_an_interval() -> None:
    found = task_difference(scores([1.0, 0.0, 1.0]), scores([0.0, 0.0, 0.0]), ACC)
    assert found is not None
    assert np.isnan(found.low)


def test_two_models_that_agree_on_every_question_are_not_certainly_alike() -> None:
    found = task_difference(scores([1.0] * 30), scores([1.0] * 30), ACC)
    assert found is not None
    assert (found.estimate, found.low) == (0.0, pytest.approx(-found.high))
    assert 0.05 < found.high < 0.2
    found = task_difference(scores([0.0] * 30), scores([1.0] * 30), ACC)
    assert found is not None
    assert found.low == -1.0 < found.high < -0.8


def test_other_questions_are_not_compared() -> None:
    other = SampleScores(scores={ACC: {("0", "another"): 1.0}})
    assert task_difference(scores([1.0]), other, ACC) is None


def test_every_ruler_task_weighs_the_same_whatever_its_samples() -> None:
    metric = ("score@0004096", "none")
    own = {"sb_ruler_vt": scores([1.0] * 100, metric), "sb_niah_single_1": scores([0.0] * 25, metric)}
    base = {"sb_ruler_vt": scores([0.0] * 100, metric), "sb_niah_single_1": scores([0.5] * 25, metric)}
    found, tasks = ruler_differences(own, base)
    assert set(tasks) == {"sb_ruler_vt", "sb_niah_single_1"}
    assert found[4096].estimate == pytest.approx((1.0 - 0.5) / 2)


def write_pair(folder: Path, shift: float, **changes: object) -> None:
    for attention, level in (("rope", 0.5), ("stickbreaking", 0.5 + shift)):
        reach = 1024 if attention == "rope" else 1024 + int(shift * 40_000)
        tasks = [ruler_task("sb_niah_single_1", reach, lengths=LENGTHS[2:6], repeats=9)]
        tasks.append(ordinary_task("piqa", "acc", level, samples=400))
        write_run(folder / attention, model_record(attention), tasks, **changes)


def test_the_table_of_tasks_pairs_by_sample_where_samples_were_logged(tmp_path: Path) -> None:
    write_pair(tmp_path, 0.1)
    (row,) = suite_rows(load_results([tmp_path]))
    paired = row.difference("demo-sb", "demo-rope")
    assert paired is not None
    assert paired.samples == 400
    write_pair(tmp_path / "unlogged", 0.1, log_samples=False)
    (row,) = suite_rows(load_results([tmp_path / "unlogged"]))
    unpaired = row.difference("demo-sb", "demo-rope")
    assert unpaired is not None
    assert unpaired.samples is None
    assert unpaired.high - unpaired.low > paired.high - paired.low


def test_compare_judges_ruler_and_ordinary_tasks_in_their_own_direction(tmp_path: Path) -> None:
    write_pair(tmp_path, 0.1)
    better = compare("demo-rope", "demo-sb", paths=[tmp_path])
    assert not better.worse
    assert {score.name.split(",")[0] for score in better.scores if score.better} == {"", "piqa"}
    worse = compare("demo-sb", "demo-rope", paths=[tmp_path])
    assert worse.worse
    assert "RULER, mean over 1 task" in worse.text()
