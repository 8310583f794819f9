"""Which texts share slots, and how many, prompts read whole or in chunks: the same answers, nothing generated twice."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from sbeval.model_adapters.generate.slots import schedule
from sbeval.model_adapters.generate.slots.stepper import Stepper
from tests.marks import exhaustive
from tests.model_adapters.generate.slots import DEVICE, LINES, adapter, answers
from tests.model_adapters.small import ARCHITECTURES, cache_argument, generated, instances


@pytest.mark.parametrize(("limit", "slots"), [({"max_batch_size": 2}, 2), ({"max_batch_tokens": 300}, 4)])
def test_limits_of_automatic_batches_hold_for_slots(limit, slots, checkpoint, in_slots):
    folder = checkpoint("llama")
    prompts = [line[:40] for line in LINES]  # room for 64 tokens each
    found = answers(adapter(folder, batch_size="auto", **limit), prompts=prompts)
    assert in_slots[-1] == slots
    assert found == answers(adapter(folder, batch_size="auto"), prompts=prompts)
    assert in_slots[-1] == len(prompts)


def test_a_text_that_is_done_makes_room_for_the_next_prompt(checkpoint, monkeypatch, in_slots):
    folder = checkpoint("llama")
    monkeypatch.setattr(schedule, "STEPS_BETWEEN_LOOKS", 3)
    found = answers(adapter(folder, range(100, 150)))
    assert found == answers(adapter(folder, range(100, 150), batch_size=1))
    assert in_slots == [9, 3, 9, 1], "one stepper to try the model out and one to generate, for each adapter"
    assert len({len(answer) for answer in found}) > 1


@pytest.mark.parametrize("model", ["stickbreaking", "rope", "llama"])
def test_a_text_whose_keys_are_nan_leaves_nothing_to_the_next_in_its_slot(model, checkpoint):
    lm = adapter(checkpoint(model), batch_size=2, non_finite="null")
    embeddings = lm.model.get_input_embeddings()
    mark = lm.tok_encode("~")[-1]
    embeddings.register_forward_hook(lambda _, ids, found: found.masked_fill((ids[0] == mark)[..., None], float("nan")))
    prompts = [line[:60] for line in LINES]
    expected = answers(lm, prompts=prompts)
    assert all(expected)
    longest = max(prompts, key=lambda prompt: len(lm.tok_encode(prompt)))
    found = answers(lm, prompts=[longest + "~ab", *prompts])  # near the end, where a stick still reaches it
    assert found[1:] == expected
    assert not found[0]


@pytest.mark.parametrize("drafts", [3, *exhaustive(0)])
@pytest.mark.parametrize("batch_size", [3, *exhaustive(1)])
def test_requests_of_different_limits_and_stops_share_a_run(batch_size, drafts, checkpoint, in_slots):
    folder = checkpoint("rope")
    settings: list[dict[str, Any]] = [
        *({"until": ["\n\n"], "max_gen_toks": tokens} for tokens in (1, 7, 20, 33)),
        {"until": ["e", "is"], "max_gen_toks": 20},
        {"until": [], "max_gen_toks": 20, "min_new_tokens": 6},
        {"until": ["t"], "max_gen_toks": 9, "min_new_tokens": 3, "temperature": 0.0},
    ]
    asked = [(line, setting) for line in LINES[:4] for setting in settings]
    in_slots.clear()
    found = generated(adapter(folder, range(100, 140), batch_size=batch_size, draft_tokens=drafts), asked)
    assert in_slots == [9, batch_size], "one to try the model out, and one for all requests"
    alone = adapter(folder, range(100, 140), batch_size=1)
    for number, setting in enumerate(settings):
        assert found[number :: len(settings)] == generated(alone, [(line, setting) for line in LINES[:4]])
    assert len({len(answer) for answer in found}) > 3


@pytest.mark.exhaustive
def test_memory_that_runs_out_halves_the_slots_and_generates_nothing_twice(checkpoint, monkeypatch, in_slots):
    folder = checkpoint("llama")
    expected = answers(adapter(folder, batch_size=1))
    lm = adapter(folder, batch_size=4)
    run, start = Stepper.run, Stepper.start
    given: list[str] = []
    monkeypatch.setattr(lm.session.cache_hook, "add_partial", lambda *args: given.append(args[-1]))

    def too_large(self: Stepper, slots: Any, *others: Any, **options: Any) -> None:
        if len(slots) > 1:
            raise torch.OutOfMemoryError
        start(self, slots, *others, **options)

    def without_memory(self: Stepper, steps: int) -> None:
        if self.cache.slots > 2:
            raise torch.OutOfMemoryError
        run(self, steps)

    monkeypatch.setattr(Stepper, "start", too_large)
    monkeypatch.setattr(Stepper, "run", without_memory)
    monkeypatch.setattr("sbeval.model_adapters.generate.slots.served.why_not_model", lambda opened: None)
    in_slots.clear()
    assert answers(lm) == expected
    assert (in_slots, sorted(given)) == ([4, 2], sorted(expected))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("architecture", "drafts", "after"),
    [("stickbreaking", 3, 6), *exhaustive(("stickbreaking", 3, 17), ("rope", 0, 1))],
)
def test_memory_that_runs_out_in_a_step_costs_no_token(after, architecture, drafts, checkpoint, monkeypatch):
    setting: dict[str, Any] = {"until": ["zzz"], "max_gen_toks": 40, "min_new_tokens": 9}
    lm = adapter(checkpoint(architecture), range(100, 110), batch_size=4, draft_tokens=drafts)
    answers(lm)  # the model has been tried out
    chosen, steps = 0, 0
    logits, take = Stepper._logits, Stepper._take

    def counted(self: Stepper, logits_BV: torch.Tensor, taken_B: torch.Tensor) -> None:
        nonlocal chosen
        chosen += int(taken_B.sum())
        take(self, logits_BV, taken_B)

    monkeypatch.setattr(Stepper, "_take", counted)
    expected = answers(lm, setting)
    once, chosen = chosen, 0

    def too_large(self: Stepper, token_BT: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        if self.cache.slots > 1:  # it runs out with four, and after as many steps with two
            steps += 1
            if steps % (after + 1) == 0:
                raise torch.OutOfMemoryError
        return logits(self, token_BT)

    monkeypatch.setattr("sbeval.model_adapters.generate.slots.served.why_not_model", lambda opened: None)
    monkeypatch.setattr(Stepper, "_logits", too_large)
    assert answers(lm, setting) == expected
    assert steps
    assert chosen == once
    assert len({len(answer) for answer in expected}) > 1


def test_the_last_of_several_texts_goes_on_alone_where_memory_runs_out(checkpoint, monkeypatch, in_slots):
    lm = adapter(checkpoint("llama"), batch_size=4)
    settings = [{"until": ["\n\n"], "max_gen_toks": tokens} for tokens in (3, 3, 3, 40)]
    asked = instances("generate_until", list(zip(LINES[:4], settings, strict=True)))
    expected = lm.generate_until(asked, disable_tqdm=True)
    logits = Stepper._logits

    def too_large(self: Stepper, token_BT: torch.Tensor) -> torch.Tensor:
        if self.cache.slots > 1 and self._is_active_B.sum() == 1:
            raise torch.OutOfMemoryError
        return logits(self, token_BT)

    monkeypatch.setattr("sbeval.model_adapters.generate.slots.served.why_not_model", lambda opened: None)
    monkeypatch.setattr(schedule, "STEPS_BETWEEN_LOOKS", 1)
    monkeypatch.setattr(Stepper, "_logits", too_large)
    in_slots.clear()
    assert lm.generate_until(asked, disable_tqdm=True) == expected
    assert in_slots == [4, 1]


@pytest.mark.parametrize("architecture", ["rope", "llama"])
@pytest.mark.parametrize(
    ("scaling", "runs"),
    [
        ("dynamic:4", 4),  # the short ones, and one for each longer length
        *exhaustive(
            (
                {
                    "rope_type": "longrope",
                    "factor": 4.0,
                    "short_factor": [1.0] * 4,
                    "long_factor": [1.0, 2.0, 3.0, 4.0],
                },
                2,
            )
        ),
    ],
    ids=str,
)
def test_texts_of_different_lengths_share_slots_where_their_rope_frequencies_are_the_same(
    scaling, runs, architecture, checkpoint, in_slots
):
    folder = checkpoint(architecture)
    prompts = [LINES[5][:length] for length in (4, 7, 10, 25, 35, 45)]
    options = {"rope_scaling": scaling, "training_length": 32}
    in_slots.clear()
    found = answers(adapter(folder, batch_size=6, **options), prompts=prompts)
    assert len(in_slots) == 1 + runs, "one to try the model out"
    assert found == [answers(adapter(folder, **options), prompts=[prompt])[0] for prompt in prompts]
    lengths = {len(adapter(folder).tok_encode(prompt)) + 20 for prompt in prompts}
    assert sum(length > 32 for length in lengths) == 3


VOCABULARY = 61
LONGEST = 30


def stepper_after(model: Any, lengths: list[int], chunk_tokens: int | None) -> Stepper:
    """One that has read prompts of these lengths, after longer ones that left their keys behind."""
    slots = list(range(len(lengths)))[::-1]
    stepper = Stepper(model, slots=len(slots) + 1, room_tokens=LONGEST + 2, most_new_tokens=2)
    before = [np.arange(LONGEST) * 7 % VOCABULARY] * len(slots)
    stepper.start(slots, before, [2] * len(slots))
    texts = [np.arange(3, 3 + length) * 5 % VOCABULARY for length in lengths]
    stepper.start(slots, texts, [2] * len(slots), chunk_tokens=chunk_tokens)
    return stepper


@pytest.mark.parametrize(
    "architecture", ["stickbreaking", "rope", "mixture beside rope", "llama", "mistral", "gemma3", "gpt2"]
)
def test_a_step_after_pieces_has_the_logits_of_one_after_whole_prompts(architecture):
    torch.manual_seed(0)
    config = ARCHITECTURES[architecture](VOCABULARY)
    if architecture == "rope":
        config.sliding_window = 9
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(DEVICE)

    @given(lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=3), chunk_tokens=st.integers(1, LONGEST))
    @settings(max_examples=8, deadline=None)
    def holds(lengths: list[int], chunk_tokens: int) -> None:
        whole, chunks = (stepper_after(model, lengths, tokens) for tokens in (None, chunk_tokens))
        rows = range(len(lengths))
        torch.testing.assert_close(chunks.try_step()[rows], whole.try_step()[rows], rtol=1e-4, atol=1e-5)

    holds()


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["stickbreaking", *exhaustive("llama")])
def test_a_prompt_that_does_not_fit_is_read_in_pieces_and_tried_whole_once(
    architecture, checkpoint, monkeypatch, caplog
):
    lm = adapter(checkpoint(architecture), batch_size=2, self_test=False)
    expected = answers(lm)
    monkeypatch.setattr(schedule, "FEWEST_CHUNK_TOKENS", 4)
    shapes: list[tuple[int, ...]] = []

    def little_memory(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        shape = tuple(keywords["input_ids"].shape)
        if cache_argument(keywords).filling is not None:
            shapes.append(shape)
            if shape[0] * shape[1] > 11:
                raise torch.OutOfMemoryError

    monkeypatch.setattr("sbeval.model_adapters.generate.slots.served.why_not_model", lambda opened: None)
    hook = lm.model.base_model.register_forward_pre_hook(little_memory, with_kwargs=True)
    with caplog.at_level(logging.WARNING):
        assert answers(lm) == expected
    hook.remove()
    refused = [rows * tokens for rows, tokens in shapes if rows * tokens > 11]
    assert refused == sorted(refused, reverse=True)
    assert len(refused) == caplog.text.count("tokens at once") <= 4, "what was too much is not tried again"
    assert any(tokens > 1 for _, tokens in shapes)


def test_where_no_piece_fits_texts_are_waited_for(checkpoint, monkeypatch):
    lm = adapter(checkpoint("llama"), range(100, 150))
    expected = answers(lm)
    monkeypatch.setattr(schedule, "STEPS_BETWEEN_LOOKS", 3)
    start = Stepper.start
    refused = 0

    def beside_none(self: Stepper, slots: list[int], *others: Any, **options: Any) -> None:
        nonlocal refused
        if self._is_active_B.any():
            refused += 1
            raise torch.OutOfMemoryError
        start(self, slots, *others, **options)

    monkeypatch.setattr(Stepper, "start", beside_none)
    assert answers(lm) == expected
    assert 0 < refused <= 3, "it is not tried again at each look"
