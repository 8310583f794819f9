"""Tokens that a model was not trained on are said before anything runs."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers

from sbeval.corpora import Layout, local_corpus, token_key, tokenize_corpus
from sbeval.corpora.tokenizers import load_tokenizer, tokenizer_sha256
from sbeval.errors import UserError
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.scoring.requests import AttentionSpanRequest, TargetSequence, TokenLogprobsRequest, keep_sequences
from tests.model_adapters.small import Checkpoints, copied, english, instances, load_lm, tiny_tokenizer

SETTING = {"until": ["\n"], "max_gen_toks": 2}
ADDED = "<image>"
TEXTS: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "a context": ("loglikelihood", [("a", " b"), (f"a {ADDED} b", " c")]),
    "a continuation": ("loglikelihood", [("a", " b"), ("a b", f" c {ADDED}")]),
    "a text": ("loglikelihood_rolling", [("a",), (f"a {ADDED}",)]),
    "a prompt": ("generate_until", [("a", SETTING), (f"a {ADDED}", SETTING)]),
    "a padding token": ("generate_until", [("a", SETTING), ("a <filler>", SETTING)]),
}


@pytest.fixture
def with_added_tokens(checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(checkpoint("rope"), tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [ADDED], "pad_token": "<filler>"})
    tokenizer.save_pretrained(folder)
    return folder


def refuses_before_it_runs(lm: StickBreakingLM, kind: str, arguments: list[Any]) -> str:
    ran: list[object] = []
    lm.model.register_forward_pre_hook(lambda *_: ran.append(True))
    with pytest.raises(UserError, match=r"Expected token ids below 302, .* found 30[23] in request 1 of") as raised:
        getattr(lm, kind)(instances(kind, arguments), disable_tqdm=True)
    assert not ran
    return str(raised.value)


@pytest.mark.parametrize("where", TEXTS)
def test_text_with_an_added_token_beyond_the_embeddings_is_refused(where: str, with_added_tokens: Path) -> None:
    refuses_before_it_runs(load_lm(with_added_tokens), *TEXTS[where])


@pytest.mark.parametrize("kind", ["token_logprobs", "attention_span", "target_logprobs"])
def test_tokens_of_our_own_requests_are_looked_at_too(kind: str, with_added_tokens: Path, tmp_path: Path) -> None:
    lm = load_lm(with_added_tokens)
    (tmp_path / "text.txt").write_text(f"a b {ADDED} c d")
    corpus = tokenize_corpus(local_corpus(tmp_path / "text.txt"), lm.tokenizer, Layout())
    sound, odd = token_key(corpus, 0, 2), token_key(corpus, 0, corpus.total_tokens)
    requests: dict[str, list[Any]] = {
        "token_logprobs": [TokenLogprobsRequest(sound, 2, 1, 2), TokenLogprobsRequest(odd, corpus.total_tokens, 0, 1)],
        "attention_span": [AttentionSpanRequest(sound, 2, 1), AttentionSpanRequest(odd, corpus.total_tokens, 1)],
        "target_logprobs": keep_sequences(
            [TargetSequence(*map(np.array, parts)) for parts in (([1, 2], [0], [3]), ([1, 2], [0], [303]))]
        ),
    }
    refuses_before_it_runs(lm, kind, requests[kind])


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.message for record in caplog.records if record.levelno == logging.WARNING)


def test_a_tokenizer_of_another_size_or_other_special_tokens_is_doubted_and_one_that_fits_is_not(
    checkpoint: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for adds_bos in (False, True):
        load_lm(checkpoint("rope", adds_bos=adds_bos))
    assert said(caplog) == ""
    load_lm(copied(checkpoint("rope"), tmp_path, bos_token_id=5, eos_token_id=[7, 9]))
    assert "eos_token_id is 7 or 9 in the model's config.json and 1 in its tokenizer" in said(caplog)
    folder = shutil.copytree(checkpoint("rope"), tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(400)
    model.save_pretrained(folder)
    load_lm(folder)
    assert "the model has 400 embeddings and its tokenizer only 302 tokens" in said(caplog)


@pytest.mark.parametrize("recorded", ["the same", "another", "another, by other software"])
def test_the_tokenizer_a_training_recorded_is_needed(recorded: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("rope"), tmp_path / "model")
    own = tokenizer_sha256(load_tokenizer(folder))
    record = {
        "tokenizer_sha256": own if recorded == "the same" else "0" * 64,
        "versions": {"tokenizers": "0.1" if "software" in recorded else tokenizers.__version__},
    }
    (folder / "training_record.json").write_text(json.dumps(record))
    if recorded == "another":
        with pytest.raises(UserError, match=rf"tokenizer that .*model was trained with \(000000.*another \({own[:12]}"):
            load_lm(folder)
    else:
        load_lm(folder)


@pytest.mark.parametrize("kind", ["token_logprobs", "attention_span"])
def test_a_task_with_another_tokenizer_is_doubted(
    kind: str,
    checkpoint: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "cache"))
    lm = load_lm(checkpoint("rope"))
    (tmp_path / "text.txt").write_text(english())
    for tokenizer, doubted in ((lm.tokenizer, False), (tiny_tokenizer(adds_bos=True), True)):
        key = token_key(tokenize_corpus(local_corpus(tmp_path / "text.txt"), tokenizer, Layout()), 0, 8)
        request = TokenLogprobsRequest(key, 8, 0, 8) if kind == "token_logprobs" else AttentionSpanRequest(key, 8, 2)
        getattr(lm, kind)(instances(kind, [request]), disable_tqdm=True)
        assert ("tokenized with another tokenizer" in said(caplog)) == doubted


MISSING = "was trained with a BOS token before every text, and its tokenizer adds none"


@pytest.mark.parametrize(
    ("architecture", "adds_bos", "options", "missing"),
    [
        ("rope", True, {}, False),
        ("rope", True, {"add_bos_token": False}, True),
        ("rope", False, {"add_bos_token": False}, False),
        ("gemma2", False, {}, True),
        ("gemma2", True, {}, False),
    ],
)
def test_a_missing_bos_is_said_where_the_model_is_known_to_need_it(
    architecture: str,
    adds_bos: bool,
    options: dict[str, Any],
    missing: bool,
    checkpoint: Checkpoints,
    caplog: pytest.LogCaptureFixture,
) -> None:
    load_lm(checkpoint(architecture, adds_bos=adds_bos), **options)
    assert (MISSING in said(caplog)) == missing


def test_a_tokenizer_that_says_it_adds_bos_and_does_not_is_noticed(
    checkpoint: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(checkpoint("rope"), tmp_path, "tokenizer_config.json", add_bos_token=True)
    load_lm(folder, add_bos_token=True)
    assert said(caplog) == ""
    assert load_lm(folder).tokenizer("a")["input_ids"][0] != 0
    assert MISSING in said(caplog)


@pytest.fixture
def loaded_tokenizers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folder of each tokenizer that a test loads, in order."""
    folders: list[str] = []
    load = transformers.AutoTokenizer.from_pretrained

    def from_pretrained(folder: Any, *args: Any, **options: Any) -> Any:
        folders.append(str(folder))
        return load(folder, *args, **options)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    return folders


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("is_recorded", [False, True], ids=["no record", "a record"])
def test_a_checkpoint_s_tokenizer_is_loaded_once(
    adds_bos: bool, is_recorded: bool, checkpoint: Checkpoints, tmp_path: Path, loaded_tokenizers: list[str]
) -> None:
    folder = shutil.copytree(checkpoint("rope", adds_bos=adds_bos), tmp_path / "model")
    if is_recorded:
        sha256 = tokenizer_sha256(load_tokenizer(folder))
        record = {"tokenizer_sha256": sha256, "versions": {"tokenizers": tokenizers.__version__}}
        (folder / "training_record.json").write_text(json.dumps(record))
    loaded_tokenizers.clear()
    load_lm(folder)
    assert loaded_tokenizers == [str(folder)]


def test_a_tokenizer_with_another_setting_than_the_saved_one_is_compared_with_it(
    checkpoint: Checkpoints, loaded_tokenizers: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(checkpoint("rope", adds_bos=True))
    load_lm(folder, add_bos_token=False)
    assert loaded_tokenizers == [folder, folder]
    assert MISSING in said(caplog)


def test_a_rewritten_tokenizer_is_loaded_again(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("rope"), tmp_path / "model")
    first_tokens = load_lm(folder).tokenizer("a")["input_ids"]
    tiny_tokenizer(adds_bos=True).save_pretrained(folder)
    assert load_lm(folder).tokenizer("a")["input_ids"] == [0, *first_tokens]
