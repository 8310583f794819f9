"""What tasks ask of a model is counted as it is run, time follows what was measured, and the command prints both."""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus_problems import byte_level_bpe
from lm_eval.api.registry import get_model

from sbeval.__main__ import main
from sbeval.demo.evaluation import shipped_checkpoints
from sbeval.errors import UserError, time_text
from sbeval.harness.options import parse, run_options
from sbeval.inspection.command import Inspection, inspect
from sbeval.inspection.work import count_work, encode_with, make_tasks
from sbeval.model_adapters.score.nested import share_windows
from sbeval.processes.next_step import evaluation_of_folder
from tests.checkpoints.layouts import dolomite, save
from tests.model_adapters.small import TEXT, english, odd

ROPE = shipped_checkpoints()[1]
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
    work = count_work(name, task.instances, encode_with(str(ROPE)), shared)
    assert work.requests == len(task.instances) > 0
    assert work.documents == len({instance.doc_id for instance in task.instances}) <= 2
    lm = get_model("sb").create_from_arg_obj(
        {"pretrained": str(ROPE), "max_length": 1024}, {"batch_size": "auto", "max_batch_size": None, "device": "cpu"}
    )
    for kind in {instance.request_type for instance in task.instances}:
        getattr(lm, kind)([one for one in task.instances if one.request_type == kind], disable_tqdm=True)
    assert work.tokens == lm.session.meter.tokens
    assert (work.new_tokens > 0) == (name == "sb_niah_single_1")


def ask(**options: Any) -> Inspection:
    return inspect(str(ROPE), check=lambda run: False, share=share_windows, **options)


def test_running_some_documents_gives_a_time_for_every_task(text: Path) -> None:
    metadata = json.dumps({"context_lengths": LENGTHS, "data_path": str(text)})
    found = ask(tasks="sb_text_stream,sb_text_position", metadata=metadata, limit=3, measure=True)
    assert set(found.duration.model_seconds) == {"sb_text_stream", "sb_text_position"}
    assert all(seconds > 0 for seconds in found.duration.model_seconds.values())
    assert found.duration.measuring_seconds is not None
    assert found.preparing_seconds is not None
    assert [one.length_tokens for one in found.needs or ()] == LENGTHS
    said = found.to_text()
    assert "documents measured on this machine's" in said
    assert time_text(found.duration.seconds) in said
    written = json.loads(json.dumps(found.to_json()))
    assert written["tasks"][0]["tokens"] == found.work[0].tokens
    assert written["estimate"]["seconds"] == pytest.approx(found.duration.seconds)


def test_tasks_alone_are_counted_and_no_time_is_made_up(text: Path) -> None:
    found = ask(tasks="sb_text_stream", metadata=json.dumps({"context_lengths": 64, "data_path": str(text)}), limit=2)
    assert found.work is not None
    assert found.duration is None
    assert found.to_json()["tasks"][0]["seconds"] is None
    assert "--measure runs some" in found.to_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"measure": True}, "--tasks"),
        ({"memory": "lots"}, "--memory"),
        *(({"lengths": lengths}, "--lengths") for lengths in ("4096,many", "0")),
        ({"dtype": "float17"}, "--dtype"),
        ({"tasks": "sb_text_stream", "limit": -1.0}, "--limit"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ask(**options)


def test_a_wrong_extrapolation_is_refused_before_the_checkpoint_is_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="extrapolation must be one of"):
        inspect(str(tmp_path), check=lambda run: False, share=share_windows, model_args={"extrapolation": "none"})


STICKBREAKING = shipped_checkpoints()[0]


def inspected(*words: object) -> int:
    """Inspects in this process, since imports take most of the time of another one, and returns the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sbeval", "inspect", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_checkpoint_is_printed_for_readers_and_for_scripts(capfd: pytest.CaptureFixture[str]) -> None:
    words = [STICKBREAKING, "--memory", "80GiB"]
    assert inspected(*words, "--lengths", "4096,65536") == 0
    text, complaints = capfd.readouterr()
    assert complaints == ""
    assert inspected(*words, "--json") == 0
    written, complaints = capfd.readouterr()
    assert complaints == ""
    said = ("sbeval; recognised by", "stickbreaking", "4,328,640 parameters", "1,024 tokens, from", "65,536", "80.0 Gi")
    assert [fact for fact in said if fact not in text] == []
    found = json.loads(written)
    assert (found["checkpoint"]["format"], found["checkpoint"]["problems"]) == ("sbeval", [])
    assert found["memory"]["room"]["memory_bytes"] == 80 * 2**30
    assert [one["length_tokens"] for one in found["memory"]["needs"]] == [1024, 4096, 16384, 65536]
    assert found["tasks"] is None
    assert found["estimate"] is None


def test_the_next_step_runs_the_tasks_that_were_counted(text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    metadata = json.dumps({"data_path": str(text), "context_lengths": [64]})
    chosen = ["--tasks", "sb_text_stream", "--metadata", metadata, "--limit", "2", "--model_args", "dtype=float32"]
    assert inspected(STICKBREAKING, *chosen) == 0
    program, command, *options = shlex.split(next_step(capfd))
    assert (program, command) == ("sbeval", "run")
    run = run_options(vars(parse(options)))
    assert run.tasks == ["sb_text_stream"]
    assert run.metadata == {"pretrained": str(STICKBREAKING), "dtype": "float32", **json.loads(metadata)}
    assert run.limit == 2


def next_step(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().out.splitlines()[-1].removeprefix("Next: ")


def test_the_next_step_of_a_checkpoint_without_tokenizer_is_no_command_that_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    odd("llama", vocab_size=258).save_pretrained(tmp_path / "weights")
    byte_level_bpe(["abc"], 258, adds_bos=False).save_pretrained(tmp_path / "tokenizer")
    assert inspected(tmp_path / "weights") == 0
    assert next_step(capfd).startswith("mend what is missing or wrong, then sbeval run ")
    named = {"tokenizer": str(tmp_path / "tokenizer")}
    for model_args in (f"tokenizer={named['tokenizer']}", json.dumps(named)):
        assert inspected(tmp_path / "weights", "--model_args", model_args) == 0
        program, command, *options = shlex.split(next_step(capfd))
        assert (program, command) == ("sbeval", "run")
        assert run_options(vars(parse(options))).model_args == {"pretrained": str(tmp_path / "weights"), **named}
    assert inspected(tmp_path / "weights", "--model_args", "tokenizer=" + str(STICKBREAKING)) == 0  # 4,096 tokens
    assert next_step(capfd).startswith("mend what is missing or wrong, then sbeval run ")
    assert evaluation_of_folder(tmp_path / "weights").startswith("save the files of its tokenizer in ")
    assert evaluation_of_folder(tmp_path / "tokenizer").startswith("sbeval run ")


def test_what_cannot_be_loaded_is_described_with_its_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, tensors = dolomite()
    save(tmp_path, {**config, "activation_function": "mish"}, tensors)
    assert inspected(tmp_path) == 1
    text, complaints = capfd.readouterr()
    assert "cannot be loaded; recognised by model_type 'stickbreaking'" in text
    assert "'mish'" in text
    assert "Traceback" not in complaints


def test_a_self_test_is_a_table_or_says_why_there_is_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    odd("llama", vocab_size=258).save_pretrained(tmp_path)
    byte_level_bpe(["abc"], 258, adds_bos=False).save_pretrained(tmp_path)
    assert inspected(tmp_path, "--self-test") == 0
    lines = capfd.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("Self-test: how logits differ"))
    assert len([line for line in lines[first:] if " passed " in line]) == 10
    assert inspected(ROPE, "--self-test", "--json") == 0
    assert json.loads(capfd.readouterr().out)["self_test"]["untested"] == "it is of this project's own family"
