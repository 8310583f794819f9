"""Targets inside a sequence: their log-probabilities are those of the model's own logits."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from sbeval.errors import UserError
from sbeval.scoring.requests import TargetSequence, keep_sequences, resolve_sequence
from tests.model_adapters.small import instances, load_lm


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path))


def make_sequences() -> list[TargetSequence]:
    rng = np.random.default_rng(0)
    made = []
    for length, asked in ((40, 5), (12, 12), (40, 1), (30, 3)):
        positions = np.sort(rng.permutation(length)[:asked])
        made.append(TargetSequence(rng.integers(3, 300, length), positions, rng.integers(3, 300, asked)))
    several_at_one_place = TargetSequence(rng.integers(3, 300, 20), np.full(9, 19), np.arange(3, 12))
    return [*made, several_at_one_place]


def test_a_sequence_comes_back_as_it_was_kept() -> None:
    sequences = make_sequences()
    for sequence, request in zip(sequences, keep_sequences(sequences), strict=True):
        found = resolve_sequence(request.key)
        assert all((a == b).all() for a, b in zip(found, sequence, strict=True))
        assert request.inputs == len(sequence.inputs_L)
    with pytest.raises(UserError, match="Expected token sequences in"):
        resolve_sequence("0" * 32 + ":0")


@pytest.mark.parametrize("architecture", ["llama", "stickbreaking"])
@pytest.mark.parametrize("max_batch_tokens", [1, 4096])
def test_targets_are_scored_at_their_positions(
    checkpoint: Callable[..., Path], architecture: str, max_batch_tokens: int
) -> None:
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
