"""Inputs and windows that begin alike: the same scores as apart, and what they share is read once."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance

from sbeval.corpora import TokenizedCorpus
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.model_adapters.score.nested import share_windows
from sbeval.model_adapters.score.prefixes import Worthwhile, shared_prefixes
from sbeval.scoring.requests import TokenLogprobsRequest
from tests.model_adapters.small import Checkpoints, cache_argument, english, instances, load_lm, tokens_read, windows

CONTEXT = english()[:160]
CHOICES = [" is better", " explicit namespaces", " a", " preferably only one", " is worse"]
QUESTIONS = ["Flat", "Now is", "Sparse is better", "If the implementation"]
ONE_CONTEXT = [(CONTEXT, choice) for choice in CHOICES] + [("Now", " is")]
SAME_EXAMPLES = [(f"{CONTEXT}\n{question}", choice) for question in QUESTIONS for choice in CHOICES[:3]] + [("A", " b")]


def load(checkpoints: Checkpoints, architecture: str, **options: Any) -> StickBreakingLM:
    lm = load_lm(checkpoints(architecture), **{"max_length": 128, **options})
    scores(lm, [("Now", " is")])  # the first call also compares a short input
    return lm


def scores(lm: StickBreakingLM, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    return lm.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)


def model_inputs(lm: StickBreakingLM, pairs: list[tuple[str, str]]) -> dict[tuple[int, ...], int]:
    """Returns each model input that the pairs need, with the number of tokens before the first scored position."""
    encoded = [lm._encode_pair(*pair) for pair in pairs]
    return {tuple((context + continuation)[:-1]): len(context) - 1 for context, continuation in encoded}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("pairs", [ONE_CONTEXT, SAME_EXAMPLES], ids=["one-context", "same-examples"])
@pytest.mark.parametrize(
    "architecture", ["llama", "gemma2", "gpt2", "granite", "mistral", "stickbreaking", "rope", "llama by length"]
)
def test_inputs_score_as_they_do_apart(architecture, pairs, batch_size, checkpoint):
    name, by_length, _ = architecture.partition(" by length")
    options = {"rope_scaling": "dynamic:4", "training_length": 32} if by_length else {}  # which share nothing
    lm = load(checkpoint, name, batch_size=batch_size, **options)
    together = scores(lm, pairs)
    apart = [scores(lm, [pair])[0] for pair in pairs]
    assert [greedy for _, greedy in together] == [greedy for _, greedy in apart]
    assert [score for score, _ in together] == pytest.approx([score for score, _ in apart], rel=1e-5)


@pytest.mark.parametrize(("architecture", "shares"), [("llama", True), ("stickbreaking", True), ("mistral", False)])
def test_what_inputs_share_is_read_once(architecture, shares, checkpoint):
    lm = load(checkpoint, architecture, self_test=False)  # which reads some inputs again
    for pairs in (ONE_CONTEXT[:5], SAME_EXAMPLES[:12]):
        inputs = model_inputs(lm, pairs)
        whole = sum(map(len, inputs))
        columns = [len(set(column)) == 1 for column in zip(*inputs, strict=False)]
        once = min([*inputs.values(), columns.index(False) if False in columns else len(columns)])
        assert once > 32
        with tokens_read(lm) as read:
            scores(lm, pairs)
        assert sum(read) == (whole - (len(inputs) - 1) * once if shares else whole)


@pytest.mark.parametrize("fails", ["prefix", "rest"])
def test_without_memory_for_a_prefix_inputs_run_whole_and_none_twice(fails, checkpoint):
    lm = load(checkpoint, "llama", self_test=False)
    expected = scores(lm, SAME_EXAMPLES)
    whole = sum(map(len, model_inputs(lm, SAME_EXAMPLES)))
    calls = 0

    def memory_runs_out(_module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal calls
        calls += cache_argument(kwargs) is not None
        if calls == {"prefix": 1, "rest": 4}[fails]:
            calls += 1
            raise torch.OutOfMemoryError

    handle = lm.model.model.register_forward_pre_hook(memory_runs_out, with_kwargs=True)
    with tokens_read(lm) as read:
        found = scores(lm, SAME_EXAMPLES)
    handle.remove()
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-5)
    if fails == "prefix":
        assert sum(read) == whole
    else:  # the prefix and the rest of two inputs, then the others whole
        assert sum(read) < whole + len(lm.tok_encode(CONTEXT))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12, unique_by=tuple),
    st.integers(1, 4),
    st.integers(0, 12),
    st.randoms(use_true_random=False),
)
def test_groups_share_their_prefix_and_are_worth_it(inputs, prefix_tokens, saved_tokens, random):
    scored_from = [random.randrange(len(own)) for own in inputs]
    groups = shared_prefixes(inputs, scored_from, Worthwhile(prefix_tokens, saved_tokens))
    members = [index for group in groups for index in group.members]
    assert len(members) == len(set(members))
    for length, own in groups:
        assert len({tuple(inputs[index][:length]) for index in own}) == 1
        assert prefix_tokens <= length <= min(scored_from[index] for index in own)
        assert (len(own) - 1) * length >= max(1, saved_tokens)


# start, context length, scored: one text at three lengths in disjoint windows, and a lead-in of its own
STREAM = [(start, length, length) for length in (16, 32, 64) for start in range(0, 64, length)]
OTHERS = [(0, 48, 3), (5, 16, 16), (16, 40, 2)]


def asked(corpus: TokenizedCorpus) -> list[Instance]:
    requests = windows(corpus, STREAM + OTHERS)
    return instances("token_logprobs", [*requests, requests[0]._replace(lead_in=4)])


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt_neox", "stickbreaking", "rope"])
def test_nested_windows_are_run_once_and_score_as_they_do_apart(architecture, checkpoint, corpus):
    requests = asked(corpus)
    alone = load_lm(checkpoint(architecture))
    expected = [alone.token_logprobs([request], disable_tqdm=True)[0] for request in requests]
    assert alone.session.meter.tokens == sum(request.args[1] for request in requests)

    lm = load_lm(checkpoint(architecture), self_test=False)  # which reads some windows again
    lm.session.scorer.score(torch.arange(16)[None], torch.tensor([0]), torch.tensor([0]), torch.tensor([0]))
    with tokens_read(lm) as read:
        found = lm.token_logprobs(requests, disable_tqdm=True)
    # 64 from 0, 32 from 32, 40 from 16, 16 from 48 and from 5, and 16 with another lead-in
    assert sum(read) == lm.session.meter.tokens == 64 + 32 + 40 + 16 + 16 + 16
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-6)
        assert float(one) == pytest.approx(float(other), rel=1e-5)


def test_frequencies_that_depend_on_length_share_no_window(checkpoint, corpus):
    options = {"rope_scaling": "dynamic:2", "training_length": 24}
    requests = asked(corpus)
    lm, alone = (load_lm(checkpoint("rope"), **options) for _ in range(2))
    expected = [alone.token_logprobs([request], disable_tqdm=True)[0] for request in requests]
    for one, other in zip(lm.token_logprobs(requests, disable_tqdm=True), expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-6)
    assert lm.session.meter.tokens == alone.session.meter.tokens


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(1, 30), st.integers(0, 1), st.integers(1, 30)),
        max_size=12,
    ),
    st.booleans(),
)
def test_every_request_finds_exactly_its_targets(drawn, nested):
    requests = {
        TokenLogprobsRequest(f"{text}:{start}:{start + length}", length, lead_in, min(scored, length))
        for text, start, length, lead_in, scored in drawn
    }
    answered = []
    for run, members in share_windows(sorted(requests), nested=nested):
        text, start, stop = run.key.split(":")
        targets = list(range(int(start), int(stop)))[-run.scored :]
        for request, part in members:
            own_text, own_start, own_stop = request.key.split(":")
            assert (own_text, own_start, request.lead_in) == (text, start, run.lead_in)
            assert targets[part] == list(range(int(own_start), int(own_stop)))[-request.scored :]
            answered.append(request)
        assert nested or len(members) == 1
    assert sorted(answered) == sorted(requests)
