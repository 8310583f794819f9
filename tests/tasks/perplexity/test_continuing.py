"""A run with other lengths in a folder of finished results scores the targets of these, or says why it does not."""

import json
from pathlib import Path
from typing import Any

import pytest
from corpus_problems import tiny_gpt2, tiny_tokenizer, write_folder

from sbeval.commands.cli import check_run
from sbeval.commands.cli import find_finished as find_finished_of
from sbeval.errors import UserError
from sbeval.harness.run import run
from sbeval.reports.build import load_results
from sbeval.tasks.perplexity.continuing import Continuations, find_finished

TASK = "sb_text_fixed_target"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "texts", [80 + 7 * index for index in range(24)])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tiny_gpt2(tmp_path / "model", positions=128)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def evaluate(model: Path, texts: Path, lengths: list[int], output: Path, **more: Any) -> None:
    metadata = {"data_path": str(texts), "context_lengths": lengths, **more}
    options = ["--metadata", json.dumps(metadata), "--tasks", TASK, "--device", "cpu"]
    run(["--model_args", f"pretrained={model}", *options, "--output_path", str(output)], check_run, find_finished_of)


def curve(output: Path) -> dict[tuple[str, int], tuple[float, ...]]:
    table = load_results(output).measurements
    table = table[table["metric"] == "nll"]
    columns = ["task", "context_length_tokens", "value", "ci95_low", "ci95_high", "clusters"]
    return {(task, int(length)): tuple(numbers) for task, length, *numbers in table[columns].itertuples(index=False)}


def test_a_length_added_in_the_same_folder_gives_the_curve_of_one_run(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(model, texts, [16, 32, 64], tmp_path / "whole")
    evaluate(model, texts, [16, 64], tmp_path / "added")
    assert TASK not in capsys.readouterr().out.partition("NLL in nats")[0]
    evaluate(model, texts, [32], tmp_path / "added")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{TASK}: continues ")]
    assert len(said) == 1
    assert "16 and 64 tokens" in said[0]
    assert '"continues": "none"' in said[0]
    evaluate(model, texts, [24], tmp_path / "added")  # continues a run that continued another
    evaluate(model, texts, [16, 24, 32, 64], tmp_path / "all")
    added, whole = curve(tmp_path / "added"), curve(tmp_path / "all")
    assert {length for _, length in added} == {16, 24, 32, 64}
    assert added.keys() == whole.keys()
    for length, numbers in added.items():
        assert numbers == pytest.approx(whole[length], rel=1e-6)  # batches of other sizes round differently


# a results file of a run with [16, 64], of which only what a later run looks at is written
ARGUMENTS = {"pretrained": "owner/model", "dtype": "float32"}
RECORD = {"protocol": "fixed_target", "lengths": [16, 64], "room_tokens": 64, "targets_per_window": 8}


def finished(folder: Path, texts: Path, *, record: dict[str, Any] | None = None, **metadata: Any) -> Path:
    file = folder / "owner__model" / "results_2026-01-01T00-00-00.000000.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {**RECORD, "targets_sha256": "a", "corpus_sha256": text_sha256(texts), **(record or {})}
    configs = {TASK: {"metadata": {"data_path": str(texts), **metadata, "sbeval": kept}}}
    config = {"model": "sb", "model_args": ARGUMENTS, "limit": None}
    file.write_text(json.dumps({"results": {}, "configs": configs, "config": config}))
    return file


def text_sha256(texts: Path) -> str:
    from sbeval.corpora import corpus_sha256, local_corpus

    return corpus_sha256(local_corpus(texts, name="texts"))


def found(folder: Path, texts: Path, lengths: list[int] | None, **more: Any) -> Continuations:
    chosen = {"tasks": [TASK], "model": "sb", "model_args": ARGUMENTS, "limit": None}
    chosen |= {key: more.pop(key) for key in list(more) if key in chosen}
    metadata = {"data_path": str(texts), **({"context_lengths": lengths} if lengths else {}), **more}
    return find_finished(**chosen, metadata=metadata, output_path=str(folder))


@pytest.mark.parametrize("lengths", [[32], [16], [8, 64], [16, 32, 48]], ids=str)
def test_finished_results_with_other_lengths_are_continued(lengths: list[int], texts: Path, tmp_path: Path) -> None:
    file = finished(tmp_path / "out", texts)
    answer = found(tmp_path / "out", texts, lengths)
    assert answer.files == {TASK: file}
    assert len(answer.sentences) == 1


@pytest.mark.parametrize(
    ("lengths", "other_end"), [([16, 64, 256], "longest"), ([4, 16, 64], "shortest")], ids=lambda value: str(value)
)
def test_a_run_at_all_finished_lengths_says_that_its_targets_are_others(
    lengths: list[int], other_end: str, texts: Path, tmp_path: Path
) -> None:
    file = finished(tmp_path / "out", texts)
    answer = found(tmp_path / "out", texts, lengths)
    assert answer.files == {}
    (sentence,) = answer.sentences
    assert str(file) in sentence
    assert f"its {other_end} context length differs" in sentence


@pytest.mark.parametrize("lengths", [[16, 64], [16, 32, 64]], ids=str)
def test_a_run_at_all_finished_lengths_with_the_same_targets_replaces_them_in_silence(
    lengths: list[int], texts: Path, tmp_path: Path
) -> None:
    finished(tmp_path / "out", texts)
    assert found(tmp_path / "out", texts, lengths) == Continuations({}, [])


@pytest.mark.parametrize(
    ("lengths", "words"),
    [([128], "at most 64 tokens, found 128"), ([4, 32], "at least 8 tokens, found 4")],
    ids=["no room", "fewer tokens than targets"],
)
def test_a_length_that_finished_targets_cannot_have_is_refused_with_all_lengths_to_type(
    lengths: list[int], words: str, texts: Path, tmp_path: Path
) -> None:
    finished(tmp_path / "out", texts)
    with pytest.raises(UserError, match=words) as refused:
        found(tmp_path / "out", texts, lengths)
    assert f'"context_lengths": {sorted({16, 64, *lengths})}' in str(refused.value)
    assert '"continues": "none"' in str(refused.value)
    assert found(tmp_path / "out", texts, lengths, continues="none") == Continuations({}, [])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"limit": 40}, "--limit was not given there and is 40 here"),
        ({"seed": 7}, "seed was 1234 there and is 7 here"),
        ({"blocks_per_document": 2}, "blocks_per_document was 4"),
        ({"targets_per_window": 4}, "targets_per_window was 8 there and is 4 here"),
        ({"bos": "window"}, "bos was None there"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_chooses_other_targets_is_named(more: dict[str, Any], words: str, texts: Path, tmp_path: Path) -> None:
    finished(tmp_path / "out", texts)
    answer = found(tmp_path / "out", texts, [32], **more)
    assert not answer.files
    assert words in answer.sentences[0]


@pytest.mark.parametrize(
    "more",
    [
        {"model_args": {"pretrained": "owner/other"}},
        {"model_args": {**ARGUMENTS, "rope_scaling": "dynamic:4"}},
        {"model": "hf"},
        {"label": "mine"},
        {"tasks": ["sb_text_stream"]},
        {"continues": "none"},
    ],
    ids=str,
)
def test_another_model_or_task_is_left_alone_in_silence(more: dict[str, Any], texts: Path, tmp_path: Path) -> None:
    finished(tmp_path / "out", texts)
    assert found(tmp_path / "out", texts, [32], **more) == Continuations({}, [])


def test_a_text_is_known_by_its_content(texts: Path, tmp_path: Path) -> None:
    file = finished(tmp_path / "out", texts)
    moved = texts.rename(tmp_path / "elsewhere")
    assert found(tmp_path / "out", moved, [32]).files == {TASK: file}
    next(moved.iterdir()).write_text("another text")
    assert found(tmp_path / "out", moved, [32]) == Continuations({}, [])


def test_a_protocol_that_cannot_be_continued_says_so(texts: Path, tmp_path: Path) -> None:
    finished(tmp_path / "out", texts, record={"protocol": "riffled", "room_tokens": None})
    (sentence,) = found(tmp_path / "out", texts, [128]).sentences
    assert "only fixed_target can" in sentence
    assert "[16, 64, 128]" in sentence


def test_files_that_are_no_results_are_passed_over(texts: Path, tmp_path: Path) -> None:
    file = finished(tmp_path / "out", texts)
    for number, text in enumerate(["", "[]", "{}", '{"configs": [], "config": {}}', '{"configs": {"a": 1}}']):
        (file.parent / f"results_2026-02-0{number + 1}T00-00-00.000000.json").write_text(text)
    assert found(tmp_path / "out", texts, [32]).files == {TASK: file}
    assert find_finished(
        [TASK], model="sb", model_args={}, metadata={}, limit=None, output_path="no/such"
    ) == Continuations({}, [])


def test_lengths_by_default_are_said_to_continue_nothing(texts: Path, tmp_path: Path) -> None:
    finished(tmp_path / "out", texts)
    (sentence,) = found(tmp_path / "out", texts, None).sentences
    assert "sets no context_lengths" in sentence
