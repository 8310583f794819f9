"""The request type of our own tasks: windows of tokens in, a log-probability for each scored token out."""

import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.token_logprobs import TokenLogprobs, TokenLogprobsRequest

VOCABULARY = 300


@pytest.fixture(autouse=True)
def corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are `seed:length`; the tokens are drawn from the seed."""

    def resolve_tokens(key: str) -> NDArray[np.int32]:
        seed, length = key.split(":")
        return np.random.default_rng(int(seed)).integers(3, VOCABULARY, int(length), dtype=np.int32)

    module = types.ModuleType("sbeval.corpora")
    module.resolve_tokens = resolve_tokens  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sbeval.corpora", module)


def instances(requests: list[TokenLogprobsRequest]) -> list[Instance]:
    return [
        Instance(request_type="token_logprobs", doc={}, arguments=request, idx=i, metadata=("sb_task", i, 1))  # type: ignore[arg-type]
        for i, request in enumerate(requests)
    ]


def window(seed: int, length: int, scored: int) -> TokenLogprobsRequest:
    return TokenLogprobsRequest(f"{seed}:{length}", length, 0, scored)


MIXED = instances([window(1, 40, 40), window(2, 16, 3), window(3, 300, 7), window(4, 40, 1), window(5, 16, 16)])


def load(folder: Path, **kwargs: Any) -> StickBreakingLM:
    return StickBreakingLM(str(folder), device="cpu", dtype="float32", **kwargs)


def test_each_window_is_its_lead_in_and_its_tokens(checkpoint: Callable[..., Path]) -> None:
    lm = load(checkpoint("llama"))
    found = lm.token_logprobs(MIXED, disable_tqdm=True)
    for result, instance in zip(found, MIXED, strict=True):
        request = TokenLogprobsRequest(*instance.args)
        tokens = sys.modules["sbeval.corpora"].resolve_tokens(request.key)
        inputs = torch.tensor([[request.lead_in, *tokens[:-1].tolist()]])
        with torch.no_grad():
            logprobs = lm.model(inputs).logits[0].double().log_softmax(-1)
        expected = logprobs[range(len(tokens)), tokens.tolist()][-request.scored :]
        np.testing.assert_allclose(result.logprobs, expected.numpy(), rtol=1e-5)
        assert float(result) == pytest.approx(float(expected.sum()), rel=1e-6)


@pytest.mark.parametrize("max_batch_tokens", [1, 50, 100_000])
def test_batching_does_not_change_results(max_batch_tokens: int, checkpoint: Callable[..., Path]) -> None:
    alone = load(checkpoint("mistral"), max_batch_tokens=1).token_logprobs(MIXED, disable_tqdm=True)
    batched = load(checkpoint("mistral"), max_batch_tokens=max_batch_tokens).token_logprobs(MIXED, disable_tqdm=True)
    for one, other in zip(alone, batched, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5)


def test_a_request_made_twice_runs_once(checkpoint: Callable[..., Path]) -> None:
    lm = load(checkpoint("llama"))
    twice = instances([window(1, 20, 5), window(1, 20, 5)])
    first, second = lm.token_logprobs(twice, disable_tqdm=True)
    assert lm.meter.tokens == 20
    np.testing.assert_array_equal(first.logprobs, second.logprobs)


class Killed(BaseException):
    pass


def test_a_killed_run_repeats_no_finished_request(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    expected = load(checkpoint("llama")).token_logprobs(MIXED, disable_tqdm=True)
    database = str(tmp_path / "cache.db")

    lm = load(checkpoint("llama"), max_batch_tokens=1)
    cached = CachingLM(lm, database)
    calls = 0

    def dies_in_the_third_window(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Killed

    hook = lm.model.get_input_embeddings().register_forward_hook(dies_in_the_third_window)
    lm.scorer._comes_apart = True  # leaves out the comparison of a short input, which would count as windows
    with pytest.raises(Killed):
        cached.token_logprobs(MIXED, disable_tqdm=True)
    hook.remove()
    cached.dbdict.close()

    resumed = load(checkpoint("llama"), max_batch_tokens=1)
    found = CachingLM(resumed, database).token_logprobs(MIXED, disable_tqdm=True)
    assert resumed.meter.tokens == sum(instance.args[1] for instance in MIXED) - 300 - 40
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, TokenLogprobs)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5)


def test_results_survive_pickling(checkpoint: Callable[..., Path]) -> None:
    (result,) = load(checkpoint("llama")).token_logprobs(MIXED[:1], disable_tqdm=True)
    copy = pickle.loads(pickle.dumps(result))
    assert float(copy) == float(result)
    np.testing.assert_array_equal(copy.logprobs, result.logprobs)


def test_out_of_memory_halves_the_batch_and_loses_nothing(checkpoint: Callable[..., Path]) -> None:
    requests = instances([window(seed, 24, 24) for seed in range(9)])
    expected = load(checkpoint("llama"), max_batch_tokens=24).token_logprobs(requests, disable_tqdm=True)
    lm = load(checkpoint("llama"))
    rows: list[int] = []

    def memory_for_three_rows(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[0] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        rows.append(inputs[0].shape[0])

    lm.scorer._comes_apart = True
    lm.model.get_input_embeddings().register_forward_pre_hook(memory_for_three_rows)
    found = lm.token_logprobs(requests, disable_tqdm=True)
    assert sum(rows) == len(requests)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5)

    lm.model.get_input_embeddings().register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError))
    with pytest.raises(UserError, match="an input of 24 tokens to fit into memory"):
        lm.token_logprobs(requests, disable_tqdm=True)


def test_more_tokens_than_learned_positions_is_an_error(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"at most 128 tokens, .* learned positions, found .* 300"):
        load(checkpoint("gpt2")).token_logprobs(MIXED, disable_tqdm=True)


def test_a_run_is_recorded(checkpoint: Callable[..., Path]) -> None:
    lm = load(checkpoint("llama"), training_length=77, max_length=512)
    lm.token_logprobs(MIXED, disable_tqdm=True)
    record = lm.get_model_info()["sbeval"]
    assert record["name"] == "llama"
    assert record["format"] == "huggingface:llama"
    assert record["training_length_tokens"] == 77
    assert record["max_length"] == 512
    assert record["dtype"] == "float32"
    assert record["kernels"] == "sdpa"
    assert record["parameters"] == sum(p.numel() for p in lm.model.parameters())
    assert len(record["checkpoint_sha256"]) == 64
    assert record["tokens_per_second"] > 0
    assert {"torch", "transformers", "lm_eval"} <= set(record["versions"])
