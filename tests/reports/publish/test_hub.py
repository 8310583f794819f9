"""The hub's evaluation result files: what the hub's own client reads back."""

import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import EvalResultEntry
from huggingface_hub._eval_results import parse_eval_result_entries
from result_files import CURVES, LENGTHS, model_record, perplexity_task, write_run

from sbeval.errors import UserError
from sbeval.reports import load_results
from sbeval.reports.publish.hub import FOLDER, write_hub_results
from sbeval.reports.read.results import Results

TASK = "sb_stdlib_stream"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("results")
    for attention in ("stickbreaking", "rope"):
        write_run(folder / attention, model_record(attention), [perplexity_task("stream", CURVES[attention])])
    return load_results([folder])


def entries(file: Path) -> list[EvalResultEntry]:
    return parse_eval_result_entries(yaml.safe_load(file.read_text(encoding="utf-8")))


def test_every_length_of_every_model_is_an_entry_with_the_tables_number(results: Results, tmp_path: Path) -> None:
    written = write_hub_results(results, tmp_path / "hub", datasets={TASK: "someone/text"})
    places = {model.label: tmp_path / "hub" / model.label / FOLDER / f"{TASK}.yaml" for model in results.models}
    assert {*written.files} == {*places.values()}
    for model in results.models:
        table = results.measurements
        nll = table[(table["setting"] == model.label) & (table["metric"] == "nll")]
        expected = dict(zip(nll["context_length_tokens"], nll["value"], strict=True))
        assert sorted(expected) == LENGTHS
        read = {entry.task_id: entry for entry in entries(places[model.label])}
        for length, value in expected.items():
            entry = read[f"{TASK}/nll@{length}"]
            assert (entry.dataset_id, entry.value) == ("someone/text", value)
            assert re.search(rf"context length {length:,} tokens; NLL in nats .*95% interval", entry.notes or "")


def test_a_task_without_a_data_set_is_left_out_and_named(results: Results, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"found none \({TASK}\): name one with --hub-dataset"):
        write_hub_results(results, tmp_path / "hub", datasets={})
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize(
    ("datasets", "said"),
    [({"sb_stdlib": "a/b"}, "name of a task"), ({TASK: "no-owner"}, r"owner/name"), ({TASK: "a/b/c"}, "owner/name")],
)
def test_a_wrong_data_set_is_refused(results: Results, tmp_path: Path, datasets: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        write_hub_results(results, tmp_path / "hub", datasets=datasets)


def test_the_data_set_is_read_from_what_the_run_recorded(tmp_path: Path) -> None:
    of_hub = perplexity_task("stream", CURVES["rope"], corpus="pile")
    of_hub[2]["corpus_detail"] = "NeelNanda/pile-10k:train"
    write_run(tmp_path / "run", model_record("rope"), [of_hub])
    (file,) = write_hub_results(load_results([tmp_path / "run"]), tmp_path / "hub", datasets={}).files
    assert {entry.dataset_id for entry in entries(file)} == {"NeelNanda/pile-10k"}


def test_what_lies_in_the_way_is_kept(results: Results, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="new or empty folder"):
        write_hub_results(results, tmp_path / "hub", datasets={TASK: "a/b"})
    write_hub_results(results, tmp_path / "hub", datasets={TASK: "a/b"}, replace=True)
    (aside,) = tmp_path.glob("hub.old-*")
    assert (aside / "mine.txt").read_text() == "mine"
