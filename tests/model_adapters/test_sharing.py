"""Inputs that begin alike: the same scores as apart, and what they share read once where the model allows it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.model_adapters.sharing import Worthwhile, shared_prefixes
from tests.model_adapters.small import Checkpoints, english, instances, load_lm, tokens_read

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
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "granite", "mistral", "stickbreaking", "rope"])
def test_inputs_score_as_they_do_apart(
    architecture: str, pairs: list[tuple[str, str]], batch_size: int, checkpoint: Checkpoints
) -> None:
    lm = load(checkpoint, architecture, batch_size=batch_size)
    together = scores(lm, pairs)
    apart = [scores(lm, [pair])[0] for pair in pairs]
    assert [greedy for _, greedy in together] == [greedy for _, greedy in apart]
    assert [score for score, _ in together] == pytest.approx([score for score, _ in apart], rel=1e-5)


@pytest.mark.parametrize(("architecture", "shares"), [("llama", True), ("stickbreaking", True), ("mistral", False)])
def test_what_inputs_share_is_read_once(architecture: str, shares: bool, checkpoint: Checkpoints) -> None:
    lm = load(checkpoint, architecture)
    for pairs in (ONE_CONTEXT[:5], SAME_EXAMPLES[:12]):
        inputs = model_inputs(lm, pairs)
        whole = sum(map(len, inputs))
        columns = [len(set(column)) == 1 for column in zip(*inputs, strict=False)]
        once = min([*inputs.values(), columns.index(False) if False in columns else len(columns)])
        assert once > 32
        with tokens_read(lm) as read:
            scores(lm, pairs)
        assert sum(read) == (whole - (len(inputs) - 1) * once if shares else whole)


def test_frequencies_that_depend_on_the_length_share_nothing(checkpoint: Checkpoints) -> None:
    lm = load(checkpoint, "llama", rope_scaling="dynamic:4", training_length=32)
    together, apart = scores(lm, ONE_CONTEXT), [scores(lm, [pair])[0] for pair in ONE_CONTEXT]
    assert [score for score, _ in together] == pytest.approx([score for score, _ in apart], rel=1e-5)


@pytest.mark.parametrize("fails", ["prefix", "rest"])
def test_without_memory_for_a_prefix_inputs_run_whole_and_none_twice(fails: str, checkpoint: Checkpoints) -> None:
    lm = load(checkpoint, "llama")
    expected = scores(lm, SAME_EXAMPLES)
    whole = sum(map(len, model_inputs(lm, SAME_EXAMPLES)))
    calls = 0

    def memory_runs_out(_module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal calls
        calls += kwargs.get("past_key_values") is not None
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
def test_groups_share_their_prefix_and_are_worth_it(
    inputs: list[list[int]], prefix_tokens: int, saved_tokens: int, random: Any
) -> None:
    scored_from = [random.randrange(len(own)) for own in inputs]
    groups = shared_prefixes(inputs, scored_from, Worthwhile(prefix_tokens, saved_tokens))
    members = [index for group in groups for index in group.members]
    assert len(members) == len(set(members))
    for length, own in groups:
        assert len({tuple(inputs[index][:length]) for index in own}) == 1
        assert prefix_tokens <= length <= min(scored_from[index] for index in own)
        assert (len(own) - 1) * length >= max(1, saved_tokens)


def test_the_examples_of_many_questions_are_found_as_one_prefix() -> None:
    examples = list(range(100))
    inputs = [[*examples, 1000 + question, *range(question % 7), choice] for question in range(20) for choice in (1, 2)]
    (group,) = shared_prefixes(inputs, [len(own) - 1 for own in inputs], Worthwhile(32, 32))
    assert group.length == 100
    assert sorted(group.members) == list(range(40))
