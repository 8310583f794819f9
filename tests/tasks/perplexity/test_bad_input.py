"""A mistake of the user gives a clear error that names the task, what is wrong, and what would work."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_problems import WIKITEXT_FILE, KnownLM, run_task, tiny_tokenizer, write_folder
from lm_eval.tasks import TaskManager

from sbeval import plugin, registered
from sbeval.corpora.local import local_corpus
from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.scoring.requests import TokenLogprobs
from sbeval.tasks.perplexity import inputs
from sbeval.tasks.perplexity.options import CorpusOptions
from sbeval.tasks.user_options import check_options


@pytest.fixture
def metadata(tmp_path: Path) -> dict[str, Any]:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    folder = write_folder(tmp_path / "texts", [50, 60, 70])
    return {"tokenizer": str(tmp_path / "tokenizer"), "data_path": str(folder), "context_lengths": [8, 16]}


@pytest.mark.parametrize(
    ("task", "choices", "message"),
    [
        ("stream", {"context_lengths": [8, 4096]}, "length of 4096 tokens"),
        ("fixed_target", {"context_lengths": [8, 512]}, "stream"),
        ("position", {"context_lengths": [100000]}, "100000"),
        ("stream", {"context_lengths": [8, 12, 16]}, "divide the longest, 16"),
        ("stream", {"context_lengths": [0]}, "positive"),
        ("stream", {"context_lengths": "8;16"}, "list"),
        ("stream", {"context_lengths": []}, "list"),
        ("stream", {"context_lengths": [8, 16], "max_length": 12}, "max_length=12"),
        ("stream", {"context_lengths": None}, "context_lengths"),
        ("stream", {"bos": "always"}, "one of text, window"),
        ("stream", {"separator": 3}, "separator"),
        ("fixed_target", {"targets_per_window": 9}, "found 9"),
        ("fixed_target", {"targets_per_window": 0}, "targets_per_window"),
        ("fixed_target", {"context": "page"}, "one of document, stream"),
        ("sliding", {"stride": 0}, "stride"),
        ("sliding", {"stride": 12}, "stride of at most the context length 8"),
        ("sliding", {"stride": 3}, "divides the longest, 16"),
        ("stream_long", {"context_lengths": [8, 512]}, "length of 512 tokens"),
        ("rolling", {"data_path": "/nowhere/at/all"}, "nowhere"),
        ("rolling", {"tokenizer": "/nowhere/tokenizer"}, "nowhere"),
        ("rolling", {"tokenizer": None}, "pretrained"),
        ("rolling", {"seed": -1}, "seed"),
        ("stream", {"protocol": "rolling"}, "the task's name decides its protocol"),
        ("sliding", {"sb_stdlib_sliding": {"stride": 0}}, "Expected stride of sb_stdlib_sliding to be a whole number"),
        ("sliding", {"sb_stdlib_sliding": {"strid": 8}}, "unknown key 'strid' in --metadata: did you mean 'stride'"),
        ("sliding", {"sb_stdlib_sliding": 8}, 'found 8: write --metadata .{"sb_stdlib_sliding": {...}}.'),
        ("stream", {"sb_stdlib_streem": {"seed": 1}}, "found sb_stdlib_streem; did you mean"),
        ("stream", {"context_length": [8]}, "expected context_lengths in --metadata, found context_length"),
    ],
)
def test_choices_that_cannot_work(metadata: dict[str, Any], task: str, choices: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        run_task(f"sb_stdlib_{task}", KnownLM(), metadata | choices)
    assert f"sb_stdlib_{task}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("sb_wikitext_streem", "try sb_wikitext_stream,"), ("sb_homer_rolling", "sb_"), ("sb_pg19_strided", "sb_pg19_")],
)
def test_an_unknown_protocol_or_corpus_is_answered_with_those_there_are(name: str, message: str) -> None:
    plugin.install()
    manager = TaskManager(include_path=str(registered.tasks_folder()), include_defaults=False)
    with pytest.raises(UserError, match=message) as error:
        manager.match_tasks([name])
    assert repr(name) in str(error.value)
    assert manager.match_tasks(["hellaswagg"]) == [], "other names stay lm-eval's own"
    assert manager.match_tasks(["sb_wikitext*"])


def test_a_text_must_be_named_where_the_corpus_is_the_users(metadata: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="data_path"):
        run_task("sb_text_stream", KnownLM(), metadata | {"data_path": None})


def test_a_non_finite_answer_names_token_and_length(metadata: dict[str, Any]) -> None:
    class Broken(KnownLM):
        def token_logprobs(self, requests: list[Any]) -> list[TokenLogprobs]:
            answers = super().token_logprobs(requests)
            answers[-1].logprobs[4] = np.nan
            return answers

    with pytest.raises(UserError, match="token 5 of a window of 16"):
        run_task("sb_stdlib_stream", Broken(), metadata | {"context_lengths": [16]})


def test_fewer_blocks_than_processes(metadata: dict[str, Any]) -> None:
    model = KnownLM()
    model._world_size = 64
    with pytest.raises(UserError, match="64 processes"):
        run_task("sb_stdlib_position", model, metadata, limit=2)


def test_a_tokenizer_without_eos_needs_a_separator(metadata: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer.__wrapped__()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="separator"):
        run_task("sb_stdlib_stream", KnownLM(), metadata | {"tokenizer": str(tmp_path / "bare")})
    found = run_task("sb_stdlib_stream", KnownLM(), metadata | {"tokenizer": str(tmp_path / "bare"), "separator": "\n"})
    assert found["record"]["separator"] == "\n"


@pytest.mark.parametrize("task", ["wikitext", "stdlib", "pile", "pg19", "text"])
@pytest.mark.parametrize(
    ("file", "name"), [("mine.txt", "mine"), ("wikitext", "texts/wikitext"), ("wikitext.txt", "texts/wikitext")]
)
def test_a_local_text_has_its_files_name(task: str, file: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "texts" / file
    path.parent.mkdir()
    path.write_text("Some text of mine.\n")
    assert inputs.load_corpus(task, CorpusOptions(data_path=path), None).name == name


def test_what_is_read_by_default_has_the_tasks_name() -> None:
    for task in ("wikitext", "stdlib", "pile", "pg19"):
        assert inputs.load_corpus(task, CorpusOptions(), None).name == task
    assert inputs.load_corpus("pile", CorpusOptions(dataset="owner/name"), None).name == "owner/name"


def test_a_copy_of_wikitext_is_wikitext_and_a_changed_one_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "wiki.test.raw"
    copy.write_bytes(WIKITEXT_FILE.read_bytes().replace(b"\n", b"\r\n"))
    monkeypatch.setattr(inputs, "_WIKITEXT_WORDS_SHA256", inputs.words_sha256(WIKITEXT_FILE))
    assert inputs.load_corpus("wikitext", CorpusOptions(data_path=copy), None).name == "wikitext"
    copy.write_bytes(copy.read_bytes() + b"One word more.\n")
    assert inputs.load_corpus("wikitext", CorpusOptions(data_path=copy), None).name == "wiki.test.raw"


def test_a_missing_text_is_one_sentence_before_and_while_it_is_read() -> None:
    with pytest.raises(UserError) as checked:
        check_options((), {"data_path": "~/no/such/text"})
    with pytest.raises(UserError) as read:
        local_corpus(local_path("~/no/such/text"))
    assert str(checked.value) == str(read.value)
