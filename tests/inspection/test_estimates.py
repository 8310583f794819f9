"""What tasks ask of a model is counted as it is run, and time follows what was measured."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.registry import get_model

from sbeval.demo.evaluation import shipped_checkpoints
from sbeval.errors import UserError
from sbeval.inspection.command import Question, inspect
from sbeval.inspection.description import describe
from sbeval.inspection.duration import by_results, operations
from sbeval.inspection.text import Inspection
from sbeval.inspection.work import Encode, Piece, TaskWork, count_work, make_tasks
from sbeval.model_adapters.sharing import share_windows
from sbeval.results.digits import time_text
from sbeval.results.records import ModelRecord, TaskRecord
from tests.model_adapters.small import TEXT, english

ROPE = shipped_checkpoints()[1]
SIZES = describe(ROPE).sizes
assert SIZES is not None
LENGTHS = [32, 64, 128]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A text of some thousand tokens, and a cache of its own."""
    folder = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SBEVAL_CACHE", str(folder / "cache"))
        (folder / "text.txt").write_text((english() + TEXT) * 12)
        yield folder / "text.txt"


def shared(windows: Any) -> Any:
    return [window.run for window in share_windows(windows, nested=True)]


TASKS = ["sb_text_stream", "sb_text_fixed_target", "sb_flipflop", "sb_span", "sb_niah_single_1"]


@pytest.mark.parametrize("name", TASKS)
def test_tokens_are_those_that_the_model_reads(name: str, text: Path) -> None:
    lengths = [512] if name == "sb_niah_single_1" else LENGTHS
    own = {} if name in ("sb_flipflop", "sb_niah_single_1") else {"data_path": str(text)}
    metadata = {"pretrained": str(ROPE), "context_lengths": lengths, "num_samples": 2, "max_length": 1024, **own}
    task = make_tasks([name], metadata, folders=[], limit=2, packaged=True)[name]
    work = count_work(name, task.instances, Encode(str(ROPE)), shared)
    assert work.requests == len(task.instances) > 0
    assert work.documents == len({instance.doc_id for instance in task.instances}) <= 2
    lm = get_model("sb").create_from_arg_obj(
        {"pretrained": str(ROPE), "max_length": 1024}, {"batch_size": "auto", "max_batch_size": None, "device": "cpu"}
    )
    for kind in {instance.request_type for instance in task.instances}:
        getattr(lm, kind)([one for one in task.instances if one.request_type == kind], disable_tqdm=True)
    assert work.tokens == lm.session.meter.tokens
    assert (work.new_tokens > 0) == (name == "sb_niah_single_1")


def results_file(folder: Path, rate: float | None, skip_threshold: float | None, lengths: list[int]) -> Path:
    record = ModelRecord.from_json(
        {
            **dict.fromkeys(field.name for field in dataclasses.fields(ModelRecord)),
            "name": "rope",
            "dtype": "float32",
            "parameters": SIZES.parameters,
            "tokens_per_second": rate,
            "skip_threshold": skip_threshold,
        }
    )
    task = TaskRecord(family="perplexity", protocol="stream", lengths=lengths)
    file = folder / "results.json"
    configs = {"sb_text_stream": {"metadata": {"sbeval": task.to_json()}}}
    file.write_text(json.dumps({"config": {"sbeval": record.to_json()}, "configs": configs}))
    return file


def work_of(*lengths: int) -> TaskWork:
    pieces = {Piece("token_logprobs", length): 4096 // length for length in lengths}
    return TaskWork(task="sb_text_stream", documents=1, requests=sum(pieces.values()), pieces=pieces)


def test_the_same_lengths_take_their_tokens_at_the_recorded_throughput(tmp_path: Path) -> None:
    work = work_of(512, 2048)
    for skip_threshold in (None, 1e-5):
        found = by_results(results_file(tmp_path, 1000.0, skip_threshold, [512, 2048]), [work], SIZES)
        assert found.seconds == pytest.approx(work.tokens / 1000)


def test_longer_windows_take_longer_unless_keys_were_skipped(tmp_path: Path) -> None:
    long = work_of(4096)
    whole = by_results(results_file(tmp_path, 1000.0, None, [512]), [long], SIZES)
    skipped = by_results(results_file(tmp_path, 1000.0, 1e-5, [512]), [long], SIZES)
    assert whole.seconds > 1.5 * long.tokens / 1000
    assert skipped.seconds == pytest.approx(long.tokens / 1000)


def test_a_throughput_of_a_model_of_another_size_is_refused(tmp_path: Path) -> None:
    file = results_file(tmp_path, 1000.0, None, [512])
    with pytest.raises(UserError, match="parameters"):
        by_results(file, [work_of(512)], dataclasses.replace(SIZES, parameters=1 + SIZES.parameters))


@given(tokens=st.integers(1, 2**20), attention=st.booleans())
def test_operations_grow_at_least_with_the_tokens(tokens: int, attention: bool) -> None:
    one, two = (operations(SIZES, length, attention=attention) for length in (tokens, 2 * tokens))
    assert two >= 2 * one > 0


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"config": []}', '{"config": {"sbeval": {"name": 3}}}', None])
def test_a_file_without_a_throughput_is_one_sentence(content: str | None, tmp_path: Path) -> None:
    if content is None:
        file = results_file(tmp_path, None, None, [512])
    else:
        file = tmp_path / "results.json"
        file.write_text(content)
    with pytest.raises(UserError, match="Expected"):
        by_results(file, [work_of(512)], SIZES)


def ask(**options: Any) -> Inspection:
    return inspect(str(ROPE), Question(**options), check=lambda run: False, share=share_windows)


def test_running_some_documents_gives_a_time_for_every_task(text: Path) -> None:
    metadata = json.dumps({"context_lengths": LENGTHS, "data_path": str(text)})
    found = ask(tasks="sb_text_stream,sb_text_position", metadata=metadata, limit=3, measure=True)
    assert found.duration is not None
    assert found.work is not None
    assert set(found.duration.model_seconds) == {"sb_text_stream", "sb_text_position"}
    assert all(seconds > 0 for seconds in found.duration.model_seconds.values())
    assert found.duration.measuring_seconds is not None
    assert found.preparing_seconds is not None
    assert [one.length_tokens for one in found.needs or ()] == LENGTHS
    said = found.to_text()
    assert "a measurement on this machine's" in said
    assert time_text(found.duration.seconds) in said
    written = json.loads(json.dumps(found.to_json()))
    assert written["tasks"][0]["tokens"] == found.work[0].tokens
    assert written["estimate"]["seconds"] == pytest.approx(found.duration.seconds)


def test_tasks_alone_are_counted_and_no_time_is_made_up(text: Path) -> None:
    found = ask(tasks="sb_text_stream", metadata=json.dumps({"context_lengths": 64, "data_path": str(text)}), limit=2)
    assert found.work is not None
    assert found.duration is None
    assert found.to_json()["tasks"][0]["seconds"] is None
    assert "--measured" in found.to_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"measure": True}, "--tasks"),
        ({"measured": Path("results.json")}, "--tasks"),
        ({"tasks": "sb_text_stream", "measure": True, "measured": Path("results.json")}, "found both"),
        ({"memory": "lots"}, "--memory"),
        ({"lengths": "4096,many"}, "--lengths"),
        ({"lengths": "0"}, "--lengths"),
        ({"dtype": "float17"}, "--dtype"),
        ({"tasks": "sb_text_stream", "limit": -1.0}, "--limit"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ask(**options)
