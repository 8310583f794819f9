"""The choices of one question: the same scores as apart, and the context read once where the model allows it."""

import pytest
import torch

from sbeval.model_adapters.lm import StickBreakingLM
from tests.model_adapters.small import Checkpoints, english, instances

CONTEXT = english()[:160]
CHOICES = [" is better", " explicit namespaces", " a", " preferably only one", " is worse"]
PAIRS = [(CONTEXT, choice) for choice in CHOICES] + [("Now", " is")]


def scores(lm: StickBreakingLM, pairs: list[tuple[str, str]]) -> list[float]:
    return [score for score, _ in lm.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "granite", "mistral", "stickbreaking", "rope"])
def test_choices_score_as_they_do_apart(architecture: str, checkpoint: Checkpoints) -> None:
    lm = StickBreakingLM(str(checkpoint(architecture)), device="cpu", dtype="float32", max_length=128)
    together = lm.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    apart = [lm.loglikelihood(instances("loglikelihood", [pair]), disable_tqdm=True)[0] for pair in PAIRS]
    assert [greedy for _, greedy in together] == [greedy for _, greedy in apart]
    assert [score for score, _ in together] == pytest.approx([score for score, _ in apart], rel=1e-5)


@pytest.mark.parametrize(("architecture", "shares"), [("llama", True), ("stickbreaking", True), ("mistral", False)])
def test_a_shared_context_is_read_once(architecture: str, shares: bool, checkpoint: Checkpoints) -> None:
    lm = StickBreakingLM(str(checkpoint(architecture)), device="cpu", dtype="float32", max_length=128)
    scores(lm, [("Now", " is")])  # the first call also compares a short input
    read = 0

    def count(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal read
        read += inputs[0].numel()

    body = lm.model.model.embed_tokens
    body.register_forward_pre_hook(count)
    scores(lm, PAIRS[:5])
    context = len(lm.tok_encode(CONTEXT))
    continuations = [len(lm.tok_encode(CONTEXT + choice)) - context for choice in CHOICES]
    once = context + sum(length - 1 for length in continuations)
    assert read == (once if shares else once + 4 * context)


def test_frequencies_that_depend_on_the_length_share_nothing(checkpoint: Checkpoints) -> None:
    lm = StickBreakingLM(
        str(checkpoint("llama")),
        device="cpu",
        dtype="float32",
        max_length=128,
        rope_scaling="dynamic:4",
        training_length=32,
    )
    assert scores(lm, PAIRS) == pytest.approx([scores(lm, [pair])[0] for pair in PAIRS], rel=1e-5)
