"""Generation in slots: the same answers as transformers' own loop, however many texts share them."""

import logging
from typing import Any

import pytest
import torch
import transformers
from lm_eval.models.huggingface import HFLM

from sbeval.model_adapters.generate.slots import schedule
from sbeval.model_adapters.generate.slots.graph_capture import GraphCapture
from sbeval.model_adapters.generate.slots.stepper import Stepper
from tests.marks import exhaustive
from tests.model_adapters.generate.slots import DEVICE, LINES, SETTING, adapter, answers


def by_transformers(folder: Any, setting: dict[str, Any] = SETTING, prompts: list[str] = LINES) -> list[str]:
    """One prompt at a time in the loop of `generate`, with the released model's own attention."""
    lm = adapter(folder, batch_size=1)
    if lm.config.model_type == "sbeval":
        peer: Any = HFLM(lm.model, tokenizer=lm.tokenizer, batch_size=1)
    else:
        peer = HFLM(str(folder), device=DEVICE, dtype="float32", batch_size=1)
    return answers(peer, setting, prompts)


@pytest.mark.parametrize(
    "architecture",
    [
        *("stickbreaking", "llama", "gemma3", "nape asentmax"),
        *exhaustive(
            "mixture beside rope",
            "gpt2",
            "rope",
            "alibi",
            "gated exclusive",
            "qwen3",
            "mistral",
            "gpt_neox",
            "granite",
            "cohere",
        ),
    ],
)
def test_answers_are_those_of_transformers(architecture, checkpoint, in_slots):
    folder = checkpoint(architecture)
    expected = by_transformers(folder)
    assert answers(adapter(folder)) == expected
    assert in_slots[-1] == 3
    assert len(set(expected)) > 1


@pytest.mark.parametrize("architecture", ["stickbreaking", "llama"])
@pytest.mark.parametrize("batch_size", [2, "auto", *exhaustive(1, 7)])
def test_any_number_of_slots_gives_the_same_answers(batch_size, architecture, checkpoint, in_slots):
    lm = adapter(checkpoint(architecture), batch_size=batch_size)
    assert answers(lm) == answers(adapter(checkpoint(architecture), batch_size=1))
    assert 7 if batch_size == "auto" else batch_size in in_slots


@pytest.mark.parametrize("architecture", ["stickbreaking", *exhaustive("rope", "alibi")])
@pytest.mark.parametrize("batch_size", [3, *exhaustive(1)])
def test_drafts_change_no_answer_and_save_steps(batch_size, architecture, checkpoint, monkeypatch):
    steps: list[int] = []
    original = Stepper.run
    monkeypatch.setattr(Stepper, "run", lambda self, count: (steps.append(count), original(self, count)))
    monkeypatch.setattr(schedule, "STEPS_BETWEEN_LOOKS", 1)
    folder = checkpoint(architecture)
    found: list[list[str]] = []
    counts: list[int] = []
    for drafts in (0, 1, 5):
        steps.clear()
        lm = adapter(folder, range(100, 103), batch_size=batch_size, draft_tokens=drafts)
        found.append(answers(lm, {**SETTING, "max_gen_toks": 60}))
        counts.append(sum(steps))
    assert found[0] == found[1] == found[2]
    assert len(set(map(len, found[0]))) > 1
    assert counts[2] < counts[0], "small models repeat themselves, which drafts foresee"


@pytest.mark.parametrize("setting", [{"max_gen_toks": 1}, {"max_gen_toks": 2}, {"until": ["e"]}, {"min_new_tokens": 9}])
def test_short_answers_stop_where_transformers_stops(setting, checkpoint):
    whole = SETTING | setting
    assert answers(adapter(checkpoint("llama")), whole) == by_transformers(checkpoint("llama"), whole)


def test_a_stop_sequence_of_several_tokens_ends_an_answer(checkpoint):
    folder = checkpoint("llama")
    lm = adapter(folder)
    answer = answers(lm)[0]
    split = len(lm.tokenizer.decode(lm.tokenizer.encode(answer, add_special_tokens=False)[:8]))
    stop = answer[split - 1 : split + 2]  # the end of one token and the beginning of another
    setting = {**SETTING, "until": [stop]}
    found = answers(adapter(folder), setting)
    assert found == by_transformers(folder, setting)
    assert found[0] == answer[: answer.index(stop)]


def test_an_end_token_in_the_first_step_ends_the_answer(checkpoint):
    lm = adapter(checkpoint("stickbreaking"))
    prompt = torch.tensor([lm.tok_encode(LINES[0])], device=DEVICE)
    end = int(lm.model(prompt).logits[0, -1].argmax())
    lm.model.generation_config.eos_token_id = end
    (found,) = answers(lm, SETTING, LINES[:1])
    assert found == lm.tokenizer.decode([end])  # the end itself is kept, as transformers keeps it


@pytest.mark.parametrize("architecture", ["stickbreaking", "llama"])
def test_an_empty_prompt_is_continued_from_the_prefix_token(architecture, checkpoint):
    folder = checkpoint(architecture)
    prompts = ["", LINES[0]]
    lm = adapter(folder)
    prompt = torch.tensor([[lm.prefix_token_id]], device=DEVICE)
    expected = lm.model.generate(prompt, max_new_tokens=20, do_sample=False)[0, 1:]
    assert answers(lm, SETTING, prompts)[0] == lm.tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("scaling", ["dynamic:4", *exhaustive("linear:4", "yarn:4")])
@pytest.mark.parametrize("architecture", ["rope", *exhaustive("llama")])
def test_rope_scaling_holds_for_each_request(scaling, architecture, checkpoint, monkeypatch, in_slots):
    folder = checkpoint(architecture)
    options = {"rope_scaling": scaling, "training_length": 16}
    found = answers(adapter(folder, **options))
    assert in_slots
    monkeypatch.setattr(
        "sbeval.model_adapters.generate.slots.served.why_not_model", lambda opened: "compared with the other way"
    )
    assert found == answers(adapter(folder, **options))
    assert found != answers(adapter(folder))


@pytest.mark.parametrize(
    ("architecture", "setting", "reason"),
    [
        ("llama", {"do_sample": True, "temperature": 1.0}, "tokens are sampled"),
        ("llama", {"num_beams": 2}, "the request sets num_beams"),
        ("gemma2", {}, "its attention needs softcap"),
    ],
)
def test_what_is_not_served_goes_the_old_way_and_the_log_says_so_once(
    architecture, setting, reason, checkpoint, caplog
):
    lm = adapter(checkpoint(architecture))
    with caplog.at_level(logging.WARNING):
        found = [answers(lm, {**SETTING, **setting, "max_gen_toks": 4}, LINES[:2]) for _ in range(2)]
    assert all(isinstance(text, str) for texts in found for text in texts)
    messages = {record.getMessage() for record in caplog.records if "transformers' own loop" in record.getMessage()}
    (message,) = messages
    assert reason in message


@pytest.mark.parametrize(("name", "value"), [("repetition_penalty", 1.5), ("max_new_tokens", 5)])
def test_a_generation_config_that_asks_for_more_goes_the_old_way(name, value, checkpoint, caplog):
    lm = adapter(checkpoint("llama"))
    lm.model.generation_config = transformers.GenerationConfig(
        **{name: value}, no_repeat_ngram_size=0, num_beams=1, eos_token_id=1, pad_token_id=2
    )
    answers(lm, SETTING, LINES[:1])
    assert f"the model's generation config sets {name}" in caplog.text


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are recorded on a GPU")
@pytest.mark.parametrize("architecture", ["stickbreaking", "rope", "llama", "mistral", "alibi", "nape asentmax"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_steps_replayed_as_a_graph_give_the_answers_of_steps_without(batch_size, architecture, checkpoint, monkeypatch):
    recorded: list[bool] = []
    capture = Stepper.capture

    def seen(self: Stepper, graph_capture: GraphCapture) -> None:
        capture(self, graph_capture)
        recorded.append(self._graph is not None)

    monkeypatch.setattr(Stepper, "capture", seen)
    found = answers(adapter(checkpoint(architecture), batch_size=batch_size))
    assert recorded == [True]
    monkeypatch.setattr(Stepper, "capture", lambda *_: None)
    assert found == answers(adapter(checkpoint(architecture), batch_size=batch_size))


def test_answers_given_before_an_interrupt_are_kept(checkpoint, monkeypatch):
    lm = adapter(checkpoint("llama"), batch_size=2)
    kept: list[str] = []
    monkeypatch.setattr(lm.session.cache_hook, "add_partial", lambda *args: kept.append(args[-1]))
    steps = 0
    run = Stepper.run

    def interrupted(self: Stepper, count: int) -> None:
        nonlocal steps
        steps += 1
        if steps > 4:
            raise KeyboardInterrupt
        run(self, count)

    implementation = lm.model.config._attn_implementation
    with monkeypatch.context() as patched:
        patched.setattr(Stepper, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answers(lm)
    assert lm.model.config._attn_implementation == implementation
    assert 0 < len(kept) < len(LINES)
    assert set(kept) <= set(answers(lm))
