import json

import pytest

from research.paper_experiments import recall_grid

TINY = ["--length-tokens", "32", "--vocabulary", "32", "--hidden-size", "16", "--batch-sequences", "4"]
TINY += ["--test-sequences", "5", "--test-every-steps", "2", "--steps", "2"]


def test_the_first_rate_of_every_cell_comes_before_the_second_of_any(tmp_path):
    jobs = recall_grid.jobs_of(tmp_path, [("stickbreaking", 128), ("rope", 32)], [1e-3, 1e-2])
    in_order = [job.name for job in sorted(jobs, key=lambda job: -job.urgency)]
    assert in_order == [
        "mqrar_stickbreaking_128_1.0e-03",
        "mqrar_rope_32_1.0e-03",
        "mqrar_stickbreaking_128_1.0e-02",
        "mqrar_rope_32_1.0e-02",
    ]


def test_a_solved_cell_needs_no_further_rate_and_other_cells_do(tmp_path):
    jobs = recall_grid.jobs_of(tmp_path, [("rope", 3), ("rope", 32)], [1e-3])
    assert not any(job.unneeded() for job in jobs)
    (tmp_path / "rope_3_4.6e-04.json").write_text(json.dumps([{"solved": True}]))
    (tmp_path / "rope_32_4.6e-04.json").write_text(json.dumps([{"solved": False}]))
    assert [job.unneeded() for job in jobs] == [True, False]


def test_runs_end_by_themselves_before_the_grid_does(tmp_path):
    (job,) = recall_grid.jobs_of(tmp_path, [("rope", 3)], [1e-3], max_seconds=100.0)
    line = list(job.command())
    assert 0 < float(line[line.index("--max-seconds") + 1]) <= 100.0 - recall_grid.SECONDS_TO_END


def test_the_grid_leaves_a_table_for_each_rate(tmp_path, capfd):
    arguments = ["--out", str(tmp_path), "--gpus", "0", "--places", "1", "--stickbreaking", "--rope", "3"]
    with pytest.raises(SystemExit) as end:
        recall_grid.main([*arguments, "--learning-rates", "1e-3", *TINY])
    assert end.value.code == 0, capfd.readouterr().out
    tables = [json.loads(file.read_text()) for file in sorted((tmp_path / "mqrar").glob("*.json"))]
    assert [(run["attention"], run["learning_rate"], run["steps_taken"]) for (run,) in tables] == [
        ("rope", 1e-3, 2),
    ]
