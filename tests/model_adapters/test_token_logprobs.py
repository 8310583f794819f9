"""The request type of our own tasks: windows of tokens in, a log-probability for each scored token out."""

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance

from sbeval.corpora import TokenizedCorpus, resolve_tokens
from sbeval.errors import UserError
from sbeval.scoring.requests import TokenLogprobsRequest
from tests.model_adapters.small import Checkpoints, instances, load_lm, windows

WINDOWS = [(0, 40, 40), (7, 16, 3), (90, 300, 7), (200, 40, 1), (50, 16, 16)]  # start, context length, scored


def requests_for(corpus: TokenizedCorpus, places: list[tuple[int, int, int]] = WINDOWS) -> list[Instance]:
    return instances("token_logprobs", windows(corpus, places))


def test_each_window_is_its_lead_in_and_its_tokens(checkpoint: Checkpoints, corpus: TokenizedCorpus) -> None:
    lm = load_lm(checkpoint("llama"))
    requests = requests_for(corpus)
    found = lm.token_logprobs(requests, disable_tqdm=True)
    for result, instance in zip(found, requests, strict=True):
        request = TokenLogprobsRequest(*instance.args)
        tokens = resolve_tokens(request.key)
        inputs = torch.tensor([[request.lead_in, *tokens[:-1].tolist()]])
        with torch.no_grad():
            logprobs = lm.model(inputs).logits[0].double().log_softmax(-1)
        expected = logprobs[range(len(tokens)), tokens.tolist()][-request.scored :]
        np.testing.assert_allclose(result.logprobs, expected.numpy(), rtol=1e-5)
        assert float(result) == pytest.approx(float(expected.sum()), rel=1e-6)


def test_a_request_made_twice_runs_once(checkpoint: Checkpoints, corpus: TokenizedCorpus) -> None:
    lm = load_lm(checkpoint("llama"))
    twice = requests_for(corpus, [(3, 20, 5), (3, 20, 5)])
    first, second = lm.token_logprobs(twice, disable_tqdm=True)
    assert lm.session.meter.tokens == 20
    np.testing.assert_array_equal(first.logprobs, second.logprobs)


def test_out_of_memory_halves_the_batch_and_loses_nothing(checkpoint: Checkpoints, corpus: TokenizedCorpus) -> None:
    requests = requests_for(corpus, [(start, 24, 24) for start in range(9)])
    expected = load_lm(checkpoint("llama"), max_batch_tokens=24).token_logprobs(requests, disable_tqdm=True)
    lm = load_lm(checkpoint("llama"))
    rows: list[int] = []

    def memory_for_three_rows(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[0] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        rows.append(inputs[0].shape[0])

    lm.session.scorer._comes_apart = True
    lm.model.get_input_embeddings().register_forward_pre_hook(memory_for_three_rows)
    found = lm.token_logprobs(requests, disable_tqdm=True)
    assert sum(rows) == len(requests)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5)

    lm.model.get_input_embeddings().register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError))
    with pytest.raises(UserError, match="an input of 24 tokens to fit into memory"):
        lm.token_logprobs(requests, disable_tqdm=True)


def test_more_tokens_than_learned_positions_is_an_error(checkpoint: Checkpoints, corpus: TokenizedCorpus) -> None:
    with pytest.raises(UserError, match=r"at most 128 tokens, .* learned positions, found .* 300"):
        load_lm(checkpoint("gpt2")).token_logprobs(requests_for(corpus), disable_tqdm=True)


def test_a_run_is_recorded(checkpoint: Checkpoints, corpus: TokenizedCorpus) -> None:
    lm = load_lm(checkpoint("llama"), training_length=77, max_length=512)
    lm.token_logprobs(requests_for(corpus), disable_tqdm=True)
    record = lm.get_model_info()["sbeval"]
    expected = {"name": "llama", "format": "huggingface:llama", "training_length_tokens": 77, "max_length": 512}
    assert record | expected | {"dtype": "float32", "kernels": "sdpa"} == record
    assert record["parameters"] == sum(p.numel() for p in lm.model.parameters())
    assert len(record["checkpoint_sha256"]) == 64
    assert record["tokens_per_second"] > 0
    assert {"torch", "transformers", "lm_eval"} <= set(record["versions"])
