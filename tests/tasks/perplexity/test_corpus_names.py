"""A corpus is named by what was read, whatever the task is called."""

from pathlib import Path

import pytest
from corpus_problems import WIKITEXT_FILE

from sbeval.tasks.perplexity import inputs
from sbeval.tasks.perplexity.options import CorpusOptions


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


def test_a_local_copy_of_wikitext_is_wikitext_and_a_changed_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "wiki.test.raw"
    copy.write_bytes(WIKITEXT_FILE.read_bytes().replace(b"\n", b"\r\n"))
    monkeypatch.setattr(inputs, "_WIKITEXT_WORDS_SHA256", inputs.words_sha256(WIKITEXT_FILE))
    assert inputs.load_corpus("wikitext", CorpusOptions(data_path=copy), None).name == "wikitext"
    copy.write_bytes(copy.read_bytes() + b"One word more.\n")
    assert inputs.load_corpus("wikitext", CorpusOptions(data_path=copy), None).name == "wiki.test.raw"
