"""Single samples on the page: prompts, references and answers, and the documents with the largest changes."""

import json
from pathlib import Path
from typing import Any

import pytest
from result_files import LENGTHS, model_record, reported, ruler_task, write_pair, write_run

from sbeval.reports import build_report, load_results
from sbeval.reports.kinds.answers import ANSWERS, SAMPLES_READ
from sbeval.reports.section import Table
from sbeval.results.records import metric_key

ASKED = [1024, 4096]


def generated(index: int, answers: list[str], scores: list[float], **changes: Any) -> dict[str, Any]:
    return {
        "doc_id": index,
        "doc": {"lengths": ASKED, "references": [f"{index}{index}"]},
        "target": f"['{index}{index}']",
        "arguments": {
            f"gen_args_{place}": {"arg_0": f"{'noise ' * 500}\nThe number of door {index} is", "arg_1": {"until": []}}
            for place in range(len(ASKED))
        },
        "resps": [[answer] for answer in answers],
        "filtered_resps": answers,
        "filter": "none",
        **{metric_key("score", length): score for length, score in zip(ASKED, scores, strict=True)},
    } | changes


def write_answers(folder: Path, attention: str, samples: list[dict[str, Any]], **options: Any) -> Path:
    name, results, record, _ = ruler_task("niah_single_1", 4096, lengths=ASKED)
    return write_run(folder / attention, model_record(attention), [(name, results, record, samples)], **options)


def tables(folder: Path) -> dict[str, Table]:
    sections = [section for section in reported(folder).sections if section.identifier == "samples"]
    return {table.stem: table for section in sections for table in section.tables}


def test_what_was_asked_expected_and_answered_stands_side_by_side(tmp_path: Path) -> None:
    write_answers(tmp_path, "stickbreaking", [generated(7, ["77 it is", "about 77"], [1.0, 1.0])])
    write_answers(tmp_path, "rope", [generated(7, ["77", "<b>the the</b>\n" * 99], [1.0, 0.0])])
    (table,) = tables(tmp_path).values()
    assert [cell.plain for cell in table.header] == ["end of the prompt", "context", "expected", "demo-sb", "demo-rope"]
    short, long = ([cell.plain for cell in row.cells] for row in table.rows)
    assert short[0].endswith("noise The number of door 7 is")
    assert (short[1:], long[1:4]) == (["1K", "77", "77 it is", "77"], ["4K", "77", "about 77"])
    assert long[4].startswith("<b>the the</b> <b>the the</b>")
    assert len(long[4]) < 200
    assert [cell.verdict for cell in table.rows[1].cells[3:]] == ["better", "worse"]
    page = build_report([tmp_path], tmp_path / "out", image_formats=()).read_text(encoding="utf-8")
    assert "&lt;b&gt;the the" in page
    assert "<b>the the" not in page


def test_only_the_first_samples_are_read(tmp_path: Path) -> None:
    write_answers(tmp_path, "rope", [generated(index, ["a", "b"], [0.0, 0.0]) for index in range(SAMPLES_READ + 5)])
    ((_, answers),) = load_results([tmp_path])[ANSWERS].items()
    assert {one.sample for one in answers} == set(range(SAMPLES_READ))


@pytest.mark.parametrize(
    "changes",
    [
        {"arguments": None},
        {"arguments": {"gen_args_0": {"arg_0": "x", "arg_1": "y"}, "gen_args_1": {"arg_0": "x", "arg_1": "y"}}},
        {"arguments": {"gen_args_0": 3, "gen_args_1": 4}},
        {"filtered_resps": "text"},
        {"filtered_resps": [1.0, 2.0]},
        {"doc": {"lengths": ["a", -5]}},
        {"doc": []},
    ],
    ids=["no arguments", "scored text", "numbers", "a text", "numbers answered", "no lengths", "a list"],
)
def test_samples_of_another_kind_are_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_answers(tmp_path, "rope", [generated(0, ["a", "b"], [0.0, 0.0], **changes)])
    assert load_results([tmp_path])[ANSWERS] == {}


def test_a_samples_file_that_ends_within_a_line_gives_what_is_whole(tmp_path: Path) -> None:
    results = write_answers(tmp_path, "rope", [generated(0, ["a", "b"], [0.0, 0.0])])
    (samples,) = results.parent.glob("samples_*.jsonl")
    with samples.open("a", encoding="utf-8") as file:
        file.write(json.dumps(generated(1, ["c", "d"], [0.0, 0.0]))[:200])
    ((_, answers),) = load_results([tmp_path])[ANSWERS].items()
    assert [one.text for one in answers] == ["a", "b"]


@pytest.mark.parametrize("damage", ["unreadable", "not logged"])
def test_answers_of_another_run_than_the_newest_are_said_to_be_so(damage: str, tmp_path: Path) -> None:
    earlier = write_answers(tmp_path, "rope", [generated(0, ["a", "b"], [0.0, 0.0])])
    later = {"date": "2026-11-21T10-00-00.000001", "seconds": 1_795_086_400.0}
    newest = write_answers(tmp_path, "rope", [generated(0, ["c", "d"], [0.0, 0.0])], **later)
    results = load_results([tmp_path])
    assert [answer.text for (answers,) in [results[ANSWERS].values()] for answer in answers] == ["c", "d"]
    assert not [note for note in results.notes if "no answers" in note.reason]
    (samples,) = newest.parent.glob("samples_*2026-11-21*.jsonl")
    if damage == "unreadable":
        samples.write_text("{", encoding="utf-8")
    else:
        samples.unlink()
    results = load_results([tmp_path])
    assert [answer.text for (answers,) in [results[ANSWERS].values()] for answer in answers] == ["a", "b"]
    (note,) = [note for note in results.notes if "no answers" in note.reason]
    assert note.path == (samples if damage == "unreadable" else newest)
    assert note.reason.endswith(f"the page shows those of {earlier.name}.")


def test_single_documents_are_shown_from_the_largest_fall_to_the_largest_rise(tmp_path: Path) -> None:
    write_pair(tmp_path, "fixed_target")
    (table,) = tables(tmp_path).values()
    means = [sum(float(cell.text) for cell in row.cells[1:]) / 2 for row in table.rows]
    assert means == sorted(means)
    assert len(table.rows) == 8
    assert "8 of 60 documents" in table.explanation
    for row in table.rows:
        for cell in row.cells[1:]:
            before, after = (float(part.split(" at ")[0]) for part in cell.small[0].split(", "))
            assert after - before == pytest.approx(float(cell.text), abs=0.011)
            assert cell.small[0].endswith(f"at {LENGTHS[-1] // 1024}K")
