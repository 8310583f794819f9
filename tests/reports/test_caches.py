"""The section "KV caches": paired differences to the full cache, and how far a cache keeps within a tolerance."""

from pathlib import Path
from typing import Any

import pytest
from result_files import CURVES, model_record, ordinary_task, perplexity_task, reported, ruler_task, text_of, write_run

from sbeval.errors import UserError
from sbeval.policy import Rule
from sbeval.reports import gate
from sbeval.reports.analyse.findings import DOUBTFUL_TEXT
from sbeval.reports.analyse.verdicts import DOUBTFUL

LENGTHS = [1024, 2048, 4096]
FULL = CURVES["rope"][2:5]
RECORD: dict[str, Any] = {
    "cache": "quantized:4",
    "bits": 4,
    "group": 64,
    "backend": "quanto",
    "bytes_per_token": 6144.0,
}
RECORD["full_bytes_per_token"] = 23040.0


def write(folder: Path, losses: list[float], **of_task: Any) -> Path:
    """A model with a full cache, and with one of four bits that loses this much at each length."""
    curve = [value + loss for value, loss in zip(FULL, losses, strict=True)]
    for name, of_run, cache in (("full", FULL, None), ("four", curve, RECORD)):
        task = perplexity_task("fixed_target", of_run, lengths=LENGTHS, **of_task)
        write_run(folder / name, model_record("rope", cache=cache), [task])
    return folder


def test_each_cache_is_a_line_of_its_own_and_is_compared_with_the_full_one(tmp_path):
    report = reported(write(tmp_path, [-0.02, -0.02, 0.2]))
    (section,) = (each for each in report.sections if each.identifier == "caches")
    (table,) = section.tables
    (row,) = table.rows
    name, size, full, *differences, within = row.cells
    assert name.name == "demo-rope (4-bit cache by quanto)"
    assert set(report.looks) == {"demo-rope", name.name}
    assert (size.text, full.text) == ("6,144", "23,040")
    assert "bfloat16" in table.caption
    assert "unrounded" in table.explanation
    assert [cell.verdict for cell in differences][-1] == "worse"
    for cell, loss in zip(differences, [-0.02, -0.02, 0.2], strict=True):
        low, high = map(float, cell.interval)
        assert low <= float(cell.text) <= high
        assert abs(float(cell.text) - loss) < 0.015
    assert within.text == "2K"
    assert len(section.figures) == 1


@pytest.mark.exhaustive
def test_a_loss_at_a_short_length_ends_the_lengths_that_are_kept(tmp_path):
    text = text_of(write(tmp_path, [0.2, 0.0, 0.0]))
    assert "loses at most 0.01 nats up to" in text
    assert "no length" in text


def test_few_documents_give_no_length(tmp_path):
    assert "a band needs 20 documents" in text_of(write(tmp_path, [0.0, 0.0, 0.0], documents=12))


def test_documents_of_uneven_sizes_have_marked_bands_and_give_no_length(tmp_path):
    folder = write(tmp_path, [0.004, 0.004, 0.004], size_log_deviation=1.6)
    (section,) = (each for each in reported(folder).sections if each.identifier == "caches")
    (table,) = section.tables
    (row,) = table.rows
    *differences, within = row.cells[3:]
    assert all(cell.text.endswith(DOUBTFUL) for cell in differences)
    assert within.text == f"unknown {DOUBTFUL}"
    assert DOUBTFUL_TEXT in table.explanation


def test_scores_that_are_not_compared_are_named_with_the_reason(tmp_path):
    for name, cache in (("full", None), ("four", RECORD)):
        tasks = [
            perplexity_task("fixed_target", FULL, lengths=LENGTHS),
            ordinary_task("arc_easy", "acc", 0.5, samples=40),
            ordinary_task("piqa", "acc", 0.4, samples=5),
            ordinary_task("boolq", "acc", 0.5),
        ]
        write_run(tmp_path / name, model_record("rope", cache=cache), tasks)
    (section,) = (each for each in reported(tmp_path).sections if each.identifier == "caches")
    (remark,) = section.remarks
    assert "arc_easy, acc, 0-shot\N{RIGHT DOUBLE QUOTATION MARK}: no context length" in remark.text
    assert "piqa, acc, 0-shot: not compared, because only 5 samples are shared" in remark.text
    assert "boolq, acc, 0-shot: not compared, because" in remark.text


def test_ruler_is_compared_at_each_length_and_its_mean_over_lengths_is_not_named_as_left_out(tmp_path):
    for name, cache, reach in (("full", None, 5000), ("four", RECORD, 1500)):
        tasks = [ruler_task("sb_niah_single_1", reach, lengths=LENGTHS, repeats=9)]
        write_run(tmp_path / name, model_record("rope", cache=cache), tasks)
    (section,) = (each for each in reported(tmp_path).sections if each.identifier == "caches")
    ((row,),) = (table.rows for table in section.tables)
    assert [cell.verdict for cell in row.cells[3:6]][-1] == "worse"
    assert not section.remarks


def test_without_the_full_cache_there_is_a_sentence_and_no_comparison(tmp_path):
    task = perplexity_task("fixed_target", FULL, lengths=LENGTHS)
    write_run(tmp_path / "four", model_record("rope", cache=RECORD), [task])
    (section,) = (each for each in reported(tmp_path).sections if each.identifier == "caches")
    assert not section.tables
    assert "the same model without cache=... is not among the results" in section.remarks[0].text


def test_results_without_caches_have_no_section(tmp_path):
    write_run(tmp_path / "full", model_record("rope"), [perplexity_task("fixed_target", FULL, lengths=LENGTHS)])
    assert not [each for each in reported(tmp_path).sections if each.identifier == "caches"]


@pytest.mark.parametrize(("up_to", "verdict"), [(2048, "pass"), (4096, "fail")])
def test_a_gate_asks_up_to_which_length_a_cache_loses_little(tmp_path, up_to, verdict):
    folder = write(tmp_path, [0.004, 0.004, 0.2])
    rule = Rule(task="sb_stdlib_fixed_target", up_to=up_to, largest_change=0.03)
    judged = gate([rule], folder / "full", folder / "four")
    assert judged.verdict == verdict
    assert len(judged.judged) == LENGTHS.index(up_to) + 1


def test_a_gate_needs_the_length_itself(tmp_path):
    folder = write(tmp_path, [0.0, 0.0, 0.0])
    rule = Rule(task="sb_stdlib_fixed_target", up_to=8192, largest_change=0.03)
    assert gate([rule], folder / "full", folder / "four").verdict == "not enough data"


def test_length_and_up_to_exclude_each_other(tmp_path):
    folder = write(tmp_path, [0.0, 0.0, 0.0])
    rule = Rule(task="sb_stdlib_fixed_target", up_to=2048, length=1024, largest_change=0.03)
    with pytest.raises(UserError, match="length and up_to"):
        gate([rule], folder / "full", folder / "four")


@pytest.mark.parametrize("setting", ["function_sha256", "chunk_tokens"])
def test_caches_of_one_name_that_differ_are_different_lines(tmp_path, setting):
    shared = {"cache": "my:fn", "chunk_tokens": 1, "function_sha256": "ab" * 32}
    other = {"function_sha256": "cd" * 32, "chunk_tokens": 64}[setting]
    for name, cache in (("first", shared), ("second", {**shared, setting: other})):
        task = perplexity_task("fixed_target", FULL, lengths=LENGTHS)
        write_run(tmp_path / name, model_record("rope", cache=cache), [task])
    named = "cdcdcdcd" if setting == "function_sha256" else "abababab in chunks of 64"
    assert set(reported(tmp_path).looks) == {
        "demo-rope (cache my:fn of file abababab)",
        f"demo-rope (cache my:fn of file {named})",
    }
