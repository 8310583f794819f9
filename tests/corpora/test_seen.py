"""Documents a model was trained on are known by their tokens, however its training text was cut."""

import numpy as np
import pytest
from corpus_problems import corpus_of, random_text, tiny_tokenizer

from sbeval.corpora import Layout, TokenizedCorpus, seen, store, tokenize_corpus
from sbeval.corpora.seen import seen_documents, write_training_spans
from sbeval.training.windows import TrainingWindows

TEXTS = [random_text(400, seed) for seed in range(6)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_open", {})


@pytest.fixture
def corpus(cache) -> TokenizedCorpus:
    return tokenize_corpus(corpus_of(TEXTS), tiny_tokenizer(), Layout((0,)))


def tokens_of(*texts: str) -> np.ndarray:
    return np.array([token for text in texts for token in [*tiny_tokenizer().encode(text), 0]], np.uint16)


@pytest.mark.parametrize("at_once", [1 << 24, 100])
@pytest.mark.parametrize(
    ("trained_on", "documents"),
    [
        (TEXTS[:2], [0, 1]),
        ([TEXTS[3] + TEXTS[4]], [3, 4]),
        ([TEXTS[5][:1000], TEXTS[5][1000:]], [5]),
        ([TEXTS[2][: len(TEXTS[2]) // 8]], []),
        ([random_text(900, 9)], []),
        ([], []),
    ],
)
def test_documents_trained_on_are_named_and_no_others(tmp_path, corpus, trained_on, documents, at_once, monkeypatch):
    monkeypatch.setattr(seen, "_AT_ONCE_TOKENS", at_once)
    write_training_spans([tokens_of(text) for text in trained_on], corpus.tokenizer_sha256, tmp_path)
    assert seen_documents(tmp_path, corpus, range(6)) == [corpus.names[document] for document in documents]


def test_a_model_has_seen_what_its_parent_has_and_a_very_long_text_keeps_fewer_spans(tmp_path, corpus, monkeypatch):
    (child := tmp_path / "child").mkdir()
    write_training_spans([tokens_of(TEXTS[0])], corpus.tokenizer_sha256, tmp_path)
    write_training_spans([tokens_of(TEXTS[1])], corpus.tokenizer_sha256, child, parent=tmp_path)
    assert seen_documents(child, corpus, range(6)) == corpus.names[:2]
    spans = len(seen.span_hashes(tokens_of(*TEXTS)))
    monkeypatch.setattr(seen, "MOST_SPANS", 3 * spans // 4)
    write_training_spans([tokens_of(*TEXTS)], corpus.tokenizer_sha256, child)
    assert (child / f"training_text-{corpus.tokenizer_sha256[:16]}.u64").stat().st_size == 8 * (3 * spans // 4)
    assert seen_documents(child, corpus, range(6)) == corpus.names


def test_where_nothing_is_recorded_nothing_is_said(tmp_path, corpus):
    assert seen_documents(tmp_path, corpus, range(6)) is None
    write_training_spans([tokens_of(*TEXTS)], "another tokenizer's", tmp_path)
    assert seen_documents(tmp_path, corpus, range(6)) is None


def test_a_run_of_less_than_an_epoch_has_seen_what_it_read(tmp_path, corpus):
    tokens, none = tokens_of(*TEXTS), np.empty((0, 1), np.uint16)
    windows = TrainingWindows(tokens, none, length_tokens=100, windows=5, seed=0)
    write_training_spans(windows.visited(), corpus.tokenizer_sha256, tmp_path)
    assert len(seen_documents(tmp_path, corpus, range(6)) or ()) <= 1
    (whole,) = TrainingWindows(tokens, none, length_tokens=100, windows=400, seed=0).visited()
    assert whole is tokens
