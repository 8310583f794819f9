"""Windows that begin at the same token are run once, at the longest length, and score as they do apart."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance

from sbeval.corpora import TokenizedCorpus
from sbeval.model_adapters.sharing import share_windows
from sbeval.scoring.requests import TokenLogprobsRequest
from tests.model_adapters.small import Checkpoints, instances, load_lm, tokens_read, windows

# start, context length, scored: one text at three lengths in disjoint windows, and a lead-in of its own
STREAM = [(start, length, length) for length in (16, 32, 64) for start in range(0, 64, length)]
OTHERS = [(0, 48, 3), (5, 16, 16), (16, 40, 2)]


def asked(corpus: TokenizedCorpus) -> list[Instance]:
    requests = windows(corpus, STREAM + OTHERS)
    return instances("token_logprobs", [*requests, requests[0]._replace(lead_in=4)])


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt_neox", "stickbreaking", "rope"])
def test_nested_windows_are_run_once_and_score_as_they_do_apart(
    architecture: str, checkpoint: Checkpoints, corpus: TokenizedCorpus
) -> None:
    requests = asked(corpus)
    alone = load_lm(checkpoint(architecture))
    expected = [alone.token_logprobs([request], disable_tqdm=True)[0] for request in requests]
    assert alone.session.meter.tokens == sum(request.args[1] for request in requests)

    lm = load_lm(checkpoint(architecture))
    lm.session.scorer.score(torch.arange(16)[None], torch.tensor([0]), torch.tensor([0]), torch.tensor([0]))
    with tokens_read(lm) as read:
        found = lm.token_logprobs(requests, disable_tqdm=True)
    # 64 from 0, 32 from 32, 40 from 16, 16 from 48 and from 5, and 16 with another lead-in
    assert sum(read) == lm.session.meter.tokens == 64 + 32 + 40 + 16 + 16 + 16
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-6)
        assert float(one) == pytest.approx(float(other), rel=1e-5)


def test_frequencies_that_depend_on_the_length_share_nothing(checkpoint: Checkpoints, corpus: TokenizedCorpus) -> None:
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
def test_every_request_finds_exactly_its_targets(drawn: list[tuple[str, int, int, int, int]], nested: bool) -> None:
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
