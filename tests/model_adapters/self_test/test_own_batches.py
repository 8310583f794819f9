"""Faults that a run's own batches, lengths and answers alone show change no number; sound models pay little."""

import functools
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sbeval.errors import UserError
from sbeval.keeping.cache import cache_folder
from sbeval.model_adapters.self_test import outcome as names
from sbeval.model_adapters.self_test.measured import TOKENS
from tests.marks import exhaustive
from tests.measures import families, model_faults
from tests.measures.model_faults import LONG, SHORT, in_rows, is_right, planted, rows, scores_of, verdict, when
from tests.model_adapters.small import generated, instances, likelihoods, load_lm, tokens_read, windows

DETECTED = ("fell back", "refused")


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    families.save_tiny("llama", folder)
    return folder


@pytest.fixture(scope="module")
def expected(llama):
    return likelihoods(load_lm(llama, batch_size=1, self_test=False), SHORT + LONG)


@pytest.mark.parametrize("name", model_faults.FAST)
def test_a_fault_that_the_run_s_own_texts_show_changes_no_number(name, llama):
    found, said = verdict(model_faults.CASES[name], llama)
    assert found in DETECTED, said


@pytest.mark.exhaustive
@given(
    fewest_rows=st.integers(2, 24),
    longer_than=st.sampled_from([0, 20, 40, 60]),
    every=st.integers(1, 3),
    last=st.booleans(),
)
@example(fewest_rows=2, longer_than=40, every=2, last=False)  # these batches of two rows follow some of one row
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_rows_are_wrong_from_some_number_on_scores_are_those_of_texts_alone(
    llama, expected, tmp_path_factory, monkeypatch, fewest_rows, longer_than, every, last
):
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path_factory.mktemp("cache")))
    wrong = in_rows(lambda row, many: row == many - 1 if last else row % every == 0)
    shows = when(lambda call: rows(call) >= fewest_rows and model_faults.length(call) > longer_than, wrong)
    with planted(shows):
        found = likelihoods(load_lm(llama, batch_size="auto"), SHORT + LONG)
    assert is_right(found, expected, "float32")


def test_a_later_batch_with_more_rows_than_any_before_is_checked(checkpoint, corpus, caplog):
    places = [(start, tokens, 4) for tokens, first in ((60, 0), (40, 20)) for start in range(first, first + 15)]
    asked = instances("token_logprobs", windows(corpus, places))
    right = load_lm(checkpoint("llama"), max_batch_tokens=60, self_test=False).token_logprobs(asked, disable_tqdm=True)
    lm = load_lm(checkpoint("llama"), max_batch_tokens=600)
    with planted(when(lambda call: rows(call) >= 12 and model_faults.length(call) > 30, in_rows(lambda *_: True))):
        found = lm.token_logprobs(asked, disable_tqdm=True)
    for each, other in zip(found, right, strict=True):
        np.testing.assert_allclose(each.logprobs, other.logprobs, rtol=1e-5)
    assert lm.session.self_test.failed.keys() == {names.REAL_ROWS}
    assert f"self-test: LlamaForCausalLM has other logits than for whole texts ({names.REAL_ROWS}: " in caplog.text
    assert "nats in a batch of 15 rows of up to 40 tokens" in caplog.text


def test_answers_that_are_sampled_follow_prompts_that_are_read_rightly(llama):
    setting = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    lm = load_lm(llama, batch_size=16)
    with planted(when(lambda call: rows(call) >= 10, in_rows(lambda row, _: row == 0))):
        generated(lm, [(prompt, setting) for prompt in model_faults.PROMPTS])
    assert lm.session.self_test.failed.keys() == {names.REAL_ANSWERS}
    assert lm.session.self_test.generation in (names.EQUAL_LENGTHS, names.ALONE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "mamba2", "gpt2", *exhaustive("gemma2", "qwen2", "qwen3", "mixtral")]
)
def test_a_sound_family_raises_no_alarm(family, dtype, tmp_path):
    families.save_tiny(family, tmp_path)
    lm = load_lm(tmp_path, batch_size="auto", dtype=dtype)
    before = lm.session.self_test
    scores_of(SHORT, LONG, model_faults.SHARED)(lm)
    for answer in (model_faults.answers, model_faults.in_slots):
        answer(lm)
    after = lm.session.self_test
    assert after.failed == before.failed
    assert (after.scoring, after.generation, after.prefixes) == (before.scoring, before.generation, before.prefixes)
    assert {names.REAL_ROWS, names.REAL_ENDS} <= after.checks.keys()


@pytest.mark.parametrize("architecture", ["gpt_neox", "stickbreaking", *exhaustive("granite", "cohere", "rope")])
def test_other_sound_models_raise_no_alarm(architecture, checkpoint):
    lm = load_lm(checkpoint(architecture), batch_size="auto", dtype="bfloat16")
    likelihoods(lm, SHORT + LONG)
    model_faults.answers(lm)
    assert lm.session.self_test.failed == {}


def test_the_record_says_how_many_rows_and_tokens_were_tried_and_the_kept_outcome_claims_none_of_them(llama):
    lm = load_lm(llama, batch_size="auto")
    likelihoods(lm, SHORT)
    checks = lm.get_model_info()["sbeval"]["self_test"]["checks"]
    most = max(len(lm.tok_encode(before + after)) - 1 for before, after in SHORT)
    assert checks[names.REAL_ROWS]["reason"] == f"nats in up to {len(SHORT)} rows of up to {most} tokens"
    assert checks[names.REAL_ENDS]["reason"] == f"nats in up to 1 rows of up to {most} tokens"
    (kept,) = cache_folder("self_tests").glob("*.json")
    assert not {names.REAL_ROWS, names.REAL_ENDS} & json.loads(kept.read_text())["checks"].keys()


def test_batches_that_were_tried_are_not_checked_again(llama):
    lm = load_lm(llama, batch_size="auto")
    unchecked = load_lm(llama, batch_size="auto", self_test=False)
    ask = functools.partial(likelihoods, pairs=SHORT)
    read = []
    for each in (lm, lm, unchecked, unchecked):
        with tokens_read(each) as tokens:
            ask(each)
        read.append(sum(tokens))
    first, again, _, plain = read
    assert plain < again < plain + 2 * TOKENS < first < 3 * plain


def test_a_refusal_names_the_check_and_gives_no_number(llama):
    with planted(model_faults.CASES["the token 30 positions ahead"].plant()):
        lm = load_lm(llama, batch_size=1)
        with pytest.raises(UserError, match=rf"{names.REAL_ENDS}: [\d.]+ nats in a text of \d+ tokens.* can be scored"):
            likelihoods(lm, LONG)
