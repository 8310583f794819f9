"""Prompts read in pieces: the model sees what it sees of whole prompts, and memory that runs out makes the pieces."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from sbeval.model_adapters.decoding import schedule
from sbeval.model_adapters.decoding.stepper import Stepper
from tests.model_adapters.decoding.slots import DEVICE, adapter, answers
from tests.model_adapters.small import ARCHITECTURES, Checkpoints

VOCABULARY = 61
LONGEST = 30


def stepper_after(model: Any, lengths: list[int], piece_tokens: int | None) -> Stepper:
    """One that has read prompts of these lengths, after longer ones that left their keys behind."""
    slots = list(range(len(lengths)))[::-1]
    stepper = Stepper(model, slots=len(slots) + 1, room_tokens=LONGEST + 2, most_new_tokens=2)
    before = [np.arange(LONGEST) * 7 % VOCABULARY] * len(slots)
    stepper.start(slots, before, [2] * len(slots))
    texts = [np.arange(3, 3 + length) * 5 % VOCABULARY for length in lengths]
    stepper.start(slots, texts, [2] * len(slots), piece_tokens=piece_tokens)
    return stepper


@pytest.mark.parametrize(
    "architecture", ["stickbreaking", "rope", "mixture beside rope", "llama", "mistral", "gemma3", "gpt2"]
)
def test_a_step_after_pieces_has_the_logits_of_one_after_whole_prompts(architecture: str) -> None:
    torch.manual_seed(0)
    config = ARCHITECTURES[architecture](VOCABULARY)
    if architecture == "rope":
        config.sliding_window = 9
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(DEVICE)

    @given(lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=3), piece_tokens=st.integers(1, LONGEST))
    @settings(max_examples=8, deadline=None)
    def holds(lengths: list[int], piece_tokens: int) -> None:
        whole, pieces = (stepper_after(model, lengths, tokens) for tokens in (None, piece_tokens))
        rows = range(len(lengths))
        torch.testing.assert_close(pieces.try_step()[rows], whole.try_step()[rows], rtol=1e-4, atol=1e-5)

    holds()


@pytest.mark.parametrize("architecture", ["stickbreaking", "llama"])
def test_a_prompt_that_does_not_fit_is_read_in_pieces_and_tried_whole_once(
    architecture: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lm = adapter(checkpoint(architecture), batch_size=2)
    expected = answers(lm)
    monkeypatch.setattr(schedule, "FEWEST_PIECE_TOKENS", 4)
    shapes: list[tuple[int, ...]] = []

    def little_memory(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        shape = tuple(keywords["input_ids"].shape)
        if keywords["past_key_values"].filling is not None:
            shapes.append(shape)
            if shape[0] * shape[1] > 11:
                raise torch.OutOfMemoryError

    monkeypatch.setattr("sbeval.model_adapters.decoding.served.why_not_model", lambda hf: None)
    hook = lm.model.base_model.register_forward_pre_hook(little_memory, with_kwargs=True)
    with caplog.at_level(logging.WARNING):
        assert answers(lm) == expected
    hook.remove()
    refused = [rows * tokens for rows, tokens in shapes if rows * tokens > 11]
    assert refused == sorted(refused, reverse=True)
    assert len(refused) == caplog.text.count("tokens at once") <= 4, "what was too much is not tried again"
    assert any(tokens > 1 for _, tokens in shapes)


def test_where_no_piece_fits_running_texts_are_waited_for(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = adapter(checkpoint("llama"), range(100, 150))
    expected = answers(lm)
    monkeypatch.setattr(schedule, "STEPS_BETWEEN_LOOKS", 3)
    start = Stepper.start
    refused = 0

    def beside_none(self: Stepper, slots: list[int], *others: Any, **options: Any) -> None:
        nonlocal refused
        if self._goes_on_B.any():
            refused += 1
            raise torch.OutOfMemoryError
        start(self, slots, *others, **options)

    monkeypatch.setattr(Stepper, "start", beside_none)
    assert answers(lm) == expected
    assert 0 < refused <= 3, "it is not tried again at each look"
