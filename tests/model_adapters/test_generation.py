"""Batched generation: what padding, prefill and repeated prompts may not change."""

import json
import re
import shutil
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.models.huggingface import HFLM

from sbeval.corpora import tokenizers as tokenizers_module
from sbeval.model_adapters.encoding import encode_prompts
from sbeval.model_adapters.generate.texts import StopSequences
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.model_adapters.score import requests as scoring
from tests.model_adapters.small import LINES as ALL_LINES
from tests.model_adapters.small import generated, instances, load_lm, tiny_tokenizer

LINES = ALL_LINES[:6]
SETTING = {"until": ["\n"], "max_gen_toks": 6}


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "stickbreaking", "rope"])
def test_prefill_computes_logits_for_the_last_position_alone(architecture, checkpoint):
    lm = load_lm(checkpoint(architecture), batch_size=3, self_test=False)  # which reads some answers whole
    positions: list[int] = []
    lm.model.get_output_embeddings().register_forward_hook(lambda _, __, logits: positions.append(logits.shape[1]))
    generated(lm, [(line, SETTING) for line in LINES])
    assert set(positions) == {1}


@pytest.mark.parametrize("end_is_known", [True, False])
def test_padding_behind_an_answer_is_no_text(end_is_known, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    plain = json.loads((folder / "tokenizer.json").read_text())
    for token in plain["added_tokens"]:
        token["special"] = False  # so that whatever pads an answer would be part of its text
    (folder / "tokenizer.json").write_text(json.dumps(plain))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    if end_is_known:
        tokenizer.eos_token = "</s>"
    tokenizer.add_special_tokens({"pad_token": "<beyond the embeddings>"})
    tokenizer.save_pretrained(folder)
    answers = []
    for batch_size in (1, len(LINES)):
        lm = load_lm(folder, batch_size=batch_size)
        lm.model.generation_config.eos_token_id = list(range(100, 200))  # answers of many lengths
        answers.append(generated(lm, [(x, {"until": ["\n\n"], "max_gen_toks": 12}) for x in LINES]))
    assert answers[0] == answers[1]
    assert len({len(answer) for answer in answers[0]}) > 1


@given(st.integers(1, 9), st.integers(0, 30), st.integers(1, 4))
def test_a_stop_sequence_ends_at_its_last_token_however_often_one_looks(every: int, begin: int, length: int) -> None:
    tokenizer = tiny_tokenizer(adds_bos=False)
    tokens = tokenizer.encode(" ".join(LINES))[:60]
    stop = tokenizer.decode(tokens)[begin : begin + length]
    stops = StopSequences(tokenizer, [stop])
    ends = (stops.end(tokens[:now], now - every) for now in range(every, len(tokens) + every, every))
    first = next(end for end in range(61) if stop in tokenizer.decode(tokens[:end]))
    assert next(end for end in ends if end is not None) == first


def test_a_prompt_asked_for_twice_is_continued_once_but_each_sample_is_its_own(checkpoint):
    lm = load_lm(checkpoint("llama"), batch_size=2)
    found = generated(lm, [(line, SETTING) for line in [*LINES, *LINES[:2]]])
    assert found[-2:] == found[:2]
    assert lm.session.meter.tokens == sum(len(lm.tok_encode(line)) for line in LINES)

    sampled = [(LINES[0], {**SETTING, "do_sample": True, "temperature": 2.0})] * 4
    torch.manual_seed(0)
    assert len(set(generated(lm, sampled))) > 1


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_prompts_encoded_together_are_those_encoded_alone(add_bos_token, checkpoint, monkeypatch):
    monkeypatch.setattr(tokenizers_module, "_BATCH_TEXTS", 2)
    lm = load_lm(checkpoint("llama", adds_bos=True), add_bos_token=add_bos_token)
    texts = [*LINES[:3], f"<s>{LINES[3]}", ""]
    together = encode_prompts(lm.opened, texts, quiet=True)
    assert together == [encode_prompts(lm.opened, [text], quiet=True)[0] for text in texts]
    begins = [tokens[0] == 0 for tokens in together]
    assert begins == ([False] * 3 + [True] * 2 if add_bos_token is False else [True] * 5)
    assert together[3].count(0) == 1


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_contexts_and_continuations_encoded_together_are_those_of_hf(add_bos_token, checkpoint, monkeypatch):
    folder = checkpoint("llama", adds_bos=True)
    pairs = [
        *((LINES[0], f" {line}") for line in LINES[:3]),
        (f"{LINES[1]}  ", "spaces"),
        (f"<s>{LINES[2]}", " begins"),
        ("", LINES[3]),
        ("   ", "nothing before"),
    ]
    found: list[list[Any]] = []
    for kind in (HFLM, StickBreakingLM):
        lm = kind(str(folder), device="cpu", dtype="float32", add_bos_token=add_bos_token)
        pairs_of: list[Any] = []
        monkeypatch.setattr(lm, "_loglikelihood_tokens", lambda requests, pairs=pairs_of, **_: pairs.extend(requests))
        monkeypatch.setattr(scoring, "loglikelihood", lambda *_, **__: [])
        lm.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
        found.append(pairs_of)
    # hf has nothing before the first token where neither the context nor the tokenizer gives any, and fails
    assert [(pair, before or [0], behind) for pair, before, behind in found[0]] == found[1]
    assert len(found[0]) == len(pairs)


def test_no_stop_sequence_may_be_written_as_null(checkpoint):
    lm = load_lm(checkpoint("llama"))
    answers = [
        generated(lm, [(LINES[0], {**setting, "max_gen_toks": 6})])
        for setting in ({"until": []}, {"until": None}, {"until": [None]}, {})
    ]
    assert answers == answers[:1] * 4


def test_the_progress_bar_says_what_it_counts(checkpoint, capfd):
    lm = load_lm(checkpoint("llama"))
    lm.generate_until(instances("generate_until", [(LINES[0], SETTING), (LINES[1], SETTING)]))
    generating = capfd.readouterr().err
    lm.loglikelihood(instances("loglikelihood", [(LINES[0], " one"), (LINES[1], " two")]))
    scoring = capfd.readouterr().err
    assert re.search(r"2/2 \[.*( answers/s|s/ answers)\]", generating)
    assert re.search(r"\[.*(token/s|s/token)\]", scoring)
