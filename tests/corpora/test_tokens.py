"""The flat token array: whole documents, exact shares of words and bytes, and keys that any process resolves."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import corpus_problems
import numpy as np
import pytest
from corpus_problems import EOS, corpus_of, random_text, tiny_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sbeval.corpora import (
    Layout,
    TokenizedCorpus,
    count_words,
    documents,
    encode,
    make_document,
    resolve_tokens,
    store,
    token_key,
    tokenize_corpus,
    tokenizer_sha256,
)
from sbeval.corpora.encode import encode_documents, words_and_bytes_before
from sbeval.corpora.tokenizers import load_tokenizer
from sbeval.errors import UserError
from sbeval.tasks.tokens import model_tokenizer

TEXTS = [random_text(60, 1), "é", random_text(20, 2), "  leading and trailing \n", random_text(90, 3)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "_open", {})
    return tmp_path


@pytest.mark.parametrize("batch_characters", [1, 100, 10**6])
def test_each_document_is_its_encoding_then_a_separator(batch_characters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BATCH_CHARACTERS", batch_characters)
    tokenizer = tiny_tokenizer()
    corpus = tokenize_corpus(corpus_of(TEXTS), tokenizer, Layout((EOS, 7)))
    expected = [token for text in TEXTS for token in [*tokenizer.encode(text), EOS, 7]]
    assert corpus.tokens(0, corpus.total_tokens).tolist() == expected
    for index, text in enumerate(TEXTS):
        assert corpus.tokens(int(corpus.starts[index]), int(corpus.stops[index])).tolist() == tokenizer.encode(text)
    for start in range(0, corpus.total_tokens, 37):
        stop = min(start + 50, corpus.total_tokens)
        assert corpus.tokens(start, stop).tolist() == expected[start:stop]
    with pytest.raises(ValueError, match="range"):
        corpus.tokens(0, corpus.total_tokens + 1)


def test_special_tokens_are_lm_evals_and_shared_where_there_are_none() -> None:
    plain, adding = tiny_tokenizer(), tiny_tokenizer(adds_bos=True)
    layout = Layout((EOS,), special_tokens=True)
    with_bos = tokenize_corpus(corpus_of(["a fox", "<s>a fox"]), adding, layout)
    assert with_bos.tokens(0, with_bos.total_tokens).tolist() == 2 * [*adding.encode("a fox"), EOS]
    assert tokenize_corpus(corpus_of(TEXTS), plain, layout) is tokenize_corpus(corpus_of(TEXTS), plain, Layout((EOS,)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(text=st.text(min_size=1), cut=st.floats(0, 1), adds_bos=st.booleans())
def test_tokens_share_out_exactly_the_words_and_bytes_of_their_page(text: str, cut: float, adds_bos: bool) -> None:
    layout = Layout((EOS,), special_tokens=adds_bos)
    corpus = tokenize_corpus(corpus_of([text, "next"]), tiny_tokenizer(adds_bos=adds_bos), layout)
    stop = int(corpus.starts[1])
    nll = np.ones(corpus.total_tokens)
    middle = int(cut * stop)
    parts = [*corpus.document_sums(0, nll[:middle]), *corpus.document_sums(middle, nll[middle:])]
    first = [part for part in parts if part.document == 0]
    assert sum(part.tokens for part in first) == stop
    assert sum(part.bytes for part in first) == pytest.approx(len(text.encode()))
    assert sum(part.words for part in first) == pytest.approx(float(corpus.original_words[0]))
    assert sum(part.nll_nats for part in parts) == pytest.approx(corpus.total_tokens)


def test_a_tokens_bytes_are_those_of_its_text() -> None:
    corpus = tokenize_corpus(corpus_of(["the é 😀 fox"]), tiny_tokenizer(), Layout())
    ids, fox = tiny_tokenizer()(["the é 😀 fox", " fox"])["input_ids"]
    tail = corpus.document_sums(len(ids) - len(fox), np.ones(len(fox)))[0]
    assert (tail.bytes, tail.words) == (4.0, 1.0)


@settings(max_examples=200, deadline=None)
@given(
    text=st.one_of(st.text(), st.text("ab \n\t\x1c"), st.text("a \x85\xa0é\u2003\u3000\u3001\U0001f600")),
    data=st.data(),
)
def test_words_begin_where_a_split_at_white_space_puts_them(text: str, data: st.DataObject) -> None:
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    words, sizes = words_and_bytes_before(text, np.asarray(ends, np.int64))
    gaps = [match.start() for match in re.finditer(r"\s+", text)]
    assert words.tolist() == [sum(gap < end for gap in gaps) for end in ends]
    assert sizes.tolist() == [len(text[:end].encode()) for end in ends]


def test_a_slow_tokenizer_has_no_shares_but_has_tokens() -> None:
    class Slow:
        is_fast = False
        bos_token = eos_token = None
        bos_token_id = eos_token_id = None

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def encode(self, text: str) -> list[int]:
            return [ord(character) for character in text]

        def __call__(self, texts: list[str], **options: object) -> dict[str, list[list[int]]]:
            return {"input_ids": [self.encode(text) for text in texts]}

    corpus = tokenize_corpus(corpus_of(["abc"]), Slow(), Layout())
    (part,) = corpus.document_sums(0, np.ones(2))
    assert part.tokens == 2
    assert np.isnan(part.words)
    assert np.isnan(part.bytes)
    assert corpus.original_bytes.tolist() == [3]


def test_a_second_run_reads_what_the_first_one_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    first = tokenize_corpus(corpus_of(TEXTS), tiny_tokenizer(), Layout((EOS,)))
    monkeypatch.setattr(store, "_open", {})
    monkeypatch.setattr(store, "encode_documents", None)
    second = tokenize_corpus(corpus_of(TEXTS), tiny_tokenizer(), Layout((EOS,)))
    assert second is not first
    assert second.names == first.names
    assert np.array_equal(second.tokens(0, second.total_tokens), first.tokens(0, first.total_tokens))


@pytest.mark.exhaustive
def test_another_process_resolves_a_key_and_tokenises_in_parallel_although_lm_eval_turned_that_off(cache: Path) -> None:
    corpus = tokenize_corpus(corpus_of(TEXTS), tiny_tokenizer(), Layout((EOS,)))
    key = token_key(corpus, 11, 60)
    program = """
import os, sys
from pathlib import Path
from corpus_problems import corpus_of, random_text, tiny_tokenizer
from sbeval.corpora import Layout, resolve_tokens, tokenize_corpus

def threads():
    return len(list(Path("/proc/self/task").iterdir()))

tokenizer = tiny_tokenizer()
texts = [random_text(200, seed) for seed in range(50)]
tokenizer(texts)
before = threads()
tokenize_corpus(corpus_of(texts), tokenizer, Layout())
print(before, threads(), os.environ["TOKENIZERS_PARALLELISM"], *resolve_tokens(sys.argv[1]))
"""
    environment = os.environ | {
        "SBEVAL_CACHE": str(cache),
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "3",
        "PYTHONPATH": str(Path(corpus_problems.__file__).parent),
    }
    command = [sys.executable, "-c", program, key]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    before, after, setting, *tokens = other.stdout.split()
    assert [*map(int, tokens)] == resolve_tokens(key).tolist() == corpus.tokens(11, 60).tolist()
    assert int(after) >= int(before) + 3
    assert setting == "false"


def test_keys_differ_by_corpus_tokenizer_and_layout() -> None:
    keys = {
        token_key(tokenize_corpus(corpus_of(texts), tiny_tokenizer(adds_bos=bos), Layout(separator)), 0, 2)
        for texts in (TEXTS, TEXTS[:3])
        for bos in (False, True)
        for separator in ((), (EOS,), tuple(range(30)))
    }
    assert len(keys) == 12
    assert len({tokenizer_sha256(tiny_tokenizer(adds_bos=bos)) for bos in (False, True)}) == 2


CODE = """from transformers import PreTrainedTokenizerFast
from .cases import change
class Tok(PreTrainedTokenizerFast):
    def _encode_plus(self, text, *args, **options):
        return super()._encode_plus([change(each) for each in text], *args, **options)
"""
KEEPS, LOWERS = (f"def change(text): return text{method}\n" for method in ("", ".lower()"))


@pytest.mark.parametrize(
    ("changed", "same"),
    [({"cases.py": LOWERS}, False), ({"tok.py": CODE.replace("(each)", "(2 * each)")}, False), ({"a.md": "b"}, True)],
)
def test_tokens_that_own_code_cut_are_kept_by_that_code(changed: dict[str, str], same: bool, tmp_path: Path) -> None:
    def kept(folder: Path, **files: str) -> TokenizedCorpus:
        tiny_tokenizer().save_pretrained(folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": "Tok"}
        settings |= {"auto_map": {"AutoTokenizer": [None, "tok.Tok"]}, "model_max_length": len(folder.name)}
        for name, text in {"tokenizer_config.json": json.dumps(settings), **files}.items():
            (folder / name).write_text(text)
        return tokenize_corpus(corpus_of(["A Fox"]), load_tokenizer(folder, trust_remote_code=True), Layout())

    first, second = (
        kept(tmp_path / folder, **{"tok.py": CODE, "cases.py": KEEPS, **files})
        for folder, files in (("first", {}), ("other", changed))
    )
    assert (first is second) == same
    assert (first.tokens(0, first.total_tokens).tolist() == second.tokens(0, second.total_tokens).tolist()) == same
    # a task loads it as the model's adapter does
    of_task = model_tokenizer({"pretrained": str(tmp_path / "first"), "trust_remote_code": True}, "task")
    assert tokenizer_sha256(of_task) == tokenizer_sha256(load_tokenizer(tmp_path / "first", trust_remote_code=True))


SLOW = """from transformers import PreTrainedTokenizer
class Tok(PreTrainedTokenizer):
    vocab_size = 2
    def get_vocab(self): return {"a": 0, "b": 1}
    def _tokenize(self, text): return list(text)
    def _convert_token_to_id(self, token): return self.get_vocab().get(token, 0)
    def _convert_id_to_token(self, index): return "ab"[index]
"""


def test_a_slow_tokenizer_beside_a_fast_one_has_one_hash_in_two_folders(tmp_path: Path) -> None:
    settings = json.dumps({"tokenizer_class": "Tok", "auto_map": {"AutoTokenizer": ["tok.Tok", None]}})
    hashes = []
    for folder, added in (("first", []), ("second", []), ("other", [{"id": 2, "content": "x"}])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tok.py").write_text(SLOW)
        (tmp_path / folder / "tokenizer_config.json").write_text(settings)
        (tmp_path / folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
        tokenizer = load_tokenizer(tmp_path / folder, trust_remote_code=True)
        assert "tokenizer_file" in tokenizer.init_kwargs
        hashes.append(tokenizer_sha256(tokenizer))
    assert [hash == hashes[0] for hash in hashes] == [True, True, False]


def test_padding_and_truncation_do_not_change_the_tokenizers_hash() -> None:
    tokenizer = tiny_tokenizer.__wrapped__()
    changed = tiny_tokenizer.__wrapped__()
    changed.backend_tokenizer.enable_truncation(5)
    changed.backend_tokenizer.enable_padding(length=7)
    state = changed.backend_tokenizer.to_str()
    assert tokenizer_sha256(tokenizer) == tokenizer_sha256(changed)
    assert changed.backend_tokenizer.to_str() == state


def test_tokens_that_are_gone_or_cannot_be_kept_are_one_clear_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = token_key(tokenize_corpus(corpus_of(TEXTS), tiny_tokenizer(), Layout()), 0, 5)
    monkeypatch.setattr(store, "_open", {})
    (cache / "file").write_text("in the way")
    for name, use in (
        ("elsewhere", lambda: resolve_tokens(key)),
        ("file", lambda: tokenize_corpus(corpus_of(TEXTS), tiny_tokenizer(), Layout())),
    ):
        monkeypatch.setenv("SBEVAL_CACHE", str(cache / name))
        with pytest.raises(UserError, match="SBEVAL_CACHE"):
            use()


@pytest.mark.exhaustive
@pytest.mark.parametrize("adds_bos", [False, True])
@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.sampled_from(["the quick ", "fox é 😀 ", "\n\n", " ", "jumps", "a\u3000b "]), min_size=200))
def test_a_document_in_pieces_has_the_tokens_words_and_bytes_it_has_at_once(adds_bos: bool, text: list[str]) -> None:
    document, tokenizer = make_document("long", "".join(text)), tiny_tokenizer(adds_bos=adds_bos)
    layout = Layout((EOS,), special_tokens=adds_bos)
    (whole,) = encode_documents([document], tokenizer, layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "CHUNK_CHARACTERS", 400)
        patch.setattr(encode, "_OVERLAP_CHARACTERS", 160)
        (short, pieces, again) = encode_documents([make_document("a", "the"), document, document], tokenizer, layout)
    assert short.tokens.tolist() == encode_documents([make_document("a", "the")], tokenizer, layout)[0].tokens.tolist()
    for found in (pieces, again):
        assert [np.asarray(part).tolist() for part in found[1:]] == [np.asarray(part).tolist() for part in whole[1:]]


def test_a_document_whose_pieces_have_no_tokens_in_common_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Position:
        """Counts its tokens, so that a token depends on all before it."""

        is_fast, bos_token, eos_token = True, None, None

        def __call__(self, text: str, **options: object) -> dict[str, list[Any]]:
            spans = [(start, start + 1) for start in range(len(text))]
            return {"input_ids": list(range(len(text))), "offset_mapping": spans}

    monkeypatch.setattr(encode, "CHUNK_CHARACTERS", 100)
    monkeypatch.setattr(encode, "_OVERLAP_CHARACTERS", 40)
    with pytest.raises(UserError, match=r"'long' has 300 .* split the text into documents"):
        encode_documents([make_document("long", "x" * 300)], Position(), Layout())


@given(st.lists(st.sampled_from(["a", " ", "\n", "bc", "\u3000"])).map("".join), st.integers(1, 4))
def test_words_counted_piece_by_piece_are_those_of_one_split(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_CHUNK_CHARACTERS", size)
        assert count_words(text) == len(re.split(r"\s+", text))
