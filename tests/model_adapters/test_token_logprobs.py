"""The request types of our own tasks: log-probabilities of the tokens of windows, and of targets inside a sequence."""

import numpy as np
import pytest
import torch
import transformers
from lm_eval.api.instance import Instance

from sbeval.corpora import TokenizedCorpus, resolve_tokens
from sbeval.errors import UserError
from sbeval.model_adapters import answers
from sbeval.scoring.requests import TargetSequence, TokenLogprobsRequest, keep_sequences, resolve_sequence
from tests.model_adapters.small import instances, load_lm, windows

WINDOWS = [(0, 40, 40), (7, 16, 3), (90, 300, 7), (200, 40, 1), (50, 16, 16)]  # start, context length, scored


def requests_for(corpus: TokenizedCorpus, places: list[tuple[int, int, int]] = WINDOWS) -> list[Instance]:
    return instances("token_logprobs", windows(corpus, places))


def test_each_window_is_its_lead_in_and_its_tokens(checkpoint, corpus):
    lm = load_lm(checkpoint("llama"))
    requests = requests_for(corpus)
    for result, instance in zip(lm.token_logprobs(requests, disable_tqdm=True), requests, strict=True):
        request = TokenLogprobsRequest(*instance.args)
        tokens = resolve_tokens(request.key)
        inputs = torch.tensor([[request.lead_in, *tokens[:-1].tolist()]])
        with torch.no_grad():
            logprobs = lm.model(inputs).logits[0].double().log_softmax(-1)
        expected = logprobs[range(len(tokens)), tokens.tolist()][-request.scored :]
        np.testing.assert_allclose(result.logprobs, expected.numpy(), rtol=1e-5)
        assert float(result) == pytest.approx(float(expected.sum()), rel=1e-6)


def test_the_progress_bar_counts_the_tokens_that_are_read(checkpoint, corpus, monkeypatch):
    shown: list[tuple[float, float]] = []

    class Bar(answers.tqdm):  # type: ignore[type-arg]
        def update(self, n: float | None = 1) -> bool | None:
            moved = super().update(n)
            shown.append((self.n, self.total))
            return moved

    monkeypatch.setattr(answers, "tqdm", Bar)
    lm = load_lm(checkpoint("llama"), max_batch_tokens=40)
    lm.token_logprobs(requests_for(corpus, [(0, 40, 3), (100, 20, 3), (200, 10, 3), (300, 10, 3)]))
    assert shown == [(40, 80), (60, 80), (70, 80), (80, 80)]
    shown.clear()
    lm.loglikelihood_rolling(instances("loglikelihood_rolling", [("the fox saw a dog",), ("the dog",)], "t"))
    assert shown[-1][0] == shown[-1][1] == lm.session.meter.tokens - 80


def test_a_request_made_twice_runs_once(checkpoint, corpus):
    lm = load_lm(checkpoint("llama"))
    first, second = lm.token_logprobs(requests_for(corpus, [(3, 20, 5), (3, 20, 5)]), disable_tqdm=True)
    assert lm.session.meter.tokens == 20
    np.testing.assert_array_equal(first.logprobs, second.logprobs)


@pytest.mark.exhaustive
def test_out_of_memory_halves_the_batch_and_loses_nothing(checkpoint, corpus):
    requests = requests_for(corpus, [(start, 24, 24) for start in range(9)])
    expected = load_lm(checkpoint("llama"), max_batch_tokens=24).token_logprobs(requests, disable_tqdm=True)
    lm = load_lm(checkpoint("llama"), self_test=False)  # which reads some rows again
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


def test_more_tokens_than_learned_positions_is_an_error(checkpoint, corpus):
    with pytest.raises(UserError, match=r"at most 128 tokens, .* learned positions, found .* 300"):
        load_lm(checkpoint("gpt2")).token_logprobs(requests_for(corpus), disable_tqdm=True)


def test_a_run_is_recorded(checkpoint, corpus):
    lm = load_lm(checkpoint("llama"), training_length=77, max_length=512)
    lm.token_logprobs(requests_for(corpus), disable_tqdm=True)
    record = lm.get_model_info()["sbeval"]
    expected = {"name": "llama", "format": "huggingface:llama", "training_length_tokens": 77, "max_length": 512}
    assert record | expected | {"dtype": "float32", "kernels": "sdpa"} == record
    assert record["parameters"] == sum(p.numel() for p in lm.model.parameters())
    assert len(record["checkpoint_sha256"]) == 64
    assert record["tokens_per_second"] > 0
    assert {"torch", "transformers", "lm_eval"} <= set(record["versions"])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path))


def make_sequences() -> list[TargetSequence]:
    rng = np.random.default_rng(0)
    made = []
    for length, asked in ((40, 5), (12, 12), (40, 1), (30, 3)):
        positions = np.sort(rng.permutation(length)[:asked])
        made.append(TargetSequence(rng.integers(3, 300, length), positions, rng.integers(3, 300, asked)))
    several_at_one_place = TargetSequence(rng.integers(3, 300, 20), np.full(9, 19), np.arange(3, 12))
    return [*made, several_at_one_place]


def test_a_sequence_comes_back_as_it_was_kept():
    sequences = make_sequences()
    for sequence, request in zip(sequences, keep_sequences(sequences), strict=True):
        assert all((a == b).all() for a, b in zip(resolve_sequence(request.key), sequence, strict=True))
        assert request.inputs == len(sequence.inputs_L)
    with pytest.raises(UserError, match="token sequences are missing: there is no file"):
        resolve_sequence("0" * 32 + ":0")


@pytest.mark.parametrize("architecture", ["llama", "stickbreaking"])
@pytest.mark.parametrize("max_batch_tokens", [1, 4096])
def test_targets_are_scored_at_their_positions(checkpoint, architecture, max_batch_tokens):
    folder = checkpoint(architecture)
    lm = load_lm(folder, max_batch_tokens=max_batch_tokens)
    sequences = make_sequences()
    requests = instances("target_logprobs", keep_sequences(sequences), "sb_task")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for sequence, result in zip(sequences, lm.target_logprobs(requests, disable_tqdm=True), strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(sequence.inputs_L)[None]).logits[0].double()
        logprobs = logits.log_softmax(-1)[torch.from_numpy(sequence.positions_T), torch.from_numpy(sequence.targets_T)]
        assert np.allclose(result.logprobs, logprobs.numpy(), rtol=1e-4, atol=1e-4)
        greedy = logits.argmax(-1)[torch.from_numpy(sequence.positions_T)].numpy() == sequence.targets_T
        assert (result.greedy == greedy).all()
        assert float(result) == pytest.approx(float(logprobs.sum()), rel=1e-4)
